"""The map between a reduced draft vocabulary and the target's: which form it has, and whether it adds up.

    own id       0    1    2    3                speculators' buffers: d2t holds target id - own id,
    target id    2    3    7    8                t2d is true where a token of the target is kept
    d2t          2    2    5    5
    t2d          0 0 1 1 0 0 0 1 1 0

GGUF files hold the target ids themselves. Read as differences those give a map as well, often one that adds up and
is wrong at every token: so `t2d` is compared where it is there, and differences that rise at every step are refused.

Shapes: U tokens that can be proposed, V tokens of the target.

Sources: speculators `models/dflash/core.py`; vLLM `model_executor/models/llama_eagle3.py` (d2t is added); llama.cpp
`src/models/dflash.cpp` (d2t is a row).
"""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_core.errors import UnsupportedCheckpoint

_FEWEST_TO_TELL = 64
"""Tokens above which no draft vocabulary is free of neighbours: the differences of neighbours are equal."""


def target_ids(d2t_U: Tensor, t2d_V: Tensor | None, vocab_size: int) -> Tensor:
    """Return target_of_U, the target's number of each token that can be proposed.

    Args:
        d2t_U: target id - own id.
        t2d_V: which tokens of the target are kept; None where the checkpoint does not say.
        vocab_size: V.

    Raises:
        UnsupportedCheckpoint: it leads outside the target's vocabulary, twice to one token, or elsewhere than `t2d`
            says; or it holds target ids instead of differences.
    """
    d2t_U = d2t_U.cpu().long()
    target_of_U = torch.arange(d2t_U.shape[0]) + d2t_U
    outside = int(((target_of_U < 0) | (target_of_U >= vocab_size)).sum())
    doubled = len(target_of_U) - len(target_of_U.unique())
    if outside or doubled:
        raise UnsupportedCheckpoint(
            f"d2t maps {outside} tokens outside of the vocabulary of {vocab_size} and {doubled} to a token twice; "
            f"expected target id - own id for each{_if_ids(d2t_U, t2d_V, vocab_size)}"
        )
    if t2d_V is not None:
        # As sets: t2d may have rows for a padded vocabulary.
        kept, mapped = set(t2d_V.cpu().nonzero().flatten().tolist()), set(target_of_U.tolist())
        if kept != mapped:
            raise UnsupportedCheckpoint(
                f"d2t leads to {len(mapped)} tokens of the target, {len(mapped - kept)} of which t2d does not keep, "
                f"and t2d keeps {len(kept - mapped)} others; expected target id - own id for each"
                f"{_if_ids(d2t_U, t2d_V, vocab_size)}"
            )
    elif len(d2t_U) >= _FEWEST_TO_TELL and bool((d2t_U.diff() > 0).all()):
        raise UnsupportedCheckpoint(
            f"d2t rises at each of its {len(d2t_U)} tokens, as target ids do and differences do not; expected "
            f"target id - own id for each: subtract 0, 1, 2, ... and save again, or add t2d, which tells"
        )
    return target_of_U


def _if_ids(d2t_U: Tensor, t2d_V: Tensor | None, vocab_size: int) -> str:
    """Return what to do where the numbers are the target's ids themselves, else nothing."""
    if not bool(((d2t_U >= 0) & (d2t_U < vocab_size)).all()) or len(d2t_U.unique()) < len(d2t_U):
        return ""
    if t2d_V is not None and set(d2t_U.tolist()) != set(t2d_V.cpu().nonzero().flatten().tolist()):
        return ""
    return "; these read like target ids: subtract 0, 1, 2, ... and save again"
