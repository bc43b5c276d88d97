"""The stages of an evaluation, and what makes an evaluation the same as an earlier one.

Each stage takes plain values and returns a small manifest (plain data) that points at an artifact in
the store; tensors never leave a stage. Prefect tasks call these functions, and so may anybody else.

    plan_target ─ write_transcripts ─ extract_hidden_states ┐
    inspect ──── stream_checkpoint ─────────────────────────┴ run_drafter ─ evaluation_record ─ database
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import polars
import torch
from safetensors.torch import load_file

from dflash_core import progress
from dflash_core.acceptance import walk
from dflash_core.checkpoints import CheckpointInspection, inspect_checkpoint, stream_checkpoint
from dflash_core.config import Config
from dflash_core.drafter import scoring
from dflash_core.drafter.device import place_drafter
from dflash_core.drafter.model import Drafter
from dflash_core.drafter.spec import ROW_ALIGNMENT, DrafterSpec, read_drafter_spec, target_layer_ids
from dflash_core.errors import ArtifactDamaged, DraftConfigError
from dflash_core.results.records import BLOCK_SCHEMA, CheckpointRecord, EvaluationRecord, PromptRecord
from dflash_core.store import Artifact, Store, digest
from dflash_core.target import hidden_states as hidden
from dflash_core.target import transcripts as written
from dflash_core.target.head import load_embedding_and_head
from dflash_core.target.loading import Target, resolve_target
from dflash_core.target.model_config import ModelConfig
from dflash_core.target.prompts import Prompt, load_prompts
from dflash_core.target.runtime import DTYPES, cpu_dtype

DRAFTER_KIND = "drafter"
BLOCKS_KIND = "blocks"
WEIGHTS_NAME = "weights.safetensors"
BLOCKS_NAME = "blocks.parquet"
STREAMING_VERSION = 1
"""Raised when streaming the same checkpoint would write other tensors."""

Manifest = dict[str, Any]
"""What a stage returns: kind, key, was_built and meta of its artifact."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetPlan:
    """The target, its dtypes and the rendered prompts: all that names transcripts and hidden states."""

    target: Target
    compute_dtype: str
    store_dtype: str
    prompts: tuple[Prompt, ...]
    rendering: written.Rendering
    transcripts_key: str


def plan_target(config: Config) -> TargetPlan:
    """Resolve the target and render the prompts; a GGUF file is converted on first use.

    Raises:
        TargetError: the target cannot be read.
        PromptError: the prompts cannot be read or do not fit.
    """
    prompts = load_prompts(config.prompts)
    target = resolve_target(config.target.model, Store(config.store))
    compute_dtype = cpu_dtype(config.target.compute_dtype, target)
    store_dtype = config.target.store_dtype
    if store_dtype == "auto" and config.target.compute_dtype == "float32":
        store_dtype = "float32"
    settings = config.completions
    rendering = written.render_prompts(
        target, prompts, thinking=settings.thinking, max_new_tokens=settings.max_new_tokens
    )
    return TargetPlan(
        target=target,
        compute_dtype=compute_dtype,
        store_dtype=hidden.store_dtype_of(target, store_dtype, compute_dtype),
        prompts=tuple(prompts),
        rendering=rendering,
        transcripts_key=written.transcripts_key(
            target,
            rendering,
            max_new_tokens=settings.max_new_tokens,
            batch_size=settings.batch_size,
            compute_dtype=compute_dtype,
        ),
    )


def write_transcripts(config: Config) -> Manifest:
    """Have the target continue every prompt, or find what it wrote before."""
    plan = plan_target(config)
    artifact = written.write_transcripts(
        Store(config.store),
        plan.target,
        plan.rendering,
        max_new_tokens=config.completions.max_new_tokens,
        batch_size=config.completions.batch_size,
        compute_dtype=plan.compute_dtype,
    )
    return _manifest(artifact)


