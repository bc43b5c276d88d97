"""SGLang's own `/generate`: token ids in, token ids out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dflash_core.errors import ServerError
from dflash_core.target.rendering import RenderedPrompt
from dflash_core.target.servers.protocol import SAMPLING, Answer, Call, Limits, count, short, text_of, token_ids


@dataclass(frozen=True, slots=True)
class SGLang:
    """The native protocol; it names the stop token, and old versions leave it out of `output_ids`."""

    api: str = "sglang"
    takes_ids: bool = True

    def call(self, prompt: RenderedPrompt, model: str, limits: Limits) -> Call:
        """Return the request for one prompt; the server serves one model and is not told which."""
        sampling = SAMPLING | {
            "max_new_tokens": limits.max_new_tokens,
            "stop_token_ids": list(limits.stop_token_ids),
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
            "no_stop_trim": True,
            "repetition_penalty": 1.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
        }
        return Call(path="/generate", body={"input_ids": list(prompt.prompt_ids), "sampling_params": sampling})

    def read(self, data: Any) -> Answer:
        """Read `output_ids` and `meta_info`."""
        if isinstance(data, list) and len(data) == 1:
            data = data[0]
        meta = data.get("meta_info") if isinstance(data, dict) else None
        if not isinstance(meta, dict):
            raise ServerError(f"returned an empty completion: {short(data)}")
        reason, matched = _reason(meta.get("finish_reason"))
        text = text_of(data.get("text"))
        ids = token_ids(data.get("output_ids"))
        if ids is None and text is not None and isinstance(matched, str):
            # Untrimmed, the text ends with what stopped it.
            text = text.removesuffix(matched)
        return Answer(
            token_ids=ids,
            text=text,
            text_has_special_tokens=True,
            finish_reason=reason,
            matched=matched,
            num_completion_tokens=count(meta, "completion_tokens"),
            num_prompt_tokens=count(meta, "prompt_tokens"),
            prompt_ids=None,
        )


def _reason(reason: Any) -> tuple[str | None, int | str | None]:
    """Return why it ended and what stopped it; old versions give a word, newer ones an object."""
    if isinstance(reason, Mapping):
        kind, matched = reason.get("type"), reason.get("matched")
        named = f"{kind}: {reason['message']}" if kind == "abort" and reason.get("message") else kind
        return text_of(named), matched if isinstance(matched, int | str) else None
    return text_of(reason), None
