"""The stages of an evaluation: plain values in, a small manifest out, artifacts in the store between.

Tensors never leave a stage. Prefect tasks call these functions, and so may anybody else.

    plan_target ─ write_transcripts ─ extract_hidden_states ┐
                  stream_drafter ───────────────────────────┴ run_drafter ─ evaluation.done_record ─ database
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars
import torch
from safetensors.torch import load_file

from dflash_core import progress
from dflash_core.checkpoints import CheckpointInspection, stream_checkpoint
from dflash_core.config import Config
from dflash_core.drafter import scoring
from dflash_core.drafter.extra_metrics import ExtraMetrics
from dflash_core.drafter.head import Head, make_head
from dflash_core.drafter.model import Drafter
from dflash_core.drafter.spec import DrafterSpec
from dflash_core.errors import ArtifactDamaged, UnsupportedCheckpoint
from dflash_core.extras import make_extra_metrics, write_extras
from dflash_core.results.records import BLOCK_SCHEMA
from dflash_core.store import Artifact, digest
from dflash_core.store_opening import store_of
from dflash_core.target import hidden_states as hidden
from dflash_core.target import transcripts as written
from dflash_core.target.given import FileSource
from dflash_core.target.head import TargetTables, load_embedding_and_head
from dflash_core.target.loading import Target, resolve_target
from dflash_core.target.prompts import Prompt, load_prompts
from dflash_core.target.runtime import DTYPES, cpu_dtype, host_threads, using_threads
from dflash_core.target.servers.source import ServerSource
from dflash_core.target.vocabulary import num_token_rows

DRAFTER_KIND = "drafter"
BLOCKS_KIND = "blocks"
WEIGHTS_NAME = "weights.safetensors"
BLOCKS_NAME = "blocks.parquet"
STREAMING_VERSION = 2
"""Raised when streaming the same checkpoint would write other tensors."""
_ROWS_CHECKED_AT_ONCE = 4096

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
        ConfigError: the continuations are to come from a server without an address.
    """
    prompts = load_prompts(config.prompts)
    target = resolve_target(config.target.model, store_of(config))
    compute_dtype = cpu_dtype(config.target.compute_dtype, target)
    store_dtype = config.target.store_dtype
    if store_dtype == "auto" and config.target.compute_dtype == "float32":
        store_dtype = "float32"
    settings = config.completions
    source = _source(config, prompts, compute_dtype)
    rendering = written.render_prompts(
        target, prompts, thinking=settings.thinking, max_new_tokens=settings.max_new_tokens
    )
    return TargetPlan(
        target=target,
        compute_dtype=compute_dtype,
        store_dtype=hidden.store_dtype_of(target, store_dtype, compute_dtype),
        prompts=tuple(prompts),
        rendering=rendering,
        transcripts_key=written.transcripts_key(target, rendering, source, max_new_tokens=settings.max_new_tokens),
    )


def _source(config: Config, prompts: Sequence[Prompt], compute_dtype: str) -> written.Source:
    """Return who continues the prompts; nothing is asked or loaded yet."""
    settings = config.completions
    if settings.source == "server":
        return ServerSource(settings=settings)
    if settings.source == "file":
        return FileSource(prompts=tuple(prompts))
    return written.LocalSource(batch_size=settings.batch_size, compute_dtype=compute_dtype)


def write_transcripts(config: Config) -> Manifest:
    """Have every prompt continued by the target, here or served, or find what was written before."""
    plan = plan_target(config)
    artifact = written.write_transcripts(
        store_of(config),
        plan.target,
        plan.rendering,
        _source(config, plan.prompts, plan.compute_dtype),
        max_new_tokens=config.completions.max_new_tokens,
    )
    return _manifest(artifact)


def drafter_key(inspection: CheckpointInspection, config: Config) -> str:
    """Return the key of the drafter's own tensors, from the identity that the index gives.

    Which embedding and head are the drafter's own depends on the target, where the checkpoint holds some.
    """
    target = resolve_target(config.target.model, store_of(config)).identity if inspection.has_tables else None
    return digest(DRAFTER_KIND, STREAMING_VERSION, inspection.ref.identity, target)


