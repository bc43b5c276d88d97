"""Task: the drafter drafts over the stored transcripts, one row per block."""

from __future__ import annotations

from typing import Any

from prefect import task

from dflash_core import stages
from dflash_core.config import Config
from dflash_core.drafter.spec import DrafterSpec
from tasks.caching import SERIALIZER, ArtifactPolicy
from tasks.naming import named


@task(
    name="run_drafter",
    task_run_name=named("run drafter"),
    cache_policy=ArtifactPolicy(kind=stages.BLOCKS_KIND),
    result_serializer=SERIALIZER,
)
def run_drafter(
    config: Config, store: str, key: str, spec: dict[str, Any], weights: str, drafter: DrafterSpec
) -> dict[str, Any]:
    """Run `dflash_core.stages.run_drafter`."""
    return stages.run_drafter(config, spec, weights, drafter)
