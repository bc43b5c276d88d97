"""Task: find the target, converting a GGUF file on first use, and render the prompts."""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE

from dflash_core import stages
from dflash_core.config import Config
from tasks.naming import named


@task(name="plan_target", task_run_name=named("plan target"), cache_policy=NO_CACHE)
def plan_target(config: Config) -> stages.TargetPlan:
    """Run `dflash_core.stages.plan_target`; what it converts is kept in the store."""
    return stages.plan_target(config)