def stream_drafter(checkpoint: str, config: Config, identity: str, key: str) -> Manifest:
    """Bring the drafter's own tensors into the store, or find them there.

    An attempt that was cut off leaves what it had in the store, and the next one goes on from there.

    Args:
        checkpoint: path or URL.
        config: hosts, store and target.
        identity: what the checkpoint's index said; a checkpoint that changed since is an error.
        key: what `drafter_key` said.
    """
    store = store_of(config)
    target = resolve_target(config.target.model, store)

    def write(folder: Path) -> dict[str, Any]:
        with store.unfinished(DRAFTER_KIND, key) as unfinished:
            streamed = stream_checkpoint(
                checkpoint,
                unfinished / WEIGHTS_NAME,
                hosts=config.hosts,
                run=config.run,
                expected_identity=identity,
                target=TargetTables(target),
                on_progress=lambda done, total: progress.report("stream_checkpoint", done, total),
            )
            os.replace(streamed.path, folder / WEIGHTS_NAME)
        return {
            "identity": identity,
            # For people. A URL's query may be a signature; a password in it was refused.
            "checkpoint": checkpoint.partition("?")[0],
            "weights_sha256": streamed.weights_sha256,
            "bytes_read": streamed.bytes_read,
            "bytes_wanted": streamed.bytes_wanted,
            "bytes_total": streamed.bytes_total,
            "own_tables": list(streamed.own_tables),
            "unverified_tensors": list(streamed.unverified_tensors),
            "warnings": list(streamed.warnings),
        }

    return _manifest(store.build(DRAFTER_KIND, key, write))


def hidden_states_key(plan: TargetPlan, transcripts: str, layers: tuple[int, ...]) -> str:
    """Return one key over all stored parts that a drafter's layers need."""
    dtypes = {"compute_dtype": plan.compute_dtype, "store_dtype": plan.store_dtype}
    parts: list[int | str] = [*dict.fromkeys(layers), hidden.FINAL, hidden.CHOICES]
    return digest([hidden.layer_key(plan.target, transcripts, part, **dtypes) for part in parts])


def find_states(
    config: Config, plan: TargetPlan, transcripts: str, layers: tuple[int, ...]
) -> hidden.HiddenStates | None:
    """Return the stored states that a drafter's layers need, or None where a part is missing.

    Args:
        config: names the store.
        plan: the target and its dtypes.
        transcripts: digest of the transcripts.
        layers: 0-based decoder layers.
    """
    return hidden.find_hidden_states(
        store_of(config),
        plan.target,
        transcripts,
        layers,
        compute_dtype=plan.compute_dtype,
        store_dtype=plan.store_dtype,
    )


def has_transcripts(config: Config, plan: TargetPlan) -> bool:
    """Tell whether the store holds the transcripts, so that the target need not write them."""
    return store_of(config).find(written.KIND, plan.transcripts_key) is not None


def is_prepared(config: Config, plan: TargetPlan, layers: tuple[int, ...]) -> bool:
    """Tell whether the store holds all that scoring needs of the target, so that it need not run."""
    transcripts = store_of(config).find(written.KIND, plan.transcripts_key)
    return transcripts is not None and find_states(config, plan, transcripts.meta["digest"], layers) is not None


def extract_hidden_states(config: Config, layers: tuple[int, ...]) -> Manifest:
    """Run the target once over its transcripts and keep the states of some layers, or find them."""
    plan = plan_target(config)
    transcripts = read_transcripts(config, plan)
    with using_threads(host_threads()):
        states = hidden.extract_hidden_states(
            store_of(config),
            plan.target,
            transcripts,
            layers,
            compute_dtype=plan.compute_dtype,
            store_dtype=plan.store_dtype,
        )
    facts = ("num_tokens", "num_judged", "num_not_greedy", "num_near_ties", "method", "warnings")
    name = written.transcripts_digest(transcripts)
    return {
        "kind": hidden.KIND,
        "key": hidden_states_key(plan, name, layers),
        "was_built": states.was_built,
        "meta": {"layers": list(layers)} | {fact: states.choices.meta[fact] for fact in facts},
    }


def blocks_key(spec: Mapping[str, Any]) -> str:
    """Return the key of a drafter's scored blocks: they do not depend on the names of prompts' sets or the target."""
    names = ("transcripts_digest", "target")
    return digest(BLOCKS_KIND, {name: value for name, value in spec.items() if name not in names})


