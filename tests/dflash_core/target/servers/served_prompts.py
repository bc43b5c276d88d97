"""The prompts that the served target is asked, a conversation of three turns among them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dflash_core.target.loading import Target
from dflash_core.target.prompts import Prompt
from dflash_core.target.rendering import Rendering, render_prompts

MAX_NEW_TOKENS = 8


def ask(number: int, text: str | None = None, **keys: Any) -> Prompt:
    words = text or " ".join(f"w{20 + (7 * number + place) % 120}" for place in range(3 + number))
    return Prompt(**({"id": f"p{number}", "dataset": "d", "group": None, "messages": (("user", words),)} | keys))


CONVERSATION = (ask(4), ask(5, "w30 w31", follows="p4"), ask(6, "w32", follows="p5"))
PROMPTS = (ask(0), ask(1), ask(2, messages=(("system", "w50"), ("user", "w51"))), ask(3), *CONVERSATION)


def rendered(target: Target, prompts: Sequence[Prompt] = PROMPTS, thinking: bool = False) -> Rendering:
    return render_prompts(target, prompts, thinking=thinking, max_new_tokens=MAX_NEW_TOKENS)
