"""Task: the target reads its transcripts once, and the states that drafters ask for are kept."""

from __future__ import annotations

from typing import Any

from prefect import task

from dflash_core import stages
from dflash_core.config import Config
from dflash_core.target.hidden_states import KIND
from tasks.caching import SERIALIZER, ArtifactPolicy


def _states_are_whole(_kind: str, inputs: dict[str, Any]) -> bool:
    config = inputs["config"]
    plan = stages.plan_target(config)
    return stages.find_states(config, plan, inputs["transcripts"], tuple(inputs["layers"])) is not None


@task(
    name="extract_hidden_states",
    task_run_name="extract hidden states {layers}",
    cache_policy=ArtifactPolicy(kind=KIND, is_whole=_states_are_whole),
    result_serializer=SERIALIZER,
)
def extract_hidden_states(config: Config, store: str, key: str, transcripts: str, layers: list[int]) -> dict[str, Any]:
    """Run `dflash_core.stages.extract_hidden_states`."""
    return stages.extract_hidden_states(config, tuple(layers))