def run_drafter(config: Config, spec: Mapping[str, Any], drafter_artifact_key: str, drafter: DrafterSpec) -> Manifest:
    """Run a drafter over the stored transcripts and keep one row per block, or find them.

    Args:
        config: device, store and what names transcripts and hidden states.
        spec: what decides the numbers (see `evaluation_spec`).
        drafter_artifact_key: key of the drafter's tensors.
        drafter: its facts.

    Raises:
        ArtifactDamaged: an earlier stage's artifact is no longer in the store; run the flow again.
        UnsupportedCheckpoint: the weights hold NaN or infinity.
    """
    store = store_of(config)

    def write(folder: Path) -> dict[str, Any]:
        plan = plan_target(config)
        transcripts = read_transcripts(config, plan)
        states = find_states(config, plan, written.transcripts_digest(transcripts), drafter.target_layer_ids)
        weights = store.find(DRAFTER_KIND, drafter_artifact_key)
        if states is None or weights is None:
            raise ArtifactDamaged(f"hidden states or drafter vanished from the store {store}; evaluate again")
        with store.reading(weights, states.final, states.choices, *states.layers.values()):
            rows, extras = _score(plan, transcripts, states, weights, drafter, spec)
        frame = polars.DataFrame(rows, schema=BLOCK_SCHEMA)
        frame.write_parquet(folder / BLOCKS_NAME)
        return {
            "num_blocks": frame.height,
            "device": spec["device"],
            "dtype": spec["drafter_dtype"],
            "target": plan.target.name,
            "transcripts": spec["tokens_digest"],
            "weights_sha256": spec["weights_sha256"],
            "extras": write_extras(folder, extras),
        }

    return _manifest(store.build(BLOCKS_KIND, blocks_key(spec), write))


def _score(
    plan: TargetPlan,
    transcripts: list[written.Transcript],
    states: hidden.HiddenStates,
    weights: Artifact,
    drafter: DrafterSpec,
    spec: Mapping[str, Any],
) -> tuple[list[dict[str, Any]], ExtraMetrics | None]:
    """Return the rows of blocks, and what counted the extras, where some are wanted."""
    device, dtype = torch.device(spec["device"]), DTYPES[spec["drafter_dtype"]]
    model, head = load_drafter(plan, weights, drafter, device=device, dtype=dtype)
    layers = [states.load_layer(layer) for layer in drafter.target_layer_ids]
    ends = torch.tensor([transcript.num_tokens for transcript in transcripts]).cumsum(0).tolist()
    starts = [0, *ends]

    def features_of(index: int) -> torch.Tensor:
        return torch.cat([layer[starts[index] : ends[index]] for layer in layers], dim=-1)

    has_own_head = "lm_head.weight" in weights.meta["own_tables"]
    extras = make_extra_metrics(plan.target, head, spec, has_own_head=has_own_head)
    final_TD = states.load_final()
    rows = scoring.score_transcripts(
        model,
        head,
        transcripts,
        features_of,
        states.load_margins(),
        block_size=spec["block_size"],
        max_new_tokens=spec["max_new_tokens"],
        anchors=spec["anchors"],
        extras=extras,
        final_of=lambda index: final_TD[starts[index] : ends[index]],
    )
    return rows, extras


def load_drafter(
    plan: TargetPlan, weights: Artifact, drafter: DrafterSpec, *, device: torch.device, dtype: torch.dtype
) -> tuple[Drafter, Head]:
    """Load a streamed drafter and the target's embedding and head, ready to draft.

    Raises:
        UnsupportedCheckpoint: its weights hold NaN or infinity, or no head over its reduced vocabulary.
    """
    tensors = load_file(weights.file(WEIGHTS_NAME))
    _check_finite(tensors)
    embedding_VD, head_VD = load_embedding_and_head(plan.target)
    # Present only where the drafter has its own: copies of the target's are not fetched.
    embedding_VD = tensors.pop("embed_tokens.weight", embedding_VD)
    head_VD = tensors.pop("lm_head.weight", head_VD)
    model = Drafter(drafter, tensors, embedding_VD, device=device, dtype=dtype)
    num_rows = num_token_rows(plan.target.folder, plan.target.config)
    return model, make_head(head_VD, model, tensors, num_token_rows=num_rows)


def _check_finite(tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse weights with NaN or infinity: they would score as the worst drafter instead of as none.

    Raises:
        UnsupportedCheckpoint: with the tensor's name.
    """
    for name, tensor in tensors.items():
        # In parts: an embedding of its own is large, and stays on disk.
        num_bad = sum(part.numel() - int(torch.isfinite(part).sum()) for part in tensor.split(_ROWS_CHECKED_AT_ONCE))
        if num_bad:
            raise UnsupportedCheckpoint(
                f"{num_bad} of the {tensor.numel()} numbers in {name} are NaN or infinite; the training run diverged"
            )


def read_transcripts(config: Config, plan: TargetPlan) -> list[written.Transcript]:
    """Return the stored transcripts of a plan.

    Raises:
        ArtifactDamaged: they are not in the store.
    """
    store = store_of(config)
    artifact = store.find(written.KIND, plan.transcripts_key)
    if artifact is None:
        raise ArtifactDamaged(f"the transcripts vanished from the store {store}; evaluate again")
    return written.read_transcripts(artifact)


def _manifest(artifact: Artifact) -> Manifest:
    return {
        "kind": artifact.kind,
        "key": artifact.key,
        "was_built": artifact.was_built,
        "meta": dict(artifact.meta),
    }