def inspect(checkpoint: str, config: Config) -> CheckpointInspection:
    """Read a checkpoint's index: layout, tensors, readiness, identity."""
    return inspect_checkpoint(checkpoint, hosts=config.hosts, run=config.run)


def drafter_key(identity: str) -> str:
    """Return the key of the drafter's own tensors, from the identity that the index gives."""
    return digest(DRAFTER_KIND, STREAMING_VERSION, identity)


def stream_drafter(checkpoint: str, config: Config, identity: str) -> Manifest:
    """Bring the drafter's own tensors into the store, or find them there.

    Args:
        checkpoint: path or URL.
        config: hosts and store.
        identity: what the checkpoint's index said; a checkpoint that changed since is an error.
    """

    def write(folder: Path) -> dict[str, Any]:
        streamed = stream_checkpoint(
            checkpoint,
            folder / WEIGHTS_NAME,
            hosts=config.hosts,
            run=config.run,
            expected_identity=identity,
            on_progress=lambda done, total: progress.report("stream_checkpoint", done, total),
        )
        return {
            "identity": identity,
            "weights_sha256": streamed.weights_sha256,
            "bytes_read": streamed.bytes_read,
            "bytes_wanted": streamed.bytes_wanted,
            "bytes_total": streamed.bytes_total,
        }

    return _manifest(Store(config.store).build(DRAFTER_KIND, drafter_key(identity), write))


def read_spec(inspection: CheckpointInspection, config: Config, target: ModelConfig) -> DrafterSpec:
    """Read the drafter's facts from its own config or the configured one, against tensors and target.

    Raises:
        DraftConfigError: there is no config, or two sources contradict.
        CheckpointMismatch: the drafter does not belong to the target.
        UnsupportedCheckpoint: a kind of drafter that is not scored.
    """
    data, where = draft_config(inspection, config)
    shapes = {
        entry.canonical_name: entry.shape
        for entry in inspection.tensors
        if entry.role == "drafter" and entry.canonical_name is not None
    }
    spec = read_drafter_spec(data, shapes, target, where=where, training_args=_training_args(inspection.facts))
    if config.drafter.block_size is not None and config.drafter.block_size > spec.block_size:
        raise DraftConfigError(
            f"drafter.block_size = {config.drafter.block_size} is longer than the {spec.block_size} the drafter was "
            f"trained with; shorter is allowed"
        )
    return spec


def draft_config(inspection: CheckpointInspection, config: Config) -> tuple[Mapping[str, Any], str]:
    """Return the draft config as plain data and the name of where it was found.

    Raises:
        DraftConfigError: there is none, it cannot be read, or the two that exist differ.
    """
    configured = config.drafter.config
    if configured is None:
        if inspection.config is None:
            raise DraftConfigError(
                f"{inspection.ref.url} carries no config.json, and block size, mask token and target layers cannot be "
                f"told from tensors; set drafter.config to the run's draft config"
            )
        return inspection.config, "config.json"
    return _read_json(configured), configured


