"""Continuations that the prompt file gives: what a served target wrote somewhere else, at some other time.

They are taken as the target's own greedy text. Whether they are is judged where hidden states are taken:
there the target's own choice is known at every place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dflash_core import progress
from dflash_core.errors import PromptError
from dflash_core.target.prompts import Prompt
from dflash_core.target.rendering import RenderedPrompt
from dflash_core.target.retokenising import retokenise
from dflash_core.target.transcripts import KIND, Job, Transcript, Written, cut


@dataclass(frozen=True, kw_only=True, slots=True)
class FileSource:
    """The `response` or `response_ids` of every prompt."""

    prompts: tuple[Prompt, ...]

    def __post_init__(self) -> None:
        """Refuse, before anything is rendered, a file that lacks an answer."""
        for prompt in self.prompts:
            if prompt.response is None and prompt.response_ids is None:
                raise PromptError(
                    f"{prompt.where}: prompt {prompt.id!r} has no `response` and no `response_ids`, "
                    f"which completions.source = 'file' needs"
                )

    @property
    def name(self) -> str:
        """Return `file`."""
        return "file"

    def key_parts(self) -> list[Any]:
        """Return the answers themselves."""
        return ["file", [[prompt.response, prompt.response_ids] for prompt in self.prompts]]

    def write(self, job: Job) -> Written:
        """Turn every given answer into a transcript.

        An answer ends with its first stop token, or at `max_new_tokens`; one without a stop token counts as
        cut off (`length`), wherever it ends.

        Raises:
            PromptError: an answer holds what the target cannot have emitted.
        """
        of_id = {prompt.id: prompt for prompt in self.prompts}
        stops = job.rendering.stop_token_ids

        def complete(wave: Sequence[RenderedPrompt], num_before: int) -> list[Transcript]:
            written = []
            for place, rendered in enumerate(wave, num_before + 1):
                ids = _answer_ids(job, rendered, of_id[rendered.id])
                written.append(cut(rendered, ids[: job.max_new_tokens], stops))
                progress.report(KIND, place, job.num_prompts, unit="transcripts")
            return written

        facts: dict[str, Any] = {
            "sampling": "given",
            "compute_dtype": None,
            "num_retokenised": sum(prompt.response_ids is None for prompt in self.prompts),
            "warnings": [],
        }
        return Written(transcripts=job.by_turns(complete), facts=facts)


def _answer_ids(job: Job, rendered: RenderedPrompt, prompt: Prompt) -> tuple[int, ...]:
    vocab_size = job.target.config.vocab_size
    if prompt.response_ids is not None:
        if max(prompt.response_ids) >= vocab_size:
            raise PromptError(
                f"{prompt.where}: `response_ids` of {prompt.id!r} holds {max(prompt.response_ids)}, the target's "
                f"vocabulary ends at {vocab_size - 1}"
            )
        return prompt.response_ids
    assert prompt.response is not None
    tokenizer = job.renderer.tokenizer
    found = retokenise(tokenizer, rendered.prompt_ids, prompt.response, has_special_tokens=True)
    if found is None or not found.ids:
        raise PromptError(
            f"{prompt.where}: `response` of {prompt.id!r} does not come back from the target's tokenizer as it was "
            f"written, so the target cannot have emitted it; give `response_ids`, or correct the text"
        )
    return found.ids
