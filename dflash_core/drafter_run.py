"""A drafter's run: loaded on its device, within a plan of that device's memory, and scored on the stored states."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file

from dflash_core import progress
from dflash_core.drafter import scoring
from dflash_core.drafter.device import plan_scoring
from dflash_core.drafter.extra_metrics import ExtraMetrics
from dflash_core.drafter.footprint import USUAL, Slicing
from dflash_core.drafter.head import Head, make_head
from dflash_core.drafter.memory import MemoryPlan
from dflash_core.drafter.model import Drafter
from dflash_core.drafter.spec import DrafterSpec
from dflash_core.drafter_workload import counted_workload
from dflash_core.errors import UnsupportedCheckpoint
from dflash_core.extras import make_extra_metrics
from dflash_core.hosts.wording import gib
from dflash_core.stages import WEIGHTS_NAME, TargetPlan
from dflash_core.store import Artifact
from dflash_core.target import hidden_states as hidden
from dflash_core.target.head import load_embedding_and_head
from dflash_core.target.runtime import DTYPES
from dflash_core.target.transcripts import Transcript
from dflash_core.target.vocabulary import num_token_rows

_LOG = logging.getLogger(__name__)
_ROWS_CHECKED_AT_ONCE = 4096


class Scored(NamedTuple):
    """What a drafter's run gave."""

    rows: list[dict[str, Any]]
    extras: ExtraMetrics | None
    """What counted the extras, where some are wanted."""
    memory: MemoryPlan


def score_drafter(
    plan: TargetPlan,
    transcripts: list[Transcript],
    states: hidden.HiddenStates,
    weights: Artifact,
    drafter: DrafterSpec,
    spec: Mapping[str, Any],
) -> Scored:
    """Score a drafter on its target's transcripts, within a plan of the device's memory.

    Args:
        plan: the target.
        transcripts: what it wrote.
        states: its hidden states over them.
        weights: the artifact of the drafter's tensors.
        drafter: its facts.
        spec: what decides the numbers (see `evaluation_spec`).

    Raises:
        DoesNotFit: not even one block at a time fits; nothing was loaded.
        UnsupportedCheckpoint: the weights hold NaN or infinity.
    """
    device, dtype = torch.device(spec["device"]), DTYPES[spec["drafter_dtype"]]
    has_own_head = "lm_head.weight" in weights.meta["own_tables"]
    work = counted_workload(
        transcripts,
        block_size=spec["block_size"],
        extras=spec.get("extras", {}),
        has_own_head=has_own_head,
        store_dtype=plan.store_dtype,
    )
    memory = plan_scoring(device, dtype, drafter, work)
    _LOG.info("the drafter runs on %s in %s: %s", device, spec["drafter_dtype"], memory.text())
    where = f"on {device} in {spec['drafter_dtype']}, {gib(memory.needed_bytes)} of memory planned"
    progress.report(scoring.STAGE, 0, scoring.count_anchors(transcripts), where, unit="anchors")
    slicing = memory.slicing
    model, head = load_drafter(plan, weights, drafter, device=device, dtype=dtype, slicing=slicing)
    layers = [states.load_layer(layer) for layer in drafter.target_layer_ids]
    ends = torch.tensor([transcript.num_tokens for transcript in transcripts]).cumsum(0).tolist()
    starts = [0, *ends]

    def features_of(index: int) -> torch.Tensor:
        return torch.cat([layer[starts[index] : ends[index]] for layer in layers], dim=-1)

    extras = make_extra_metrics(
        plan.target, head, spec, has_own_head=has_own_head, logits_elements=slicing.extra_logits_elements
    )
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
        slicing=slicing,
    )
    return Scored(rows, extras, memory)


def load_drafter(
    plan: TargetPlan,
    weights: Artifact,
    drafter: DrafterSpec,
    *,
    device: torch.device,
    dtype: torch.dtype,
    slicing: Slicing = USUAL,
) -> tuple[Drafter, Head]:
    """Load a streamed drafter and the target's embedding and head, ready to draft.

    Args:
        plan: names the target.
        weights: the artifact of the drafter's tensors.
        drafter: its facts.
        device: where to compute.
        dtype: of the computation.
        slicing: how much is held at once.

    Raises:
        UnsupportedCheckpoint: its weights hold NaN or infinity, or no head over its reduced vocabulary.
    """
    tensors = load_file(weights.file(WEIGHTS_NAME))
    _check_finite(tensors)
    embedding_VD, head_VD = load_embedding_and_head(plan.target)
    # Present only where the drafter has its own: copies of the target's are not fetched.
    embedding_VD = tensors.pop("embed_tokens.weight", embedding_VD)
    head_VD = tensors.pop("lm_head.weight", head_VD)
    model = Drafter(
        drafter,
        tensors,
        embedding_VD,
        device=device,
        dtype=dtype,
        score_elements=slicing.score_elements,
        context_tokens=slicing.context_tokens,
    )
    num_rows = num_token_rows(plan.target.folder, plan.target.config)
    head = make_head(head_VD, model, tensors, num_token_rows=num_rows, logits_elements=slicing.logits_elements)
    return model, head


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
