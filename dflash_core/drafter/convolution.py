"""DFlash2's convolutions: along the slots of one block, with kernels that depend on the slot.

A convolution stands before and after each sublayer. Both get their correction from the sublayer's
input after its norm, before anything is convolved:

    u  = norm(x)                       delta_in, delta_out = split(W u)
    u' = conv(u, base[0] + delta_in)   x + conv(sublayer(u'), base[1] + delta_out)

    slot      0        1               2              kernel of 2 taps
    output    k0 u0    k0 u1 + k1 u0   k0 u2 + k1 u1  nothing reaches before slot 0, nor into the context

Shapes: A anchors, K slots, T taps of the kernel, N groups of channels, D hidden size.

Source: z-lab/dflash `dflash/model.py: GroupedDynamicCausalConv`, as in PyPI `dflash` 0.1.0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


class ConvolutionWeights(NamedTuple):
    """One pair of convolutions around a sublayer."""

    base_kernel_2TD: Tensor
    """Of the input side and the output side."""
    projection_ND: Tensor
    """Makes both sides' corrections out of a slot's hidden state; its rows are sides x taps x groups."""


class Corrections(NamedTuple):
    """What slots add to the base kernels, one number per tap and group of channels."""

    input_AKTN: Tensor
    output_AKTN: Tensor


def read_corrections(weights: ConvolutionWeights, normed_AKD: Tensor, group_size: int) -> Corrections:
    """Return both sides' corrections from the sublayer's input after its norm."""
    num_taps, width = weights.base_kernel_2TD.shape[1:]
    both = functional.linear(normed_AKD, weights.projection_ND).unflatten(-1, (2, num_taps, width // group_size))
    return Corrections(both[..., 0, :, :], both[..., 1, :, :])


def convolve(hidden_AKD: Tensor, base_TD: Tensor, correction_AKTN: Tensor) -> Tensor:
    """Return every slot's weighted sum of itself and the slots before it, within its block."""
    num_slots, num_groups = hidden_AKD.shape[1], correction_AKTN.shape[-1]
    grouped = hidden_AKD.unflatten(-1, (num_groups, -1))
    output = torch.zeros_like(grouped)
    for tap in range(base_TD.shape[0]):
        # Zeros move in at the block's first slot.
        shifted = functional.pad(grouped, (0, 0, 0, 0, tap, 0))[:, :num_slots]
        output = output + base_TD[tap].view(num_groups, -1) * shifted
        output = torch.addcmul(output, correction_AKTN[:, :, tap, :, None], shifted)
    return output.flatten(-2)
