"""vLLM's `/v1/completions`: token ids in, and token ids out where it returns them.

`return_token_ids` is answered with null by some models, and not at all by old versions; the text, with its
special tokens left in, is read then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dflash_core.target.rendering import RenderedPrompt
from dflash_core.target.servers.protocol import SAMPLING, Answer, Call, Limits, count, only_choice, text_of, token_ids


@dataclass(frozen=True, slots=True)
class VLLM:
    """The completions protocol with vLLM's additions."""

    api: str = "vllm"
    takes_ids: bool = True

    def call(self, prompt: RenderedPrompt, model: str, limits: Limits) -> Call:
        """Return the request for one prompt."""
        body = SAMPLING | {
            "model": model,
            "prompt": list(prompt.prompt_ids),
            "max_tokens": limits.max_new_tokens,
            "stop_token_ids": list(limits.stop_token_ids),
            "add_special_tokens": False,
            "return_token_ids": True,
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
            "repetition_penalty": 1.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
        }
        return Call(path="/v1/completions", body=body)

    def read(self, data: Any) -> Answer:
        """Read the choice; `stop_reason` is null where the tokenizer's own end of text stopped it."""
        choice = only_choice(data)
        matched = choice.get("stop_reason")
        # Newer versions give the prompt's ids with the choice, older ones beside it.
        prompt_ids = token_ids(choice.get("prompt_token_ids"))
        return Answer(
            token_ids=token_ids(choice.get("token_ids")),
            text=text_of(choice.get("text")),
            text_has_special_tokens=True,
            finish_reason=text_of(choice.get("finish_reason")),
            matched=matched if isinstance(matched, int | str) else None,
            num_completion_tokens=count(data, "usage", "completion_tokens"),
            num_prompt_tokens=count(data, "usage", "prompt_tokens"),
            prompt_ids=prompt_ids if prompt_ids is not None else token_ids(data.get("prompt_token_ids")),
            model=text_of(data.get("model")),
        )
