"""The target's own choice at every position of a continuation, from slices of its vocabulary.

    place        first       first+1     ...  last
    next token   response 0  response 1       none
    judged       yes         yes              no

Places before `first` predict prompt tokens, which nobody judges. [T, V] logits never exist: the head is asked a
slice of the vocabulary for some rows at a time, and best, second and the sum of exponentials are carried on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from dflash_core.target.loading import Target
from dflash_core.target.vocabulary import num_token_rows

NO_NEXT_TOKEN = float("inf")
"""Margin stored where there is no next token to judge."""
LOGITS_AT_ONCE = 2 << 20
"""Logits that are held at once, some times over while they are soft-capped and compared."""
_LEAST_ROWS = 8
_choosable: dict[tuple[Path, int, int, int], int] = {}


class Rows(NamedTuple):
    """Some rows that the head is asked about."""

    hidden_RD: Tensor
    """After the final norm."""
    ids_R: Tensor
    """The tokens at these places."""
    next_ids_R: Tensor
    """The transcript's next tokens."""


class HeadSlice(NamedTuple):
    """Rows `first` up to `last` of the head, ready to be asked."""

    first: int
    last: int
    logits: Callable[[Tensor, Tensor], Tensor]
    """(hidden_RD, ids_R) to logits_RV of the slice."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choices:
    """What the target says about the transcripts' next tokens; R judged places, or T with gaps."""

    chosen: Tensor
    """Arg-max token id, the lowest of equals; int32; -1 where nothing is judged."""
    margin: Tensor
    """Logit of the next token less the best other; float32; negative where the target prefers another; else inf."""
    rank: Tensor
    """Tokens that the target prefers to the next one, 0 = arg-max; int32; -1 where nothing is judged."""
    log_probability: Tensor
    """Natural logarithm of the next token's probability at temperature 1; float32; NaN where nothing is judged."""

    def spread(self, places_R: Tensor, num_tokens: int) -> Choices:
        """Return the same over T places."""
        return Choices(
            chosen=_spread(self.chosen, places_R, num_tokens, -1),
            margin=_spread(self.margin, places_R, num_tokens, NO_NEXT_TOKEN),
            rank=_spread(self.rank, places_R, num_tokens, -1),
            log_probability=_spread(self.log_probability, places_R, num_tokens, float("nan")),
        )


def _spread(values_R: Tensor, places_R: Tensor, num_tokens: int, gap: float) -> Tensor:
    values_T = torch.full((num_tokens,), gap, dtype=values_R.dtype)
    values_T[places_R] = values_R
    return values_T


def judged_places(lengths: Sequence[tuple[int, int]]) -> Tensor:
    """Return places_R on the axis T whose next token is judged.

    Args:
        lengths: prompt and response tokens of each transcript.
    """
    parts, start = [], 0
    for num_prompt, num_response in lengths:
        parts.append(torch.arange(start + num_prompt - 1, start + num_prompt - 1 + num_response))
        start += num_prompt + num_response
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.long)


def num_choosable(target: Target) -> int:
    """Return how many rows of the head, from the first, are tokens; asked once per process while the file stays.

    Raises:
        TargetError: the tokenizer's file is there and cannot be read.
    """
    path = target.folder / "tokenizer.json"
    if not path.exists():
        # For some kinds of model transformers makes up a tokenizer of a few words where there is none.
        return target.config.unpadded_vocab_size or target.config.vocab_size
    stat = path.stat()
    key = (path, stat.st_size, stat.st_mtime_ns, target.config.vocab_size)
    if key not in _choosable:
        _choosable[key] = num_token_rows(target.folder, target.config)
    return _choosable[key]


@torch.inference_mode()
def judge(
    slices: Callable[[], Iterator[HeadSlice]],
    rows: Callable[[Tensor], Rows],
    num_rows: int,
    *,
    on_rows: Callable[[int], None] = lambda _: None,
) -> Choices:
    """Judge every row's next token.

    Args:
        slices: yields the head slice by slice, lowest ids first; asked again where a token is not the arg-max.
            What lies in no slice is no token: it never wins, and a next token that is none is infinitely unlikely.
        rows: returns some of the rows, given their numbers.
        num_rows: R.
        on_rows: told how many rows of a slice were done.
    """
    best_R = torch.full((num_rows,), -torch.inf)
    other_R = best_R.clone()
    own_R = best_R.clone()
    total_R = best_R.double()
    chosen_R = torch.full((num_rows,), -1, dtype=torch.int32)
    for piece in slices():
        for block in _blocks(piece, num_rows):
            some = rows(block)
            logits_RV = _logits(piece, some)
            inside, column = _columns(piece, some.next_ids_R)
            own_R[block[inside]] = logits_RV[inside, column]
            value, index = logits_RV.max(dim=1)
            better = value > best_R[block]
            chosen_R[block[better]] = (index[better] + piece.first).int()
            best_R[block] = torch.maximum(best_R[block], value)
            total_R[block] = torch.logaddexp(total_R[block], logits_RV.logsumexp(dim=1).double())
            logits_RV[inside, column] = -torch.inf
            other_R[block] = torch.maximum(other_R[block], logits_RV.amax(dim=1))
            on_rows(len(block))
    missed = torch.nonzero(own_R < best_R)[:, 0]
    rank_R = torch.zeros(num_rows, dtype=torch.int32)
    if missed.numel():
        rank_R[missed] = _ranks(slices, rows, missed, own_R[missed])
    return Choices(
        chosen=chosen_R, margin=own_R - other_R, rank=rank_R, log_probability=(own_R.double() - total_R).float()
    )


def _ranks(
    slices: Callable[[], Iterator[HeadSlice]],
    rows: Callable[[Tensor], Rows],
    missed_M: Tensor,
    own_M: Tensor,
) -> Tensor:
    """Count the tokens that the target prefers to the next one, of the rows where there are any."""
    rank_M = torch.zeros(len(missed_M), dtype=torch.int32)
    for piece in slices():
        for places in _blocks(piece, len(missed_M)):
            some = rows(missed_M[places])
            logits_RV = _logits(piece, some)
            inside, column = _columns(piece, some.next_ids_R)
            # Never above itself: asked again among other rows, its logit may differ in the last bit.
            logits_RV[inside, column] = -torch.inf
            rank_M[places] += (logits_RV > own_M[places, None]).sum(dim=1, dtype=torch.int32)
    return rank_M.clamp_(min=1)


def _logits(piece: HeadSlice, some: Rows) -> Tensor:
    logits_RV = piece.logits(some.hidden_RD, some.ids_R).float()
    assert logits_RV.shape == (len(some.ids_R), piece.last - piece.first), (logits_RV.shape, piece)
    return logits_RV


def _blocks(piece: HeadSlice, num_rows: int) -> Sequence[Tensor]:
    """Return the numbers of all rows, in blocks whose logits are few enough."""
    return torch.arange(num_rows).split(max(_LEAST_ROWS, LOGITS_AT_ONCE // (piece.last - piece.first)))


def _columns(piece: HeadSlice, next_ids_R: Tensor) -> tuple[Tensor, Tensor]:
    """Return which rows' next tokens lie in a slice, and in which of its columns."""
    inside = torch.nonzero((next_ids_R >= piece.first) & (next_ids_R < piece.last))[:, 0]
    return inside, next_ids_R[inside] - piece.first
