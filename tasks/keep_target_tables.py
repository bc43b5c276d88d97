"""Task: keep in the store what a box that only runs drafters needs of the target."""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE

from dflash_core import stages
from dflash_core.config import Config
from tasks.naming import named


@task(name="keep_target_tables", task_run_name=named("keep tables of the target"), cache_policy=NO_CACHE)
def keep_target_tables(config: Config) -> stages.Manifest:
    """Run `dflash_core.stages.keep_target_tables`; the store knows what it holds."""
    return stages.keep_target_tables(config)
