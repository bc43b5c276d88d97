r"""Transcripts: every prompt with the target's own greedy continuation, as token ids.

Under greedy verification speculative decoding emits exactly this continuation, so a transcript is all
that scoring a drafter needs from the target's decoding.

    prompt ids                     response ids
    <|im_start|> user ... assistant \n | The answer is 4 . <|im_end|>
                                       ^ the first token of the response is the first anchor

A response ends with a stop token (which belongs to it) or at `max_new_tokens`. Where it comes from is a
`Source`: the target on this machine (below), a server of it (`servers`), or the prompt file (`given`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from dflash_core import progress
from dflash_core.store import Artifact, Store, digest
from dflash_core.target.loading import Target
from dflash_core.target.rendering import RenderedPrompt, Renderer, Rendering, load_tokenizer, render_prompts

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "FILE_NAME",
    "KIND",
    "TRANSCRIPTS_VERSION",
    "Job",
    "LocalSource",
    "RenderedPrompt",
    "Rendering",
    "Source",
    "Transcript",
    "Written",
    "cut",
    "generate",
    "load_tokenizer",
    "read_transcripts",
    "render_prompts",
    "transcripts_digest",
    "transcripts_key",
    "write_transcripts",
]

TRANSCRIPTS_VERSION = 1
"""Raised when the same prompts and target would give other transcripts."""
KIND = "transcripts"
FILE_NAME = "transcripts.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class Transcript:
    """A prompt and the target's own continuation of it."""

    id: str
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    stop_reason: str
    """`stop` (its last token is a stop token) or `length`."""

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and response together."""
        return len(self.prompt_ids) + len(self.response_ids)


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """What a source wrote, in the order of the prompt file, and what is to be known about it."""

    transcripts: list[Transcript]
    facts: dict[str, Any]
    """Plain data for the artifact's meta: `sampling`, `compute_dtype`, `warnings` and what the source adds."""


class Job:
    """What a source is asked to continue."""

    def __init__(self, target: Target, rendering: Rendering, *, max_new_tokens: int, folder: Path) -> None:
        self.target = target
        self.rendering = rendering
        self.max_new_tokens = max_new_tokens
        self.folder = folder
        """Outlives a killed or failed attempt; for what a source wants to keep for the next one."""
        self.renderer = Renderer(target, thinking=rendering.thinking, max_new_tokens=max_new_tokens)
        self.num_prompts = len(rendering.prompts) + len(rendering.later)

    def by_turns(self, complete: Callable[[Sequence[RenderedPrompt], int], list[Transcript]]) -> list[Transcript]:
        """Have every prompt continued: first turns together, then the turns that follow them, and so on.

        Args:
            complete: continues prompts, in the order given; told how many were continued before.

        Returns:
            One transcript per prompt and turn, in the order of the prompt file.
        """
        follow = {turn.follows: turn for turn in self.rendering.later}
        done: dict[str, Transcript] = {}
        wave = list(self.rendering.prompts)
        while wave:
            written = complete(wave, len(done))
            done |= {transcript.id: transcript for transcript in written}
            wave = [
                self.renderer.render_after(follow[prompt.id], prompt, done[prompt.id].response_ids)
                for prompt in wave
                if prompt.id in follow
            ]
        ordered = []
        for prompt in self.rendering.prompts:
            name: str | None = prompt.id
            while name is not None:
                ordered.append(done[name])
                name = follow[name].id if name in follow else None
        return ordered


