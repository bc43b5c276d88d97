"""What an evaluation is: the facts that decide its numbers, its identity, and its record.

Two evaluations with one identity have the same numbers; a checkpoint that was scored under the same
conditions is known by it, without streaming or computing anything.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any, NamedTuple

import polars

from dflash_core import stages
from dflash_core.acceptance import walk
from dflash_core.checkpoints import CheckpointInspection, inspect_checkpoint
from dflash_core.config import Config
from dflash_core.drafter.device import place_drafter
from dflash_core.drafter.extra_choice import choose_extras
from dflash_core.drafter.spec import ROW_ALIGNMENTS, DrafterSpec, target_layer_ids
from dflash_core.drafter_reading import read_drafter, read_json
from dflash_core.drafter_workload import expected_workload
from dflash_core.errors import (
    ArtifactDamaged,
    CheckpointNotReady,
    CheckpointVanished,
    DFlashEvalError,
    UnsupportedCheckpoint,
    one_line,
)
from dflash_core.extras import read_extras
from dflash_core.results.records import CheckpointRecord, EvaluationRecord, PromptRecord
from dflash_core.stages import Manifest, TargetPlan
from dflash_core.store import digest
from dflash_core.store_opening import store_of
from dflash_core.target import hidden_states as hidden
from dflash_core.target import transcripts as written
from dflash_core.target.agreement import TIE_MARGIN

CONFIDENCE_RULE = "the confidence head ends no draft: all that a block drafts is judged"
"""Recorded for drafters that have such a head."""


def inspect(checkpoint: str, config: Config) -> CheckpointInspection:
    """Read a checkpoint's index: layout, tensors, readiness, identity."""
    return inspect_checkpoint(checkpoint, hosts=config.hosts, run=config.run)


def require_ready(inspection: CheckpointInspection) -> None:
    """Refuse a checkpoint that is still being written, or whose tensors are not those of a drafter.

    Raises:
        CheckpointNotReady: with the reason.
        UnsupportedCheckpoint: it cannot be scored at all.
    """
    if not inspection.ready:
        url = inspection.ref.url
        raise CheckpointNotReady(f"{url} is not ready: {inspection.not_ready_reason}; try again later")
    if inspection.refusal is not None:
        raise UnsupportedCheckpoint(inspection.refusal)


def configured_layers(config: Config, plan: TargetPlan) -> tuple[int, ...]:
    """Return the target layers that the configured draft config names; none where there is no such config.

    Raises:
        DraftConfigError: the file cannot be read, or its list is malformed.
        CheckpointMismatch: it names a layer that the target does not have.
    """
    if config.drafter.config is None:
        return ()
    data, where = read_json(config.drafter.config), config.drafter.config
    return target_layer_ids(data, plan.target.config, where=where)


def evaluation_spec(
    config: Config, plan: TargetPlan, transcripts: Mapping[str, Any], drafter: DrafterSpec, weights_sha256: str
) -> dict[str, Any]:
    """Return everything that decides the numbers, as plain data: the identity of an evaluation.

    `extras` stands in it only where more numbers are wanted; they decide none of the others.

    Args:
        config: block size, anchors, device and extras.
        plan: the target and its dtypes.
        transcripts: meta of the transcripts' artifact.
        drafter: facts of the drafter.
        weights_sha256: digest of its tensors.

    Raises:
        InputError: the configured device does not exist.
        DoesNotFit: the drafter does not fit the configured device.
    """
    block_size = config.drafter.block_size or drafter.block_size
    extras = choose_extras(config.drafter, block_size=block_size, proposal_rule=drafter.proposal_rule)
    work = expected_workload(
        plan.rendering,
        transcripts,
        block_size=block_size,
        extras=extras,
        has_own_head=True,  # it may have, which is known once it is streamed
        store_dtype=plan.store_dtype,
    )
    placement = place_drafter(config.device, drafter, work)
    optional: dict[str, Any] = {"extras": extras} if extras else {}
    if drafter.has_confidence_head:
        optional["confidence_rule"] = CONFIDENCE_RULE
    return optional | {
        "metrics_version": walk.METRICS_VERSION,
        "extraction_version": hidden.EXTRACTION_VERSION,
        "transcripts_version": written.TRANSCRIPTS_VERSION,
        "target": plan.target.name,
        "target_identity": plan.target.identity,
        "transcripts_digest": labelled_digest(plan, transcripts["digest"]),
        "tokens_digest": transcripts["digest"],
        # Of this plan, not of the artifact: one text may be rendered under several templates and flags.
        "chat_template_digest": plan.rendering.template_digest,
        "tokenizer_digest": plan.rendering.tokenizer_digest,
        "thinking": plan.rendering.thinking,
        "max_new_tokens": transcripts["max_new_tokens"],
        "sampling": transcripts["sampling"],
        "target_dtype": plan.compute_dtype,
        "store_dtype": plan.store_dtype,
        "drafter": drafter.identity(),
        "weights_sha256": weights_sha256,
        "block_size": block_size,
        "anchors": config.drafter.anchors,
        "device": placement.device,
        "drafter_dtype": placement.dtype,
        "row_alignment": ROW_ALIGNMENTS[drafter.row_alignment],
        "verification_rule": walk.VERIFICATION_RULE,
        "counting_rule": walk.counting_rule(drafter.row_alignment),
        "tie_margin": TIE_MARGIN,
    }


def labelled_digest(plan: TargetPlan, tokens_digest: str) -> str:
    """Return the digest of transcripts with their datasets and groups: other labels make other rows."""
    return digest(tokens_digest, [[prompt.id, prompt.dataset, prompt.group] for prompt in plan.prompts])


