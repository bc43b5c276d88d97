"""Task: ask machines what they have."""

from __future__ import annotations

from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from dflash_core.config import Config
from dflash_core.hosts import present, probe


@task(name="probe_hosts", task_run_name="probe hosts", cache_policy=NO_CACHE)
def probe_hosts(config: Config) -> list[dict[str, Any]]:
    """Run `dflash_core.hosts.probe.probe_hosts`; a host that is down is a row, not a failure."""
    return [present.report_json(report) for report in probe.probe_hosts(config)]
