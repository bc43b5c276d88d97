"""transformers' model of a target without weights, and which stored tensors make which of its parameters."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch

from dflash_core.errors import TargetError
from dflash_core.target.loading import Target, quiet_transformers


class CannotSplit(Exception):  # noqa: N818 - not an error of the user's: the whole model is run instead
    """Raised when a model cannot be run layer by layer with the same result; the message says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """What one or several parameters are made from."""

    converter: Any
    """transformers' `WeightConverter`, or None where a stored tensor is taken as it is."""
    stored: tuple[tuple[str, str], ...]
    """(pattern of the converter, name in the shards), in the order that the converter expects."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BareModel:
    """A model without weights."""

    model: Any
    """transformers' causal language model."""
    quantizer: Any
    """Undoes the quantisation of stored tensors; None where they are not quantised."""


def build_without_weights(target: Target, dtype: torch.dtype) -> BareModel:
    """Return the target's causal language model without weights; no code of the model folder runs."""
    from transformers import AutoConfig, AutoModelForCausalLM

    quiet_transformers()
    try:
        config = AutoConfig.from_pretrained(target.folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise TargetError(f"{target.folder} cannot be loaded: {' '.join(str(error).split())[:300]}") from error
    quantizer = _dequantizer(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if model._get_dtype_plan(dtype):
        raise CannotSplit(f"transformers keeps parts of it in another dtype than {str(dtype).removeprefix('torch.')}")
    model.eval()
    model.requires_grad_(False)
    return BareModel(model=model, quantizer=quantizer)


def _dequantizer(config: Any) -> Any:
    """Return what undoes a quantisation while tensors are read, or None; the config is then one of plain weights.

    Raises:
        CannotSplit: of a kind that transformers undoes only for the whole model.
    """
    quantised = [level for level in (config, config.get_text_config()) if getattr(level, "quantization_config", None)]
    if not quantised:
        return None
    settings = quantised[0].quantization_config
    method = settings.get("quant_method") if isinstance(settings, dict) else settings.quant_method
    if method != "mxfp4":
        raise CannotSplit(f"its weights are quantised ({method})")
    from transformers.quantizers.auto import AutoHfQuantizer
    from transformers.utils.quantization_config import Mxfp4Config

    for level in {id(level): level for level in quantised}.values():
        del level.quantization_config
    return AutoHfQuantizer.from_config(Mxfp4Config(dequantize=True), pre_quantized=True)


def match_sources(bare: BareModel, stored: Iterable[str], shapes: dict[str, tuple[int, ...]]) -> dict[str, Source]:
    """Return for every parameter what it is made from, by transformers' own rules.

    Args:
        bare: the model without weights.
        stored: names of all tensors in the shards.
        shapes: of the model's parameters and buffers, by name.

    Raises:
        CannotSplit: this version of transformers keeps its rules elsewhere.
    """
    try:
        return _match(bare, stored, shapes)
    except (ImportError, TypeError, AttributeError) as error:
        # They are not part of its documented interface.
        raise CannotSplit(
            f"the conversion rules of transformers {version('transformers')} are not known: {error}"
        ) from error


def _match(bare: BareModel, stored: Iterable[str], shapes: dict[str, tuple[int, ...]]) -> dict[str, Source]:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    mapping = get_model_conversion_mapping(bare.model, hf_quantizer=bare.quantizer)
    renamings = [rule for rule in mapping if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in mapping if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    prefix = bare.model.base_model_prefix
    grouped: dict[str, list[tuple[str | None, str]]] = {}
    for name in sorted(stored, key=dot_natural_key):
        renamed, pattern = rename_source_key(name, renamings, converters, prefix, shapes)
        if renamed not in shapes and name in shapes:
            renamed, pattern = rename_source_key(name, [], [], prefix, shapes)
        if renamed in shapes:
            grouped.setdefault(renamed, []).append((pattern, name))
    sources = {}
    for renamed, members in grouped.items():
        pattern = members[0][0]
        if pattern is None:
            # Where two names lead to one parameter the first is taken, as transformers does.
            sources[renamed] = Source(converter=None, stored=((members[0][1], members[0][1]),))
        else:
            parts = tuple((str(one), name) for one, name in members)
            sources[renamed] = Source(converter=by_pattern[pattern], stored=parts)
    return sources
