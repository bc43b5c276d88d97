"""Task: ask this machine what it has, before anything is loaded."""

from __future__ import annotations

from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from dflash_core.config import Config
from dflash_core.hosts import present, probe
from tasks.naming import named


@task(name="probe_hosts", task_run_name=named("probe this machine"), cache_policy=NO_CACHE)
def probe_hosts(config: Config) -> list[dict[str, Any]]:
    """Run `dflash_core.hosts.probe.probe_hosts` for this machine; a scoring disturbs no other host."""
    here = {name: host for name, host in config.hosts.items() if host.url == "local"}
    reports = probe.probe_hosts(config.model_copy(update={"hosts": here}))
    return [present.report_json(report) for report in reports]
