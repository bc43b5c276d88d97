"""Task: bring the drafter's own tensors from where the checkpoint lies into the store."""

from __future__ import annotations

from typing import Any

from prefect import Task, task
from prefect.client.schemas.objects import State, TaskRun

from dflash_core import stages
from dflash_core.config import Config
from dflash_core.errors import HostUnreachable
from tasks.caching import SERIALIZER, ArtifactPolicy
from tasks.naming import named


def is_transient(_task: Task[..., Any], _run: TaskRun, state: State[Any]) -> bool:
    """Retry only what the network may have caused."""
    try:
        state.result()
    except HostUnreachable:
        return True
    except Exception:  # whatever else it was, it would happen again
        return False
    return False


@task(
    name="stream_checkpoint",
    task_run_name=named("stream"),
    cache_policy=ArtifactPolicy(kind=stages.DRAFTER_KIND),
    result_serializer=SERIALIZER,
    retries=2,
    retry_delay_seconds=[2, 10],
    retry_condition_fn=is_transient,
)
def stream_checkpoint(config: Config, store: str, key: str, checkpoint: str, identity: str) -> dict[str, Any]:
    """Run `dflash_core.stages.stream_drafter`."""
    return stages.stream_drafter(checkpoint, config, identity, key)
