"""Task: the target continues every prompt, once."""

from __future__ import annotations

from typing import Any

from prefect import task

from dflash_core import stages
from dflash_core.config import Config
from dflash_core.target.transcripts import KIND
from tasks.caching import SERIALIZER, ArtifactPolicy
from tasks.naming import named


@task(
    name="write_transcripts",
    task_run_name=named("write transcripts"),
    cache_policy=ArtifactPolicy(kind=KIND),
    result_serializer=SERIALIZER,
)
def write_transcripts(config: Config, store: str, key: str) -> dict[str, Any]:
    """Run `dflash_core.stages.write_transcripts`."""
    return stages.write_transcripts(config)
