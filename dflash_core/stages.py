"""The stages of an evaluation: plain values in, a small manifest out, artifacts in the store between.

Tensors never leave a stage. Prefect tasks call these functions, and so may anybody else. What computes is imported
by the stage that does: finding what the store holds loads no torch.

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

from dflash_core import progress
from dflash_core.checkpoints import CheckpointInspection, stream_checkpoint
from dflash_core.checkpoints.tables import mask_token_ids
from dflash_core.config import Config
from dflash_core.drafter.spec import DrafterSpec
from dflash_core.drafter_reading import read_json
from dflash_core.errors import ArtifactDamaged
from dflash_core.extras import write_extras
from dflash_core.results.records import BLOCK_SCHEMA
from dflash_core.store import Artifact, digest
from dflash_core.store_opening import store_of
from dflash_core.target import hidden_states as hidden
from dflash_core.target import transcripts as written
from dflash_core.target.cpu import cpu_dtype, host_threads
from dflash_core.target.given import FileSource
from dflash_core.target.head import TargetTables
from dflash_core.target.kept_renderings import FOLDER as RENDERINGS
from dflash_core.target.loading import Target, resolve_target
from dflash_core.target.prompts import Prompt, load_prompts
from dflash_core.target.rendered import rendered

DRAFTER_KIND = "drafter"
WEIGHTS_NAME = "weights.safetensors"
BLOCKS_KIND = "blocks"
BLOCKS_NAME = "blocks.parquet"
STREAMING_VERSION = 3
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
        ConfigError: the continuations are to come from a server without an address.
    """
    prompts = load_prompts(config.prompts)
    store = store_of(config)
    target = resolve_target(config.target.model, store)
    compute_dtype = cpu_dtype(config.target.compute_dtype, target)
    store_dtype = config.target.store_dtype
    if store_dtype == "auto" and config.target.compute_dtype == "float32":
        store_dtype = "float32"
    settings = config.completions
    source = _source(config, prompts, compute_dtype)
    rendering = rendered(
        target,
        tuple(prompts),
        thinking=settings.thinking,
        max_new_tokens=settings.max_new_tokens,
        kept_in=store.root / RENDERINGS,
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
        from dflash_core.target.servers.source import ServerSource

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


def keep_target_tables(config: Config) -> Manifest:
    """Keep in the store what a box that only runs drafters needs of the target, or find it there."""
    from dflash_core.target.kept_tables import keep_tables

    store = store_of(config)
    return _manifest(keep_tables(store, resolve_target(config.target.model, store)))


def drafter_key(inspection: CheckpointInspection, config: Config) -> str:
    """Return the key of the drafter's own tensors, from the identity that the index gives.

    Which embedding and head are the drafter's own depends on the target and on what is called the mask token, where
    the checkpoint holds some.

    Raises:
        DraftConfigError: the configured draft config cannot be read.
    """
    if not inspection.has_tables:
        return digest(DRAFTER_KIND, STREAMING_VERSION, inspection.ref.identity)
    target = resolve_target(config.target.model, store_of(config)).identity
    masks = mask_token_ids(inspection.config, inspection.facts) | _configured_mask_ids(config)
    return digest(DRAFTER_KIND, STREAMING_VERSION, inspection.ref.identity, target, sorted(masks))


def _configured_mask_ids(config: Config) -> set[int]:
    """Return what the configured draft config calls the mask token; nothing where there is no such config."""
    return mask_token_ids(read_json(config.drafter.config), {}) if config.drafter.config is not None else set()


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
                mask_ids=_configured_mask_ids(config),
                on_progress=lambda done, total: progress.report("stream_checkpoint", done, total, unit="bytes"),
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
    from dflash_core.target.runtime import using_threads

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
    name = written.transcripts_digest(transcripts)
    return {
        "kind": hidden.KIND,
        "key": hidden_states_key(plan, name, layers),
        "was_built": states.was_built,
        "meta": states_meta(states, layers),
    }


def states_meta(states: hidden.HiddenStates, layers: Sequence[int]) -> dict[str, Any]:
    """Return what later stages need to know of stored states."""
    facts = ("num_tokens", "num_judged", "num_not_greedy", "num_near_ties", "method", "warnings")
    return {"layers": list(layers)} | {fact: states.choices.meta[fact] for fact in facts}


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
        DoesNotFit: the device of the spec has no room for it, even one block at a time.
    """
    from dflash_core.drafter_run import score_drafter

    store = store_of(config)

    def write(folder: Path) -> dict[str, Any]:
        plan = plan_target(config)
        transcripts = read_transcripts(config, plan)
        states = find_states(config, plan, written.transcripts_digest(transcripts), drafter.target_layer_ids)
        weights = store.find(DRAFTER_KIND, drafter_artifact_key)
        if states is None or weights is None:
            raise ArtifactDamaged(f"hidden states or drafter vanished from the store {store}; evaluate again")
        with store.reading(weights, states.final, states.choices, *states.layers.values()):
            scored = score_drafter(plan, transcripts, states, weights, drafter, spec)
        frame = polars.DataFrame(scored.rows, schema=BLOCK_SCHEMA)
        frame.write_parquet(folder / BLOCKS_NAME)
        return {
            "num_blocks": frame.height,
            "device": spec["device"],
            "dtype": spec["drafter_dtype"],
            "target": plan.target.name,
            "transcripts": spec["tokens_digest"],
            "weights_sha256": spec["weights_sha256"],
            "extras": write_extras(folder, scored.extras),
            "memory": scored.memory.facts(),
        }

    return _manifest(store.build(BLOCKS_KIND, blocks_key(spec), write))


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
