"""Extra numbers of a drafter between the stages: asked for in an evaluation's spec, kept beside its blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars

from dflash_core.drafter.extra_choice import read_settings
from dflash_core.drafter.held_at_once import EXTRA_LOGITS_ELEMENTS
from dflash_core.results.records import EXTRA_SCHEMAS, Extras
from dflash_core.store import Artifact
from dflash_core.target.head import load_embedding_and_head
from dflash_core.target.loading import Target
from dflash_core.target.vocabulary import num_token_rows

if TYPE_CHECKING:
    from dflash_core.drafter.extra_metrics import ExtraMetrics
    from dflash_core.drafter.head import Head


def make_extra_metrics(
    target: Target,
    head: Head,
    spec: Mapping[str, Any],
    *,
    has_own_head: bool,
    logits_elements: int = EXTRA_LOGITS_ELEMENTS,
) -> ExtraMetrics | None:
    """Return what counts the extras of a spec, or None where none are wanted.

    Args:
        target: whose choices the drafts are judged by.
        head: the drafter's, on its device.
        spec: of the evaluation.
        has_own_head: the drafter's head is not the target's; that one is then held on the device, too.
        logits_elements: logits of one kind that are held at once.
    """
    from dflash_core.drafter.extra_metrics import ExtraMetrics
    from dflash_core.target.logits import target_logits

    settings = read_settings(spec.get("extras", {}))
    if not settings:
        return None
    if not settings.temperatures:
        return ExtraMetrics(head, settings, logits_elements=logits_elements)
    logits = target_logits(
        load_embedding_and_head(target).head_VD if has_own_head else head.weight_VD,
        target.config,
        num_token_rows=num_token_rows(target.folder, target.config),
        device=head.weight_VD.device,
        dtype=head.weight_VD.dtype,
    )
    return ExtraMetrics(head, settings, target_logits=logits, logits_elements=logits_elements)


def write_extras(folder: Path, extras: ExtraMetrics | None) -> list[str]:
    """Write one file per extra and return their names."""
    rows = {} if extras is None else extras.rows()
    for name, counts in rows.items():
        polars.DataFrame(counts, schema=EXTRA_SCHEMAS[name]).write_parquet(folder / _file_name(name))
    return sorted(rows)


def read_extras(blocks: Artifact) -> Extras:
    """Return the extras that lie beside scored blocks; blocks from before there were extras have none."""
    names: Sequence[str] = blocks.meta.get("extras", ())
    return Extras(**{name: polars.read_parquet(blocks.file(_file_name(name))) for name in names})


def _file_name(name: str) -> str:
    return f"{name}.parquet"