class Source(Protocol):
    """Where continuations come from."""

    @property
    def name(self) -> str:
        """What `completions.source` calls it."""

    def key_parts(self) -> list[Any]:
        """Return what decides the text beside target, prompts, stop tokens and limit, as plain data."""

    def write(self, job: Job) -> Written:
        """Continue every prompt of the job."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalSource:
    """The target itself, on this machine's CPU."""

    batch_size: int
    """Prompts continued at once."""
    compute_dtype: str
    """`float32` or `bfloat16`."""

    @property
    def name(self) -> str:
        """Return `local`."""
        return "local"

    def key_parts(self) -> list[Any]:
        """Return batch size and dtype: other batches round otherwise."""
        return [self.batch_size, self.compute_dtype, "greedy"]

    def write(self, job: Job) -> Written:
        """Load the target and have it continue every prompt."""
        from dflash_core.target.runtime import load_model

        model = load_model(job.target, self.compute_dtype)

        def complete(wave: Sequence[RenderedPrompt], num_before: int) -> list[Transcript]:
            return generate(
                model,
                wave,
                stop_token_ids=job.rendering.stop_token_ids,
                max_new_tokens=job.max_new_tokens,
                batch_size=self.batch_size,
                num_before=num_before,
                num_prompts=job.num_prompts,
            )

        facts = {"sampling": "greedy", "compute_dtype": self.compute_dtype, "warnings": []}
        return Written(transcripts=job.by_turns(complete), facts=facts)


def transcripts_key(target: Target, rendering: Rendering, source: Source, *, max_new_tokens: int) -> str:
    """Return the key of the transcripts: the ids read, the model, and how it wrote.

    Later turns have no ids yet; what will decide them is their text, the template and the tokenizer.
    """
    prompts = [[prompt.id, list(prompt.prompt_ids)] for prompt in rendering.prompts]
    stop = list(rendering.stop_token_ids)
    parts = [target.identity, prompts, stop, max_new_tokens, *source.key_parts()]
    if rendering.later:
        turns = [[turn.id, turn.follows, turn.messages, turn.prompt_ids] for turn in rendering.later]
        texts = [prompt.messages for prompt in rendering.prompts]
        parts += [turns, texts, rendering.template_digest, rendering.tokenizer_digest, rendering.thinking]
    return digest(KIND, TRANSCRIPTS_VERSION, *parts)


def write_transcripts(
    store: Store, target: Target, rendering: Rendering, source: Source, *, max_new_tokens: int
) -> Artifact:
    """Return the transcripts from the store, or have them written.

    Args:
        store: where they are kept.
        target: the model that continues the prompts.
        rendering: the prompts as token ids.
        source: who writes.
        max_new_tokens: limit of one response.

    Returns:
        Artifact of kind `transcripts`; `meta` holds digest, counts, what decided the rendering and the
        facts of the source.
    """
    key = transcripts_key(target, rendering, source, max_new_tokens=max_new_tokens)

    def write(folder: Path) -> dict[str, Any]:
        with store.unfinished(KIND, key) as unfinished:
            written = source.write(Job(target, rendering, max_new_tokens=max_new_tokens, folder=unfinished))
        transcripts = written.transcripts
        lines = [json.dumps(asdict(transcript)) for transcript in transcripts]
        (folder / FILE_NAME).write_text("\n".join(lines) + "\n", encoding="utf-8")
        return {
            "digest": transcripts_digest(transcripts),
            "num_transcripts": len(transcripts),
            "num_tokens": sum(transcript.num_tokens for transcript in transcripts),
            "target": target.name,
            "target_identity": target.identity,
            "template_digest": rendering.template_digest,
            "tokenizer_digest": rendering.tokenizer_digest,
            "stop_token_ids": list(rendering.stop_token_ids),
            "thinking": rendering.thinking,
            "max_new_tokens": max_new_tokens,
            "source": source.name,
            **written.facts,
        }

    return store.build(KIND, key, write)


def read_transcripts(artifact: Artifact) -> list[Transcript]:
    """Read the transcripts of an artifact, in the order in which hidden states are concatenated."""
    transcripts = []
    for line in artifact.file(FILE_NAME).read_text(encoding="utf-8").splitlines():
        data = json.loads(line)
        transcripts.append(
            Transcript(
                id=data["id"],
                prompt_ids=tuple(data["prompt_ids"]),
                response_ids=tuple(data["response_ids"]),
                stop_reason=data["stop_reason"],
            )
        )
    return transcripts


