"""Task: the target reads its transcripts once, and the states that drafters ask for are kept."""

from __future__ import annotations

from typing import Any

from prefect import task

from dflash_core import stages
from dflash_core.config import Config
from dflash_core.target.hidden_states import KIND
from tasks.caching import SERIALIZER, ArtifactPolicy
from tasks.naming import named


def _states_in_store(_kind: str, inputs: dict[str, Any]) -> dict[str, Any] | None:
    config, layers = inputs["config"], inputs["layers"]
    plan = stages.plan_target(config)
    states = stages.find_states(config, plan, inputs["transcripts"], tuple(layers))
    return None if states is None else stages.states_meta(states, layers)


@task(
    name="extract_hidden_states",
    task_run_name=named("extract hidden states"),
    cache_policy=ArtifactPolicy(kind=KIND, find_meta=_states_in_store),
    result_serializer=SERIALIZER,
)
def extract_hidden_states(config: Config, store: str, key: str, transcripts: str, layers: list[int]) -> dict[str, Any]:
    """Run `dflash_core.stages.extract_hidden_states`."""
    return stages.extract_hidden_states(config, tuple(layers))
