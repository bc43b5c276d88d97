"""Which extra numbers a configuration asks for, of one drafter: settings, and what cannot be had of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from dflash_core.acceptance.recall import RECALL_KS

EXTRAS_VERSION = 1
"""Raised in the commit that changes a number among the extras."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExtraSettings:
    """Which numbers are wanted; an empty tuple is none of that kind."""

    sweep_block_sizes: tuple[int, ...] = ()
    recall_ks: tuple[int, ...] = ()
    tree_budgets: tuple[int, ...] = ()
    """Nodes, the anchor not counted."""
    temperatures: tuple[float, ...] = ()

    def __bool__(self) -> bool:
        """Tell whether anything is wanted."""
        return any((self.sweep_block_sizes, self.recall_ks, self.tree_budgets, self.temperatures))


class Wanted(Protocol):
    """The part of the configuration that asks: `config.DrafterSettings`."""

    @property
    def extras(self) -> Sequence[str]:
        """Return kinds: `sweep`, `recall`, `trees`, `sampled`."""

    @property
    def sweep_block_sizes(self) -> Sequence[int] | None:
        """Return block sizes; None takes the powers of two below the drafter's."""

    @property
    def tree_budgets(self) -> Sequence[int]:
        """Return nodes of trees."""

    @property
    def temperatures(self) -> Sequence[float]:
        """Return temperatures above 0."""


def choose_extras(wanted: Wanted, *, block_size: int, proposal_rule: str) -> dict[str, Any]:
    """Return what stands in an evaluation's spec under `extras`; empty where nothing is wanted.

    Args:
        wanted: the configuration.
        block_size: slots of the blocks that are scored.
        proposal_rule: of the drafter.
    """
    kinds = set(wanted.extras)
    left_out = []
    sizes = wanted.sweep_block_sizes
    if sizes is None:
        sizes = [2**power for power in range(1, 10) if 2**power < block_size]
    longer = [size for size in sizes if size >= block_size]
    if "sweep" in kinds and longer:
        left_out.append(f"extras: no sweep over block sizes {longer}: blocks of {block_size} slots are scored already")
    settings = ExtraSettings(
        sweep_block_sizes=_ascending(size for size in sizes if size < block_size) if "sweep" in kinds else (),
        recall_ks=RECALL_KS if "recall" in kinds else (),
        tree_budgets=_ascending(wanted.tree_budgets) if "trees" in kinds else (),
        temperatures=_ascending(wanted.temperatures) if "sampled" in kinds else (),
    )
    if settings.tree_budgets and proposal_rule != "argmax":
        left_out.append(
            f"extras: no trees: rows of a {proposal_rule} drafter look at the token before, those of a tree must not"
        )
        settings = replace(settings, tree_budgets=())
    found = {name: list(values) for name, values in asdict(settings).items() if values}
    if left_out:
        found["left_out"] = left_out
    return {"version": EXTRAS_VERSION} | found if found else {}


def read_settings(extras: Mapping[str, Any]) -> ExtraSettings:
    """Return the settings that stand in a spec under `extras`."""
    return ExtraSettings(**{name: tuple(extras.get(name, ())) for name in ExtraSettings.__dataclass_fields__})


def _ascending(values: Any) -> tuple[Any, ...]:
    return tuple(sorted(set(values)))
