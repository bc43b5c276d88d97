"""The forms in which trainers write down what a drafter is; each becomes one `Reading`.

Which form a config has is decided by evidence, in this order:

1. `speculators_model_type`: the speculators form (flat facts, sizes under `transformer_layer_config`);
2. `dflash_config`: the nested form of z-lab, SpecForge, Model-Optimizer, NeMo and JetSpec;
3. `target_num_hidden_layers`, or DeepSpec's architectures: the flat form of TorchSpec, verl-SpeCo and DeepSpec;
4. `architectures` alone: z-lab's old form, whose facts stand at the top level.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_core.drafter.dialects import flat, nested, speculators
from dflash_core.drafter.dialects.base import Dialect

__all__ = ["Dialect", "choose_dialect"]


def choose_dialect(config: Mapping[str, Any]) -> tuple[Dialect, str]:
    """Return the form that a draft config has, and the evidence for it.

    Whether the form can be read is another question: the dialect itself refuses what it does not know.
    """
    if config.get("speculators_model_type") is not None:
        return speculators.DIALECT, f"speculators_model_type = {config['speculators_model_type']!r}"
    if config.get("dflash_config"):
        return nested.DIALECT, "dflash_config"
    if config.get("target_num_hidden_layers") is not None:
        return flat.DIALECT, "target_num_hidden_layers"
    architectures = config.get("architectures")
    if isinstance(architectures, list) and len(architectures) == 1 and architectures[0] in flat.DEEPSPEC:
        return flat.DIALECT, f"architectures = {architectures!r}"
    return nested.DIALECT, f"architectures = {architectures!r}"
