"""From an answer's text back to the token ids that the target emitted.

A text has many tokenisations, and the target need not have chosen the tokenizer's own. So the ids are
only as good as what is checked: they must decode to the very text, and where it is known how many tokens
the target emitted, there must be as many.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

_REPLACEMENT = "�"
"""What decoding puts in the place of an unfinished character."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Retokenised:
    """The ids of a text."""

    ids: tuple[int, ...]
    is_sure: bool
    """False where their number is not that of the tokens emitted, or a part of a character was lost."""


def retokenise(
    tokenizer: Any,
    prompt_ids: Sequence[int],
    text: str,
    *,
    counts: Collection[int] = (),
    has_special_tokens: bool,
) -> Retokenised | None:
    """Return the ids of an answer, or None where no tokenisation gives the text back.

    Args:
        tokenizer: the target's.
        prompt_ids: what the answer follows; some tokenizers write a text's first word in another way when it
            stands alone.
        text: the answer, without what ended it.
        counts: how many tokens the target may have emitted; empty where nobody told.
        has_special_tokens: whether special tokens are in the text, or were left out when it was decoded.
    """
    whole = text.rstrip(_REPLACEMENT)
    found = [
        ids
        for ids in _candidates(tokenizer, prompt_ids, whole)
        if _gives_back(tokenizer, prompt_ids, ids, whole, has_special_tokens=has_special_tokens)
    ]
    if not found:
        return None
    counted = [ids for ids in found if len(ids) in counts]
    is_sure = _REPLACEMENT not in text and (bool(counted) or not counts)
    return Retokenised(ids=tuple((counted or found)[0]), is_sure=is_sure)


def _candidates(tokenizer: Any, prompt_ids: Sequence[int], text: str) -> Iterator[list[int]]:
    """Yield the text's ids on their own, then those after the prompt where the prompt's stay the same."""
    if not text:
        yield []
        return
    yield list(tokenizer.encode(text, add_special_tokens=False))
    before = list(prompt_ids)
    both = list(tokenizer.encode(tokenizer.decode(before) + text, add_special_tokens=False))
    if both[: len(before)] == before:
        yield both[len(before) :]


def _gives_back(
    tokenizer: Any, prompt_ids: Sequence[int], ids: list[int], text: str, *, has_special_tokens: bool
) -> bool:
    if tokenizer.decode(ids, skip_special_tokens=not has_special_tokens) == text:
        return True
    before = list(prompt_ids)
    return bool(tokenizer.decode(before + ids) == tokenizer.decode(before) + text)
