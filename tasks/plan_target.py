"""Task: find the target, converting a GGUF file on first use, and render the prompts."""

from __future__ import annotations

from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from dflash_core import evaluation
from dflash_core.config import Config


@task(name="plan_target", task_run_name="plan target", cache_policy=NO_CACHE)
def plan_target(config: Config) -> Any:
    """Run `dflash_core.evaluation.plan_target`; what it converts is kept in the store."""
    return evaluation.plan_target(config)
