"""Flow: score one checkpoint and write the rows; deployed as `evaluate-checkpoint`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any, Literal

from prefect import flow
from prefect.client.schemas.objects import State

from dflash_core import evaluation, stages
from dflash_core.checkpoints import CheckpointInspection
from dflash_core.config import Config, load_config, with_overrides
from dflash_core.errors import CheckpointNotFound
from dflash_core.hosts.present import report_from_json
from dflash_core.results import database
from flows.planning import require_target_fits
from flows.run_names import evaluation_name
from tasks.extract_hidden_states import extract_hidden_states
from tasks.plan_target import plan_target
from tasks.probe_hosts import probe_hosts
from tasks.run_drafter import run_drafter
from tasks.stream_checkpoint import stream_checkpoint
from tasks.write_results import write_results
from tasks.write_transcripts import write_transcripts


class _Clock:
    """Seconds and cache hits per stage, and what was read from the checkpoint's host."""

    def __init__(self) -> None:
        self.started_at: datetime = evaluation.now()
        self.seconds: dict[str, float] = {}
        self.cached: dict[str, bool] = {}
        self.bytes_read = 0

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        begin = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = round(time.monotonic() - begin, 3)

    def run(self, name: str, task: Any, *arguments: Any) -> stages.Manifest:
        """Run a cached task and note how long it took and whether the store had its product."""
        with self.stage(name):
            state: State[stages.Manifest] = task(*arguments, return_state=True)
            manifest = state.result()
        self.cached[name] = state.name == "Cached" or not manifest["was_built"]
        return manifest


@flow(name="evaluate-checkpoint", flow_run_name=evaluation_name, validate_parameters=True)
def evaluate_checkpoint(
    checkpoint: str,
    config: str | None = None,
    block_size: int | None = None,
    device: Literal["auto", "cuda", "cpu"] | None = None,
) -> dict[str, Any]:
    """Score one checkpoint of a drafter and write the rows into the results database.

    Args:
        checkpoint: path or fsspec URL of the checkpoint, for example `ssh://user@host:22/runs/a/step_100`.
        config: the configuration file on the machine that runs this; none takes dflash.yaml or the defaults.
        block_size: draft shorter blocks than the drafter was trained with; its own number.
        device: where the drafter runs, instead of the config's.
    """
    settings = with_overrides(load_config(config), block_size=block_size, device=device)
    clock = _Clock()
    inspection: CheckpointInspection | None = None
    try:
        with clock.stage("inspect"):
            inspection = evaluation.inspect(checkpoint, settings)
        clock.bytes_read = inspection.bytes_read
        return _evaluate(settings, checkpoint, inspection, clock)
    except Exception as error:  # the flow's boundary: every failure of a checkpoint that was found is a row
        if inspection is None or not inspection.ready:
            raise
        if isinstance(error, CheckpointNotFound):  # but it was found before
            vanished = evaluation.vanished(inspection)
            _write_failure(settings, inspection, vanished, clock)
            raise vanished from error
        _write_failure(settings, inspection, error, clock)
        raise


def _evaluate(config: Config, checkpoint: str, inspection: CheckpointInspection, clock: _Clock) -> dict[str, Any]:
    """Chain the stages; each finds in the store what was made before."""
    evaluation.require_ready(inspection)
    with clock.stage("plan_target"):
        plan = plan_target(config)
    with clock.stage("probe_hosts"):
        reports = [report_from_json(report) for report in probe_hosts(config)]
    drafter = evaluation.read_spec(inspection, config, plan.target.config)
    identity = inspection.ref.identity
    drafter_key = stages.drafter_key(inspection, config)
    streamed = clock.run(
        "stream_checkpoint", stream_checkpoint, config, config.store, drafter_key, checkpoint, identity
    )
    if not clock.cached["stream_checkpoint"]:
        clock.bytes_read += streamed["meta"]["bytes_read"]
    if not stages.is_prepared(config, plan, drafter.target_layer_ids):
        require_target_fits(config, reports, has_transcripts=stages.has_transcripts(config, plan))
    transcripts = clock.run("write_transcripts", write_transcripts, config, config.store, plan.transcripts_key)
    name, layers = transcripts["meta"]["digest"], drafter.target_layer_ids
    states_key = stages.hidden_states_key(plan, name, layers)
    states = clock.run(
        "extract_hidden_states", extract_hidden_states, config, config.store, states_key, name, list(layers)
    )
    weights_sha256 = streamed["meta"]["weights_sha256"]
    spec = evaluation.evaluation_spec(config, plan, transcripts["meta"], drafter, weights_sha256)
    blocks_key = stages.blocks_key(spec)
    blocks = clock.run("run_drafter", run_drafter, config, config.store, blocks_key, spec, drafter_key, drafter)
    record = evaluation.done_record(
        config,
        evaluation.checkpoint_record(inspection, weights_sha256),
        spec,
        blocks,
        started_at=clock.started_at,
        seconds=clock.seconds,
        cached=clock.cached,
        bytes_read=clock.bytes_read,
        warnings=[
            *inspection.contradictions,
            *streamed["meta"]["warnings"],
            *transcripts["meta"].get("warnings", []),
            *states["meta"].get("warnings", []),
        ],
    )
    write_results(config.results, record)
    result = database.read_evaluation(config.results, record.evaluation_id)
    assert result is not None, record.evaluation_id
    return result


def _write_failure(config: Config, inspection: CheckpointInspection, error: Exception, clock: _Clock) -> None:
    record = evaluation.failed_record(
        config,
        evaluation.checkpoint_record(inspection, None),
        error,
        started_at=clock.started_at,
        seconds=clock.seconds,
    )
    write_results(config.results, record)
