"""Whether transcripts are the target's own: how often their tokens are its arg-max, and why not where they are not.

A transcript that a server wrote is judged by the local target in other numerics. Where both compute the same
function, the few differences are near-ties. More of them have a cause that shows in where and how they differ:

    nearly everywhere            another model or tokenizer wrote them
    at the first tokens          another chat template or prompt: the target never wanted to begin like that
    anywhere, small margins      the server's weights are quantised, or its kernels less exact
    anywhere, large margins      the server sampled instead of taking the best token
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from dflash_core.target.choices import Choices

TIE_MARGIN = 1e-3
"""Logit difference below which the arg-max may flip with the kernel."""
LEAST_AGREEMENT = 0.99
_FIRST_TOKENS = 4
_SMALL_MARGIN = 0.5
"""In nats: what quantisation to four bits moves a logit difference by; a sampled token often lacks more."""
_NEARLY_ALL = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """How far the transcripts are the target's own greedy continuations."""

    num_tokens: int
    """Response tokens judged."""
    num_greedy: int
    """Of these, the target's arg-max or its equal."""
    num_near_ties: int
    """Places where the two best logits lie closer than `TIE_MARGIN`."""
    warning: str | None
    """One line, where the share is below `LEAST_AGREEMENT`."""

    @property
    def share(self) -> float | None:
        """Return the share of greedy tokens, None without tokens."""
        return self.num_greedy / self.num_tokens if self.num_tokens else None


def judge_agreement(choices: Choices, lengths: Sequence[tuple[int, int]]) -> Agreement:
    """Judge transcripts by the target's choices.

    Args:
        choices: over the axis T of all transcripts.
        lengths: prompt and response tokens of each transcript, in order.
    """
    import torch  # here, so that naming the tie margin loads no torch

    margins = [margin_R for margin_R in _responses(choices.margin, lengths) if margin_R.numel()]
    if not margins:
        return Agreement(num_tokens=0, num_greedy=0, num_near_ties=0, warning=None)
    all_R = torch.cat(margins)
    num_tokens, num_greedy = all_R.numel(), int((all_R >= 0).sum())
    share = num_greedy / num_tokens
    warning = None
    if share < LEAST_AGREEMENT:
        warning = (
            f"{num_tokens - num_greedy} of {num_tokens} response tokens ({100 * (1 - share):.1f} %) are not the "
            f"target's own choice; likeliest cause: {_cause(margins)}"
        )
    return Agreement(
        num_tokens=num_tokens,
        num_greedy=num_greedy,
        num_near_ties=int((all_R.abs() < TIE_MARGIN).sum()),
        warning=warning,
    )


def _responses(values_T: Tensor, lengths: Sequence[tuple[int, int]]) -> list[Tensor]:
    parts, start = [], 0
    for num_prompt, num_response in lengths:
        parts.append(values_T[start + num_prompt - 1 : start + num_prompt - 1 + num_response])
        start += num_prompt + num_response
    return parts


def _cause(margins: Sequence[Tensor]) -> str:
    """Name the likeliest cause from where transcripts differ first, and by how much.

    After a transcript's first differing token the target reads on from it, so later tokens are judged fairly:
    what a wrong template spoils is the beginning, what sampling spoils is spread evenly.
    """
    import torch

    early = torch.tensor([bool((margin_R[:_FIRST_TOKENS] < 0).any()) for margin_R in margins]).float().mean()
    later = [margin_R[_FIRST_TOKENS:] for margin_R in margins]
    num_later = sum(margin_R.numel() for margin_R in later)
    missed_early = sum(int((margin_R[:_FIRST_TOKENS] < 0).sum()) for margin_R in margins)
    missed_later = sum(int((margin_R < 0).sum()) for margin_R in later)
    num_early = sum(margin_R[:_FIRST_TOKENS].numel() for margin_R in margins)
    rate_early = missed_early / max(num_early, 1)
    rate_later = missed_later / num_later if num_later else 0.0
    missed = missed_early + missed_later
    if missed >= _NEARLY_ALL * sum(margin_R.numel() for margin_R in margins):
        return (
            "they differ nearly everywhere, as where another model, tokenizer or chat template wrote them; compare the "
            "server's model and the prompt's token ids with this target's"
        )
    if early >= 0.5 and rate_early >= 2 * rate_later:
        return (
            "they differ at their first tokens, as where another chat template, system prompt or thinking flag was "
            "used; compare the prompt's token ids with the server's"
        )
    lacking = torch.cat([margin_R[margin_R < 0] for margin_R in margins]).abs()
    if float(lacking.median()) <= _SMALL_MARGIN:
        return (
            "they differ by small margins all over, as where the server's weights or key-value cache are quantised; "
            "serve the target in its own dtype"
        )
    return (
        "they differ by large margins all over, as where the server sampled; ask it for temperature 0 without penalties"
    )
