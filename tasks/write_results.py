"""Task: put one evaluation into the results database, in one transaction."""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE

from dflash_core.results import database
from dflash_core.results.records import EvaluationRecord
from tasks.naming import named


@task(name="write_results", task_run_name=named("write results"), cache_policy=NO_CACHE)
def write_results(results: str, record: EvaluationRecord) -> str:
    """Run `dflash_core.results.database.write_evaluation`; the same evaluation again replaces its rows."""
    database.write_evaluation(results, record)
    return record.evaluation_id
