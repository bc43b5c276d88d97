"""What a slot of a block may see, per layer: causality, window, and from where the window is measured."""

from __future__ import annotations

from typing import Literal, NamedTuple

from dflash_core.drafter.facts import FactReader, agreed
from dflash_core.errors import DraftConfigError

SLIDING = "sliding_attention"
FULL = "full_attention"
WindowRule = Literal["row", "anchor"]


class Attention(NamedTuple):
    """Kinds of attention, one entry per layer."""

    windows: tuple[int | None, ...]
    """Positions that a slot sees back, itself included; None sees all."""
    is_causal: tuple[bool, ...]
    """Does a slot see only slots before it and itself?"""
    window_rule: WindowRule = "row"
    """Where a window begins: W - 1 positions before each row, or W before the anchor for all rows of a block."""


def layer_kinds(reader: FactReader, num_layers: int) -> list[str]:
    """Return `layer_types`, full attention for all where there is none.

    Raises:
        DraftConfigError: it does not name as many layers, or other kinds.
    """
    kinds = reader.find("layer_types", list) or [FULL] * num_layers
    if len(kinds) != num_layers or not all(kind in (SLIDING, FULL) for kind in kinds):
        raise DraftConfigError(
            f"{reader.where}: layer_types = {kinds!r} must name {num_layers} layers as {SLIDING!r} or {FULL!r}"
        )
    return list(kinds)


def stated_causality(reader: FactReader) -> bool | None:
    """Return what the config says of all layers at once, None where it leaves it to the kinds of layers.

    `is_causal` is z-lab's and NeMo's key, `dflash_config.causal` Model-Optimizer's and vLLM's,
    `dflash_config.causal_head` JetSpec's; where two stand there they must agree.

    Raises:
        DraftConfigError: they contradict.
    """
    statements = {}
    for key, nested in (("is_causal", False), ("causal", True), ("causal_head", True)):
        value = reader.find(key, bool, nested=nested)
        if value is not None:
            statements[f"{reader.sources[key].removeprefix(reader.where + ': ')} = {value}"] = value
            reader.sources["is_causal"] = reader.sources.get("is_causal", reader.sources[key])
    causal: bool | None = agreed(reader, statements, "causality inside the block")
    return causal


def read_attention(reader: FactReader, num_layers: int, *, sliding_is_causal: bool = True) -> Attention:
    """Return windows and causality: what is stated for all, else sliding layers are causal and full ones are not.

    Args:
        reader: the config.
        num_layers: of the drafter.
        sliding_is_causal: does the dialect document that; False asks where a sliding layer needs it.

    Raises:
        DraftConfigError: the kinds, the window and the switches do not add up.
    """
    kinds = layer_kinds(reader, num_layers)
    causal = stated_causality(reader)
    forced = reader.find("use_swa", bool, nested=True)
    if forced and SLIDING not in kinds:
        # Model-Optimizer's exports name all layers full and mean sliding by this switch.
        kinds = [SLIDING] * num_layers
        sliding_is_causal = False
    if causal is None and SLIDING in kinds and not sliding_is_causal:
        raise DraftConfigError(
            f"{reader.where} has sliding layers, but neither is_causal nor dflash_config.causal; whether the block is "
            f"causal cannot be told from the weights; add is_causal"
        )
    if causal is None:
        rule = "sliding layers are causal, full ones are not"
        stated = reader.sources.get("layer_types")
        reader.sources["is_causal"] = f"{stated}: {rule}" if stated else "default: no layer_types, so none is sliding"
    window = _forced_window(reader) if forced else read_window(reader, kinds)
    reader.sources["windows"] = reader.sources.get("window", "default: no layer is sliding")
    return Attention(
        windows=tuple(window if kind == SLIDING else None for kind in kinds),
        is_causal=tuple(kind == SLIDING if causal is None else causal for kind in kinds),
    )


def _forced_window(reader: FactReader) -> int:
    """Return the window of `dflash_config.use_swa`, which counts whatever `use_sliding_window` says."""
    window: int = reader.need("swa_window_size", int, nested=True)
    beside = reader.find("sliding_window", int)
    if reader.top.get("use_sliding_window") is True and beside is not None and beside != window:
        raise DraftConfigError(
            f"{reader.where}: dflash_config.swa_window_size = {window} contradicts sliding_window = {beside}; "
            f"keep the one that the drafter was trained with"
        )
    reader.sources["window"] = reader.sources["swa_window_size"] + ", by dflash_config.use_swa"
    return window


def read_window(reader: FactReader, kinds: list[str]) -> int | None:
    """Return the window of the sliding layers, None where no layer is one.

    transformers' config has none unless `use_sliding_window` is true, and without `layer_types` counts layers by it.

    Raises:
        DraftConfigError: window, switch and kinds of layers do not add up.
    """
    switch = reader.top.get("use_sliding_window")
    if SLIDING not in kinds:
        if switch:
            raise DraftConfigError(
                f"{reader.where}: {reader.prefix}use_sliding_window is true, but layer_types names no sliding layer"
            )
        return None
    window: int = reader.need("sliding_window", int)
    if switch is not True:
        raise DraftConfigError(
            f"{reader.where}: layer_types names sliding layers, but {reader.prefix}use_sliding_window is {switch!r}; "
            f"set it to true, or make the layers full_attention"
        )
    reader.sources["window"] = reader.sources["sliding_window"]
    return window