def evaluation_id(spec: Mapping[str, Any], checkpoint_id: str) -> str:
    """Return the identity of one evaluation: the checkpoint and everything that decides its numbers.

    The target's name decides nothing: `target_identity` is what its files hold. Extras stand beside the numbers.
    """
    deciding = {name: value for name, value in spec.items() if name not in ("target", "extras")}
    return digest("evaluation", checkpoint_id, deciding)


def checkpoint_record(inspection: CheckpointInspection, weights_sha256: str | None) -> CheckpointRecord:
    """Return the database's row of a checkpoint: the same step with new bytes is a new one."""
    ref = inspection.ref
    return CheckpointRecord(
        checkpoint_id=digest("checkpoint", ref.run, ref.step, ref.identity),
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
    warnings: Sequence[str] = (),
) -> EvaluationRecord:
    """Return the record of a finished evaluation, with its blocks read from the store.

    `warnings` are what a person should know of this checkpoint before trusting its numbers.
    """
    store = store_of(config)
    artifact = store.find(stages.BLOCKS_KIND, blocks["key"])
    if artifact is None:
        raise ArtifactDamaged(f"the scored blocks vanished from the store {store}; evaluate again")
    plan = stages.plan_target(config)
    return EvaluationRecord(
        evaluation_id=evaluation_id(spec, checkpoint.checkpoint_id),
        checkpoint=checkpoint,
        status="done",
        error=None,
        spec={
            **spec,
            "packages": environment(),
            "warnings": [*warnings, *spec.get("extras", {}).get("left_out", [])],
        },
        target=str(spec["target"]),
        block_size=int(spec["block_size"]),
        # The identity leaves out the alignment that is z-lab's.
        num_drafts=walk.num_drafts(int(spec["block_size"]), spec["drafter"].get("row_alignment", "same_position")),
        device=artifact.meta["device"],
        dtype=artifact.meta["dtype"],
        transcripts_digest=str(spec["transcripts_digest"]),
        started_at=started_at,
        seconds=seconds,
        cached=cached,
        bytes_read=bytes_read,
        prompts=_prompt_records(plan, stages.read_transcripts(config, plan)),
        blocks=polars.read_parquet(artifact.file(stages.BLOCKS_NAME)),
        extras=read_extras(artifact),
    )


def failed_record(
    config: Config,
    checkpoint: CheckpointRecord,
    error: Exception,
    *,
    started_at: datetime,
    seconds: dict[str, float],
    bytes_read: int = 0,
) -> EvaluationRecord:
    """Return the record of an evaluation that ended with an error, which decides its status; it holds no number.

    `bytes_read` is what was read of the checkpoint up to then.
    """
    conditions = config.model_dump(mode="json", exclude={"hosts", "baseline", "notify"})
    if isinstance(error, DFlashEvalError):
        status, text = error.status, one_line(error)
    else:
        status, text = "failed", f"{type(error).__name__}: {one_line(error)}"
    return EvaluationRecord(
        evaluation_id=digest("failed", checkpoint.checkpoint_id, conditions),
        checkpoint=checkpoint,
        status=status,
        error=text,
        spec={"packages": environment()},
        target=str(config.target.model),
        block_size=config.drafter.block_size,
        device=None,
        dtype=None,
        transcripts_digest=None,
        started_at=started_at,
        seconds=seconds,
        cached={},
        bytes_read=bytes_read,
    )


def vanished(inspection: CheckpointInspection) -> CheckpointVanished:
    """Return the error for a checkpoint that was inspected and is not there any more."""
    return CheckpointVanished(
        f"{inspection.ref.url} vanished before it was read whole: it was deleted, renamed or rotated away; "
        f"evaluate it where it lies now, or have the run keep its checkpoints for longer"
    )


class Known(NamedTuple):
    """What an evaluation of a checkpoint would be called and hold."""

    evaluation_id: str
    extras: dict[str, Any]
    """`extras` of its spec; empty where none are wanted."""


def known_evaluation(config: Config, inspection: CheckpointInspection) -> Known | None:
    """Return what an evaluation of this checkpoint would be, if the store can tell.

    Nothing is streamed or computed: None where the transcripts or the drafter are not in the store.
    """
    store = store_of(config)
    weights = store.find(stages.DRAFTER_KIND, stages.drafter_key(inspection, config))
    plan = stages.plan_target(config) if weights is not None else None
    transcripts = store.find(written.KIND, plan.transcripts_key) if plan is not None else None
    if weights is None or plan is None or transcripts is None:
        return None
    drafter = read_drafter(inspection, config, plan.target.config)
    sha256 = weights.meta["weights_sha256"]
    spec = evaluation_spec(config, plan, transcripts.meta, drafter, sha256)
    identity = evaluation_id(spec, checkpoint_record(inspection, sha256).checkpoint_id)
    return Known(identity, spec.get("extras", {}))


def known_evaluation_id(config: Config, inspection: CheckpointInspection) -> str | None:
    """Return the identity that an evaluation of this checkpoint would have, if the store can tell."""
    known = known_evaluation(config, inspection)
    return None if known is None else known.evaluation_id


def environment() -> dict[str, str]:
    """Return the versions that a number may depend on; recorded, not part of the identity."""
    packages = ("torch", "transformers", "safetensors", "polars", "duckdb", "prefect")
    return {name: version(name) for name in packages} | {"python": platform.python_version()}


def now() -> datetime:
    """Return the present time in UTC."""
    return datetime.now(UTC)


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
