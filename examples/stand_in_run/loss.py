"""The training loss: cross entropy at the draft positions, over a part of the vocabulary.

The head is most of a small drafter's arithmetic: 49,152 tokens against some hundred that occur in a
few transcripts. So each step scores the tokens that do occur and a fresh random sample of all
others, whose weight is raised so that the sum over the vocabulary is right on average.

Shapes: R rows (draft positions of all blocks), D hidden size, V vocabulary, U tokens that occur,
N random tokens, P draft positions.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional


def position_weights(block_size: int, *, decay: float) -> Tensor:
    """Return exp(-(p - 1) / decay) for draft positions p = 1..P: an early miss ends the block."""
    return torch.exp(-torch.arange(block_size - 1) / decay)


def draft_loss(
    hidden_RD: Tensor,
    reference_ids_R: Tensor,
    weights_R: Tensor,
    *,
    embedding_VD: Tensor,
    known_tokens_U: Tensor,
    num_random: int,
) -> Tensor:
    """Return the weighted mean cross entropy in nats.

    Args:
        hidden_RD: the drafter's output rows.
        reference_ids_R: the target's own token at each row; must be among the known tokens
            wherever the weight is not zero.
        weights_R: weight of each row, 0 for rows that do not count.
        embedding_VD: the frozen head.
        known_tokens_U: tokens that are always scored, ascending.
        num_random: how many random tokens stand for the rest of the vocabulary, drawn
            from torch's global generator; 0 scores all V.
    """
    if num_random == 0:
        losses_R = functional.cross_entropy(hidden_RD @ embedding_VD.T, reference_ids_R, reduction="none")
        return (losses_R * weights_R).sum() / weights_R.sum()
    vocab_size = len(embedding_VD)
    random_N = torch.randint(vocab_size, (num_random,))
    # A random token stands for vocab_size / num_random tokens; one that is known counts already.
    raise_N = torch.full((num_random,), math.log(vocab_size / num_random))
    raise_N[torch.isin(random_N, known_tokens_U)] = -math.inf
    scored = torch.cat([known_tokens_U, random_N])
    logits = hidden_RD @ embedding_VD[scored].T + torch.cat([torch.zeros(len(known_tokens_U)), raise_N])
    columns_R = torch.searchsorted(known_tokens_U, reference_ids_R).clamp(max=len(known_tokens_U) - 1)
    losses_R = functional.cross_entropy(logits, columns_R, reduction="none")
    return (losses_R * weights_R).sum() / weights_R.sum()
