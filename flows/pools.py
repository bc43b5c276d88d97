"""Work pools on the Prefect server: made where they are missing, brought up to date where they are there.

    python -m flows.pools cpu gpu

`prefect work-pool create` has the server ask the internet which kinds of pools there are; the template of
this one is part of Prefect. A pool that is there keeps its limit, and stays paused where somebody paused it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
from prefect.exceptions import ObjectNotFound
from prefect.workers.process import ProcessWorker


def ensure_pools(names: Sequence[str]) -> None:
    """Make pools whose workers run flows as processes, with the template of this Prefect."""
    template = ProcessWorker.get_default_base_job_template()
    with get_client(sync_client=True) as client:
        for name in names:
            try:
                client.update_work_pool(name, WorkPoolUpdate(base_job_template=template))
            except ObjectNotFound:
                client.create_work_pool(
                    WorkPoolCreate(name=name, type=ProcessWorker.type, base_job_template=template), overwrite=True
                )


if __name__ == "__main__":
    ensure_pools(sys.argv[1:])
