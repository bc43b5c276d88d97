"""Which layers of the target a drafter reads: every convention of counting, in one.

Canonical is the 0-based decoder layer, in the order in which `fc` reads them: layer i is transformers'
`hidden_states[i + 1]`, its whole residual output before the next norm.

    key                                   counts                     canonical
    target_layer_ids                      decoder layers from 0      k
    dspark_target_layer_ids               decoder layers from 0      k
    aux_hidden_state_layer_ids            hidden_states (0 is the    k - 1
    eagle_aux_hidden_state_layer_ids      embedding)                 k - 1
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from dflash_core.drafter.facts import OF_TRAINING, FactReader, agreed
from dflash_core.errors import CheckpointMismatch, DraftConfigError, UnsupportedCheckpoint

OFFSETS = {
    "target_layer_ids": 0,
    "dspark_target_layer_ids": 0,
    "aux_hidden_state_layer_ids": -1,
    "eagle_aux_hidden_state_layer_ids": -1,
}

BEFORE_NORM = "last_layer_before_norm"
"""Key with which a person says how the state of the target's last layer was taken; no trainer writes it."""


class Taps(NamedTuple):
    """The layers that a drafter reads."""

    ids: tuple[int, ...]
    """0-based decoder layers, in the order of `fc`."""
    as_written: tuple[int, ...]
    """As the trainer counts them; its training settings count alike."""


class TapRule(NamedTuple):
    """What a config without a list means."""

    ids: Callable[[], list[int]]
    """Computes canonical layers."""
    name: str


def read_taps(reader: FactReader, depth: int, *, main_key: str, rule: TapRule | None, may_be_last: bool = True) -> Taps:
    """Return the layers that a config names, or its dialect's rule gives.

    Args:
        reader: the config.
        depth: layers of the target.
        main_key: the list that the dialect writes; others may stand beside it and must agree.
        rule: for a config without any list; None asks for it.
        may_be_last: is the last layer's state unambiguous in this dialect? Where it is not, `last_layer_before_norm`
            must say that it is the residual before the final norm, which is what is extracted.

    Raises:
        DraftConfigError: a list is malformed or missing, or two contradict.
        CheckpointMismatch: it names a layer that the target does not have.
        UnsupportedCheckpoint: it names the embedding's output, or a last layer whose state is ambiguous or normed.
    """
    written = _written_lists(reader, main_key)
    canonical = {f"{key} = {list(ids)}": [layer + OFFSETS[key] for layer in ids] for key, ids in written.items()}
    ids = agreed(reader, canonical, "the target's layers, counted from 0,")
    if ids is None:
        if rule is None:
            raise DraftConfigError(
                f"{reader.where} lacks {main_key}, which the weights do not tell; add it to the draft config"
            )
        ids, first = rule.ids(), main_key
        reader.sources["target_layer_ids"] = rule.name
        as_written = tuple(layer - OFFSETS[main_key] for layer in ids)
    else:
        first = next(iter(written))
        as_written = tuple(written[first])
        added = f", less {-OFFSETS[first]}: it counts the embedding's output as 0" if OFFSETS[first] else ""
        reader.sources["target_layer_ids"] = reader.sources[first] + added
    _check_range(reader, first, as_written, ids, depth, may_be_last)
    return Taps(tuple(ids), as_written)


def _written_lists(reader: FactReader, main_key: str) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for key in sorted(OFFSETS, key=lambda key: key != main_key):
        ids = reader.find(key, list, nested=True)
        if ids is None:
            continue
        if not ids or not all(isinstance(layer, int) and not isinstance(layer, bool) for layer in ids):
            raise DraftConfigError(f"{reader.where}: {key} = {ids!r} must be a list of layer numbers")
        found[key] = ids
    if not found and (stated := reader.training_numbers("target_layer_ids")):
        reader.sources[main_key] = f"{OF_TRAINING}: target_layer_ids"
        found[main_key] = stated
    return found


def _check_range(
    reader: FactReader, key: str, as_written: tuple[int, ...], ids: list[int], depth: int, may_be_last: bool
) -> None:
    if OFFSETS[key] and -1 in ids:
        raise UnsupportedCheckpoint(
            f"{reader.where}: {key} = {list(as_written)} names 0, the target's embedding output, which is not "
            f"extracted; decoder layers are"
        )
    if not may_be_last and -1 in ids:
        raise UnsupportedCheckpoint(
            f"{reader.where}: {key} = {list(as_written)} names -1, the target's embedding output, which is not "
            f"extracted; decoder layers are"
        )
    if not may_be_last and depth - 1 in ids and not reader.find(BEFORE_NORM, bool, nested=True):
        raise UnsupportedCheckpoint(
            f"{reader.where}: {key} = {list(as_written)} names {depth - 1}, the target's last layer, whose state is "
            f"taken before the final norm by some and after it by others, and the file does not say which; where it "
            f"was taken before, add {BEFORE_NORM}: true; after is not scored"
        )
    outside = [number for number, layer in zip(as_written, ids, strict=True) if not 0 <= layer < depth]
    if outside:
        lowest = -OFFSETS[key]
        raise CheckpointMismatch(
            f"{reader.where}: {key} {list(as_written)} name layer {outside[0]}, but the target has layers "
            f"{lowest}..{depth - 1 + lowest}; was the drafter trained for another target?"
        )


def default_target_layer_ids(target_depth: int, num_taps: int) -> list[int]:
    """Return the layers that a z-lab config without `target_layer_ids` means; one tap per draft layer.

    One reads the middle; more are spread evenly from the second to the third-to-last.
    Source: z-lab/dflash `dflash/model.py: build_target_layer_ids`.

    >>> default_target_layer_ids(64, 5)
    [1, 16, 31, 46, 61]
    """
    if num_taps == 1:
        return [target_depth // 2]
    span = target_depth - 4
    return [round(1 + tap * span / (num_taps - 1)) for tap in range(num_taps)]