def _read_json(path: str) -> dict[str, Any]:
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DraftConfigError(f"drafter.config = {path!r} cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise DraftConfigError(f"drafter.config = {path!r} must hold a JSON object")
    return data


def configured_layers(config: Config, plan: TargetPlan) -> tuple[int, ...]:
    """Return the target layers that the configured draft config names; none where there is no such config.

    Raises:
        DraftConfigError: the file cannot be read, or its list is malformed.
        CheckpointMismatch: it names a layer that the target does not have.
    """
    if config.drafter.config is None:
        return ()
    data, where = _read_json(config.drafter.config), config.drafter.config
    return target_layer_ids(data, plan.target.config, where=where)


def _training_args(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the checkpoint itself states about the drafter: at its top level, else in its `args`."""
    of_args = {name.removeprefix("args."): value for name, value in facts.items() if name.startswith("args.")}
    return of_args | {name: value for name, value in facts.items() if "." not in name}


def hidden_states_key(plan: TargetPlan, transcripts: str, layers: tuple[int, ...]) -> str:
    """Return one key over all stored parts that a drafter's layers need."""
    dtypes = {"compute_dtype": plan.compute_dtype, "store_dtype": plan.store_dtype}
    parts: list[int | str] = [*dict.fromkeys(layers), hidden.FINAL, hidden.CHOICES]
    return digest([hidden.layer_key(plan.target, transcripts, part, **dtypes) for part in parts])


def hidden_states_are_whole(config: Config, plan: TargetPlan, transcripts: str, layers: tuple[int, ...]) -> bool:
    """Tell whether the store holds every part that a drafter's layers need."""
    found = hidden.find_hidden_states(
        Store(config.store),
        plan.target,
        transcripts,
        layers,
        compute_dtype=plan.compute_dtype,
        store_dtype=plan.store_dtype,
    )
    return found is not None


def extract_hidden_states(config: Config, layers: tuple[int, ...]) -> Manifest:
    """Run the target once over its transcripts and keep the states of some layers, or find them."""
    plan = plan_target(config)
    transcripts = _read_transcripts(config, plan)
    states = hidden.extract_hidden_states(
        Store(config.store),
        plan.target,
        transcripts,
        layers,
        compute_dtype=plan.compute_dtype,
        store_dtype=plan.store_dtype,
    )
    name = written.transcripts_digest(transcripts)
    return {
        "kind": hidden.KIND,
        "key": hidden_states_key(plan, name, layers),
        "was_built": states.was_built,
        "meta": {"layers": list(layers), "num_tokens": states.choices.meta["num_tokens"]}
        | {"num_not_greedy": states.choices.meta["num_not_greedy"]},
    }


def evaluation_spec(
    config: Config, plan: TargetPlan, transcripts: Mapping[str, Any], drafter: DrafterSpec, weights_sha256: str
) -> dict[str, Any]:
    """Return everything that decides the numbers, as plain data: the identity of an evaluation.

    Args:
        config: block size, anchors and device.
        plan: the target and its dtypes.
        transcripts: meta of the transcripts' artifact.
        drafter: facts of the drafter.
        weights_sha256: digest of its tensors.

    Raises:
        InputError: the configured device does not exist.
        DoesNotFit: the drafter does not fit the configured device.
    """
    placement = place_drafter(config.device, drafter)
    return {
        "metrics_version": walk.METRICS_VERSION,
        "extraction_version": hidden.EXTRACTION_VERSION,
        "transcripts_version": written.TRANSCRIPTS_VERSION,
        "target": plan.target.name,
        "target_identity": plan.target.identity,
        "transcripts_digest": transcripts["digest"],
        "template_digest": transcripts["template_digest"],
        "tokenizer_digest": transcripts["tokenizer_digest"],
        "thinking": transcripts["thinking"],
        "max_new_tokens": transcripts["max_new_tokens"],
        "sampling": transcripts["sampling"],
        "compute_dtype": plan.compute_dtype,
        "store_dtype": plan.store_dtype,
        "drafter": drafter.identity(),
        "weights_sha256": weights_sha256,
        "block_size": config.drafter.block_size or drafter.block_size,
        "anchors": config.drafter.anchors,
        "device": placement.device.type,
        "drafter_dtype": str(placement.dtype).removeprefix("torch."),
        "row_alignment": ROW_ALIGNMENT,
        "verification_rule": walk.VERIFICATION_RULE,
        "counting_rule": walk.COUNTING_RULE,
        "tie_margin": scoring.TIE_MARGIN,
    }


def blocks_key(spec: Mapping[str, Any]) -> str:
    """Return the key of a drafter's scored blocks."""
    return digest(BLOCKS_KIND, spec)


def evaluation_id(spec: Mapping[str, Any], checkpoint_id: str) -> str:
    """Return the identity of one evaluation: the checkpoint and everything that decides its numbers."""
    return digest("evaluation", checkpoint_id, spec)


def run_drafter(config: Config, spec: Mapping[str, Any], drafter_artifact_key: str, drafter: DrafterSpec) -> Manifest:
    """Run a drafter over the stored transcripts and keep one row per block, or find them.

    Args:
        config: device, store and what names transcripts and hidden states.
        spec: what decides the numbers (see `evaluation_spec`).
        drafter_artifact_key: key of the drafter's tensors.
        drafter: its facts.

    Raises:
        ArtifactDamaged: an earlier stage's artifact is no longer in the store; run the flow again.
    """
    store = Store(config.store)

    def write(folder: Path) -> dict[str, Any]:
        plan = plan_target(config)
        transcripts = _read_transcripts(config, plan)
        states = hidden.find_hidden_states(
            store,
            plan.target,
            written.transcripts_digest(transcripts),
            drafter.target_layer_ids,
            compute_dtype=plan.compute_dtype,
            store_dtype=plan.store_dtype,
        )
        weights = store.find(DRAFTER_KIND, drafter_artifact_key)
        if states is None or weights is None:
            raise ArtifactDamaged(f"hidden states or drafter vanished from the store {store.root}; evaluate again")
        rows = _score(plan, transcripts, states, weights, drafter, spec)
        frame = polars.DataFrame(rows, schema=BLOCK_SCHEMA)
        frame.write_parquet(folder / BLOCKS_NAME)
        return {"num_blocks": frame.height, "device": spec["device"], "dtype": spec["drafter_dtype"]}

    return _manifest(store.build(BLOCKS_KIND, blocks_key(spec), write))


def _score(
    plan: TargetPlan,
    transcripts: list[written.Transcript],
    states: hidden.HiddenStates,
    weights: Artifact,
    drafter: DrafterSpec,
    spec: Mapping[str, Any],
) -> list[dict[str, Any]]:
    tensors = load_file(weights.file(WEIGHTS_NAME))
    device, dtype = torch.device(spec["device"]), DTYPES[spec["drafter_dtype"]]
    embedding_VD, head_VD = load_embedding_and_head(plan.target)
    model = Drafter(drafter, tensors, embedding_VD, device=device, dtype=dtype)
    layers = [states.load_layer(layer) for layer in drafter.target_layer_ids]
    ends = torch.tensor([transcript.num_tokens for transcript in transcripts]).cumsum(0).tolist()
    starts = [0, *ends]

    def features_of(index: int) -> torch.Tensor:
        return torch.cat([layer[starts[index] : ends[index]] for layer in layers], dim=-1)

    return scoring.score_transcripts(
        model,
        scoring.Head(head_VD, model),
        transcripts,
        features_of,
        states.load_margins(),
        block_size=spec["block_size"],
        max_new_tokens=spec["max_new_tokens"],
        anchors=spec["anchors"],
    )


def checkpoint_record(inspection: CheckpointInspection, weights_sha256: str | None) -> CheckpointRecord:
    """Return the database's row of a checkpoint: the same step with new bytes is a new one."""
    ref = inspection.ref
    return CheckpointRecord(
        checkpoint_id=digest("checkpoint", ref.run, ref.step, weights_sha256 or ref.identity),
        run=ref.run,
        step=ref.step,
        url=ref.url,
        layout=ref.layout,
        identity=ref.identity,
        weights_sha256=weights_sha256,
        bytes_total=inspection.bytes_total,
        bytes_wanted=inspection.bytes_wanted,
    )


def done_record(
    config: Config,
    checkpoint: CheckpointRecord,
    spec: Mapping[str, Any],
    blocks: Manifest,
    *,
    started_at: datetime,
    seconds: dict[str, float],
    cached: dict[str, bool],
    bytes_read: int,
) -> EvaluationRecord:
    """Return the record of a finished evaluation, with its blocks read from the store."""
    store = Store(config.store)
    artifact = store.find(BLOCKS_KIND, blocks["key"])
    if artifact is None:
        raise ArtifactDamaged(f"the scored blocks vanished from the store {store.root}; evaluate again")
    plan = plan_target(config)
    return EvaluationRecord(
        evaluation_id=evaluation_id(spec, checkpoint.checkpoint_id),
        checkpoint=checkpoint,
        status="done",
        error=None,
        spec={**spec, "environment": environment()},
        target=str(spec["target"]),
        block_size=int(spec["block_size"]),
        device=artifact.meta["device"],
        dtype=artifact.meta["dtype"],
        transcripts_digest=str(spec["transcripts_digest"]),
        started_at=started_at,
        seconds=seconds,
        cached=cached,
        bytes_read=bytes_read,
        prompts=_prompt_records(plan, _read_transcripts(config, plan)),
        blocks=polars.read_parquet(artifact.file(BLOCKS_NAME)),
    )


def failed_record(
    config: Config, checkpoint: CheckpointRecord, error: str, *, started_at: datetime, seconds: dict[str, float]
) -> EvaluationRecord:
    """Return the record of an evaluation that failed; it holds no number."""
    conditions = config.model_dump(mode="json", exclude={"hosts"})
    return EvaluationRecord(
        evaluation_id=digest("failed", checkpoint.checkpoint_id, conditions),
        checkpoint=checkpoint,
        status="failed",
        error=error,
        spec={"environment": environment()},
        target=str(config.target.model),
        block_size=config.drafter.block_size,
        device=None,
        dtype=None,
        transcripts_digest=None,
        started_at=started_at,
        seconds=seconds,
        cached={},
        bytes_read=0,
    )


def known_evaluation_id(config: Config, inspection: CheckpointInspection) -> str | None:
    """Return the identity that an evaluation of this checkpoint would have, if the store can tell.

    Nothing is streamed or computed: None where the transcripts or the drafter are not in the store.
    """
    store = Store(config.store)
    weights = store.find(DRAFTER_KIND, drafter_key(inspection.ref.identity))
    plan = plan_target(config) if weights is not None else None
    transcripts = store.find(written.KIND, plan.transcripts_key) if plan is not None else None
    if weights is None or plan is None or transcripts is None:
        return None
    drafter = read_spec(inspection, config, plan.target.config)
    sha256 = weights.meta["weights_sha256"]
    spec = evaluation_spec(config, plan, transcripts.meta, drafter, sha256)
    return evaluation_id(spec, checkpoint_record(inspection, sha256).checkpoint_id)


def environment() -> dict[str, str]:
    """Return the versions that a number may depend on; recorded, not part of the identity."""
    packages = ("torch", "transformers", "safetensors", "polars", "duckdb", "prefect")
    return {name: version(name) for name in packages} | {"python": platform.python_version()}


def now() -> datetime:
    """Return the present time in UTC."""
    return datetime.now(UTC)


def _manifest(artifact: Artifact) -> Manifest:
    return {
        "kind": artifact.kind,
        "key": artifact.key,
        "was_built": artifact.was_built,
        "meta": dict(artifact.meta),
    }


def _read_transcripts(config: Config, plan: TargetPlan) -> list[written.Transcript]:
    store = Store(config.store)
    artifact = store.find(written.KIND, plan.transcripts_key)
    if artifact is None:
        raise ArtifactDamaged(f"the transcripts vanished from the store {store.root}; evaluate again")
    return written.read_transcripts(artifact)


def _prompt_records(plan: TargetPlan, transcripts: list[written.Transcript]) -> tuple[PromptRecord, ...]:
    tokenizer = written.load_tokenizer(plan.target)
    of_id = {prompt.id: prompt for prompt in plan.prompts}
    return tuple(
        PromptRecord(
            prompt_id=transcript.id,
            dataset=of_id[transcript.id].dataset,
            group=of_id[transcript.id].group,
            num_prompt_tokens=len(transcript.prompt_ids),
            num_response_tokens=len(transcript.response_ids),
            stop_reason=transcript.stop_reason,
            prompt_text=of_id[transcript.id].messages[-1][1],
            response_text=tokenizer.decode(transcript.response_ids, skip_special_tokens=True),
        )
        for transcript in transcripts
    )
