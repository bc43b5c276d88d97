"""What the servers' protocols have in common: a call to make, and an answer to read.

A `Completer` is pure: it knows paths and fields, never the network. Everything is greedy: temperature 0,
and every penalty that a model's generation_config.json may ask for is set back by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from dflash_core.errors import ServerError
from dflash_core.target.rendering import RenderedPrompt

SAMPLING: dict[str, float] = {"temperature": 0}
"""Recorded with the transcripts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One request for a completion."""

    path: str
    body: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What a server said; what it did not say is None."""

    token_ids: tuple[int, ...] | None
    text: str | None
    text_has_special_tokens: bool
    """Whether special tokens were left in the text."""
    finish_reason: str | None
    matched: int | str | None
    """The stop token (or text) that ended it, where the server names it."""
    num_completion_tokens: int | None
    """Tokens emitted, as the server counts them: the stop token may be among them."""
    num_prompt_tokens: int | None
    prompt_ids: tuple[int, ...] | None
    model: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """When a continuation ends."""

    max_new_tokens: int
    stop_token_ids: tuple[int, ...]


class Completer(Protocol):
    """One protocol."""

    @property
    def api(self) -> str:
        """Return what `completions.api` calls it."""

    @property
    def takes_ids(self) -> bool:
        """Tell whether it is given token ids; else messages, which the server's template renders."""

    def call(self, prompt: RenderedPrompt, model: str, limits: Limits) -> Call:
        """Return the request for one prompt."""

    def read(self, data: Any) -> Answer:
        """Read what came back.

        Raises:
            ServerError: it is not such an answer.
        """


def only_choice(data: Any) -> Mapping[str, Any]:
    """Return the one choice of an answer of the OpenAI kind.

    Raises:
        ServerError: there is none.
    """
    choices = data.get("choices") if isinstance(data, dict) else None
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise ServerError(f"returned an empty completion: {short(data)}")
    return choices[0]


def count(data: Any, *keys: str) -> int | None:
    """Return a number that lies below some keys, or None where it is not told."""
    for key in keys:
        data = data.get(key) if isinstance(data, Mapping) else None
    return data if isinstance(data, int) and not isinstance(data, bool) else None


def token_ids(value: Any) -> tuple[int, ...] | None:
    """Return a list of token ids, or None where there is none or it is something else."""
    if not isinstance(value, list) or not all(isinstance(token, int) for token in value):
        return None
    return tuple(value)


def text_of(value: Any) -> str | None:
    """Return a text, or None."""
    return value if isinstance(value, str) else None


def short(data: Any) -> str:
    """Return the beginning of an answer, for a message."""
    return " ".join(repr(data).split())[:160]
