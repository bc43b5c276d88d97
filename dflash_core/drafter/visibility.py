"""What the rows of a block may attend to: context before the anchor, and slots of their own block.

    rule     context that a row sees, window W          slots of its block that row j sees, window W
    row      position > its own - W                     |j - i| < W, and i <= j where causal
    anchor   position >= anchor - W, all rows alike     all, and i <= j where causal

Shapes: A anchors, K block slots, T context tokens.

Sources: z-lab/dflash `dflash/model.py: _attention_mask` (row); speculators
`models/dflash/attention.py: create_anchor_block_mask_mod` (anchor).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dflash_core.drafter.spec import DrafterSpec


class Visible(NamedTuple):
    """What each row of each block sees."""

    context_AKT: Tensor
    block_AKK: Tensor


def visible(
    spec: DrafterSpec, layer: int, *, num_context: int, num_slots: int, position_A: Tensor, num_slots_A: Tensor
) -> Visible:
    """Return what rows see in one layer.

    Args:
        spec: causality and window of the layer, and the rule for windows.
        layer: which.
        num_context: T, tokens of context at hand; those from an anchor on are hidden from its block.
        num_slots: K.
        position_A: absolute positions of the anchors.
        num_slots_A: slots of each block; later ones do not exist for it.
    """
    device = position_A.device
    slot_K = torch.arange(num_slots, device=device)
    context_T = torch.arange(num_context, device=device)
    context_AKT = (context_T < position_A[:, None, None]).expand(-1, num_slots, -1)
    block_AKK = (slot_K < num_slots_A[:, None, None]).expand(-1, num_slots, -1)
    # A slot beyond the block's end is never read; it sees itself, so that its softmax has something.
    block_AKK = block_AKK | torch.eye(num_slots, dtype=torch.bool, device=device)
    back_KK = slot_K[:, None] - slot_K[None, :]
    if spec.is_causal[layer]:
        block_AKK = block_AKK & (back_KK >= 0)
    window = spec.windows[layer]
    if window is not None and spec.window_rule == "anchor":
        context_AKT = context_AKT & (context_T >= position_A[:, None, None] - window)
    elif window is not None:
        query_AK = position_A[:, None] + slot_K
        context_AKT = context_AKT & (query_AK[:, :, None] - context_T < window)
        block_AKK = block_AKK & (back_KK.abs() < window)
    return Visible(context_AKT, block_AKK)
