"""The target's logits out of its stored states, by its own rule, on any device.

Shapes: R rows, D hidden size, V tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from dflash_core.target.model_config import ModelConfig


def target_logits(
    head_VD: Tensor, config: ModelConfig, *, num_token_rows: int, device: torch.device, dtype: torch.dtype
) -> Callable[[Tensor], Tensor]:
    """Return what maps states after the final norm, final_RD, to float32 logits_RV.

    The product is taken in `dtype`; multiplier and soft-capping as the target's config has them, in float32.
    Rows of the head that are no tokens get -inf.

    Args:
        head_VD: the target's head as stored.
        config: its facts.
        num_token_rows: rows from the first that are tokens.
        device: where to compute.
        dtype: of the product.
    """
    weight_VD = head_VD.to(device=device, dtype=dtype)

    def logits(final_RD: Tensor) -> Tensor:
        logits_RV = functional.linear(final_RD.to(device=device, dtype=dtype), weight_VD).float()
        if config.logit_multiplier is not None:
            logits_RV = logits_RV * config.logit_multiplier
        if config.final_logit_softcapping is not None:
            logits_RV = torch.tanh(logits_RV / config.final_logit_softcapping) * config.final_logit_softcapping
        logits_RV[:, num_token_rows:] = -torch.inf
        return logits_RV

    return logits
