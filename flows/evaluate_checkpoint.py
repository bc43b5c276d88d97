"""Flow: score one checkpoint and write the rows; deployed as `evaluate-checkpoint`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime
from typing import Any, Literal, NamedTuple

from prefect import flow
from prefect.client.schemas.objects import State

from dflash_core import evaluation, progress, stages
from dflash_core.checkpoints import CheckpointInspection
from dflash_core.config import Config, load_config, with_overrides
from dflash_core.drafter_reading import read_drafter
from dflash_core.errors import CheckpointNotFound
from dflash_core.hosts.present import report_from_json
from dflash_core.refreshing import Refresh, refreshing
from dflash_core.results import database
from flows.artifacts import live_progress
from flows.conclusion import conclude, conclude_failure
from flows.device_slot import device_slot
from flows.run_names import evaluation_name
from flows.scoring import known_result
from flows.target_part import TargetPart, ensure_prepared
from flows.telling import say
from tasks.extract_hidden_states import extract_hidden_states
from tasks.plan_target import plan_target
from tasks.probe_hosts import probe_hosts
from tasks.run_drafter import run_drafter
from tasks.stream_checkpoint import stream_checkpoint
from tasks.write_results import write_results
from tasks.write_transcripts import write_transcripts

_WORTH_A_WORD_S = 1.0


class _Clock:
    """Seconds and cache hits per stage, and what was read from the checkpoint's host."""

    def __init__(self) -> None:
        self.started_at: datetime = evaluation.now()
        self.seconds: dict[str, float] = {}
        self.cached: dict[str, bool] = {}
        self.begin = time.monotonic()
        self._bytes_before = 0
        self._counter = progress.BytesRead()

    @property
    def bytes_read(self) -> int:
        """What was read from the checkpoint's host up to now, failed attempts included."""
        return self._bytes_before + self._counter.total

    @contextmanager
    def counting(self, bytes_before: int) -> Iterator[None]:
        """Count what is read from the checkpoint's host."""
        self._bytes_before = bytes_before
        with progress.counting_bytes() as self._counter:
            yield

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        begin = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = round(time.monotonic() - begin, 3)

    @contextmanager
    def waiting(self, slot: AbstractContextManager[None]) -> Iterator[None]:
        """Hold a slot, and note how long it took to get it where that was worth a word."""
        begin = time.monotonic()
        with slot:
            waited = time.monotonic() - begin
            if waited >= _WORTH_A_WORD_S:
                self.seconds["wait_for_device"] = round(waited, 3)
            yield

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
    prepare: str | None = None,
    refresh: list[Literal["transcripts", "hidden_states", "drafter", "blocks", "results", "all"]] | None = None,
) -> dict[str, Any]:
    """Score one checkpoint of a drafter and write the rows into the results database.

    A checkpoint that was scored under the same conditions is answered from that database.

    Args:
        checkpoint: path or fsspec URL of the checkpoint, for example `ssh://user@host:22/runs/a/step_100`.
        config: the configuration file on the machine that runs this; none takes dflash.yaml or the defaults.
        block_size: draft shorter blocks than the drafter was trained with; its own number.
        device: where the drafter runs, instead of the config's.
        prepare: who runs the target where the store lacks its part: `here`, or a deployment that is waited for. None
            hands it to `prepare-target/prepare-target` where the store is shared or the target does not fit here, and
            a worker is up for it; else here.
        refresh: make these stages again, and what is made from them, whatever the store and the database hold.
    """
    settings = with_overrides(load_config(config), block_size=block_size, device=device)
    clock = _Clock()
    inspection: CheckpointInspection | None = None
    try:
        with clock.stage("inspect"):
            inspection = evaluation.inspect(checkpoint, settings)
        with refreshing(refresh or ()) as again, clock.counting(inspection.bytes_read):
            is_asked_again = bool(again.stages) or not inspection.ready or inspection.refusal is not None
            known = None if is_asked_again else known_result(settings, inspection, clock.begin)
            if known is not None:
                conclude(settings, known)
                return known
            ref = inspection.ref
            with live_progress(ref.run if ref.step is None else f"{ref.run}:{ref.step}"):
                wanted = _Wanted(settings, config, checkpoint, inspection, prepare)
                result = _evaluate(wanted, clock, again)
        conclude(settings, result)
        return result
    except Exception as error:  # the flow's boundary: every failure of a checkpoint that was found is a row
        if inspection is None or not inspection.ready:
            raise
        if isinstance(error, CheckpointNotFound):  # but it was found before
            vanished = evaluation.vanished(inspection)
            _write_failure(settings, inspection, vanished, clock)
            raise vanished from error
        _write_failure(settings, inspection, error, clock)
        raise


class _Wanted(NamedTuple):
    """What is to be scored, and how."""

    config: Config
    config_path: str | None
    checkpoint: str
    inspection: CheckpointInspection
    prepare: str | None


def _evaluate(wanted: _Wanted, clock: _Clock, again: Refresh) -> dict[str, Any]:
    """Chain the stages; each finds in the store what was made before."""
    config, inspection = wanted.config, wanted.inspection
    evaluation.require_ready(inspection)
    with clock.stage("plan_target"):
        plan = plan_target(config)
    with clock.stage("probe_hosts"):
        reports = [report_from_json(report) for report in probe_hosts(config)]
    drafter = read_drafter(inspection, config, plan.target.config)
    drafter_key = stages.drafter_key(inspection, config)
    streamed = clock.run(
        "stream_checkpoint",
        stream_checkpoint,
        config,
        config.store,
        drafter_key,
        wanted.checkpoint,
        inspection.ref.identity,
    )
    layers = drafter.target_layer_ids
    with clock.stage("prepare_target"):
        part = TargetPart(
            config=config,
            config_path=wanted.config_path,
            plan=plan,
            layers=layers,
            reports=reports,
        )
        ensure_prepared(part, wanted.prepare, again, say)
    transcripts = clock.run("write_transcripts", write_transcripts, config, config.store, plan.transcripts_key)
    name = transcripts["meta"]["digest"]
    states_key = stages.hidden_states_key(plan, name, layers)
    states = clock.run(
        "extract_hidden_states", extract_hidden_states, config, config.store, states_key, name, list(layers)
    )
    weights_sha256 = streamed["meta"]["weights_sha256"]
    with clock.waiting(device_slot(config, say)):  # before it is decided whether the drafter fits
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
            *drafter.doubts,
            *streamed["meta"]["warnings"],
            *transcripts["meta"].get("warnings", []),
            *states["meta"].get("warnings", []),
            *again.take_differing(),
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
        bytes_read=clock.bytes_read,
    )
    write_results(config.results, record)
    conclude_failure(config, inspection, error)