def transcripts_digest(transcripts: Sequence[Transcript]) -> str:
    """Return the digest of what was written: ids and tokens, in order."""
    return digest([[t.id, list(t.prompt_ids), list(t.response_ids), t.stop_reason] for t in transcripts])


def generate(
    model: Any,
    prompts: Sequence[RenderedPrompt],
    *,
    stop_token_ids: Sequence[int],
    max_new_tokens: int,
    batch_size: int,
    num_before: int = 0,
    num_prompts: int | None = None,
) -> list[Transcript]:
    """Continue prompts greedily, in batches of similar length, left-padded.

    Args:
        model: a transformers causal language model.
        prompts: what to continue.
        stop_token_ids: tokens that end a response and belong to it.
        max_new_tokens: limit of one response.
        batch_size: prompts in one batch.
        num_before: prompts that were continued before these, for the progress.
        num_prompts: all prompts there are, for the progress; None takes these alone.

    Returns:
        One transcript per prompt, in the order given.
    """
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index].prompt_ids))
    transcripts: dict[int, Transcript] = {}
    total = (len(prompts) if num_prompts is None else num_prompts) * max_new_tokens
    for first in range(0, len(order), batch_size):
        batch = order[first : first + batch_size]
        done = (num_before + first) * max_new_tokens
        counter = _StepCounter(done, len(batch), total)
        responses = _generate_batch(
            model, [prompts[index].prompt_ids for index in batch], stop_token_ids, max_new_tokens, counter
        )
        for index, response in zip(batch, responses, strict=True):
            transcripts[index] = cut(prompts[index], response, stop_token_ids)
        progress.report(KIND, min(total, done + len(batch) * max_new_tokens), total, unit="tokens")
    return [transcripts[index] for index in range(len(prompts))]


def _generate_batch(
    model: Any,
    prompts: Sequence[Sequence[int]],
    stop_token_ids: Sequence[int],
    max_new_tokens: int,
    counter: Any,
) -> list[list[int]]:
    import torch
    from transformers import GenerationConfig

    longest = max(len(ids) for ids in prompts)
    # Any id will do for padding: padded places are masked out.
    pad = stop_token_ids[0] if stop_token_ids else 0
    ids_BT = torch.tensor([[pad] * (longest - len(ids)) + list(ids) for ids in prompts])
    mask_BT = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts])
    settings = GenerationConfig(
        do_sample=False,
        num_beams=1,
        max_new_tokens=max_new_tokens,
        eos_token_id=list(stop_token_ids) or None,
        pad_token_id=pad,
    )
    # The model's own generation_config (penalties, sampling) would make the continuation not greedy.
    model.generation_config = settings
    with torch.inference_mode():
        output_BT = model.generate(
            input_ids=ids_BT, attention_mask=mask_BT, generation_config=settings, stopping_criteria=[counter]
        )
    return output_BT[:, longest:].tolist()


class _StepCounter:
    """A stopping criterion that never stops; it reports the progress of one batch."""

    def __init__(self, done: int, batch_size: int, total: int) -> None:
        self._done = done
        self._batch_size = batch_size
        self._total = total

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        import torch

        self._done += self._batch_size
        progress.report(KIND, self._done, self._total, unit="tokens")
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def cut(prompt: RenderedPrompt, response: Sequence[int], stop_token_ids: Sequence[int]) -> Transcript:
    """End a response with its first stop token; the rest is padding of the batch."""
    stops = set(stop_token_ids)
    for place, token in enumerate(response):
        if token in stops:
            return Transcript(
                id=prompt.id,
                prompt_ids=prompt.prompt_ids,
                response_ids=tuple(response[: place + 1]),
                stop_reason="stop",
            )
    return Transcript(id=prompt.id, prompt_ids=prompt.prompt_ids, response_ids=tuple(response), stop_reason="length")
