"""From the configuration and the hosts' reports to the job that is planned, before anything is loaded."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash_core.config import Config
from dflash_core.errors import DFlashEvalError, one_line
from dflash_core.hosts.job import DrafterSize, Job, typical_drafter
from dflash_core.hosts.plan import check_stage_fits, find_target, make_plan
from dflash_core.hosts.report import HostReport
from dflash_core.hosts.stages import Plan
from dflash_core.store_opening import store_of
from dflash_core.target.loading import STORED, find_converted
from dflash_core.target.model_config import ModelConfig
from dflash_core.target.prompts import load_prompts

_ASSUMED_BLOCK_SIZE = 16
_ASSUMED_LAYERS = 5
_CHARACTERS_PER_TOKEN = 3
"""Low for English on purpose: a plan had better need too much than too little."""
_TEMPLATE_TOKENS = 64


def plan_for(
    config: Config, reports: Sequence[HostReport], *, has_transcripts: bool = False
) -> tuple[Plan | None, str | None]:
    """Return the plan, or None and the reason why none can be made."""
    is_target_held = config.completions.source == "local" and not has_transcripts
    try:
        job = _job(config, reports, is_target_held)
    except DFlashEvalError as error:
        return None, one_line(error)
    if isinstance(job, str):
        return None, job
    return make_plan(reports, job), None


def require_target_fits(config: Config, reports: Sequence[HostReport], *, has_transcripts: bool = False) -> None:
    """Refuse, before the target is loaded, a machine that it does not fit.

    Where the transcripts are there, or come from a server or a file, the target is only read, layer by layer.

    Args:
        config: target, prompts and where continuations come from.
        reports: what the hosts said.
        has_transcripts: the store holds the transcripts already.

    Raises:
        DoesNotFit: with the numbers. A target whose sizes are not known yet is not judged.
    """
    plan, _why_not = plan_for(config, reports, has_transcripts=has_transcripts)
    if plan is not None:
        check_stage_fits(plan.target)


def _job(config: Config, reports: Sequence[HostReport], is_target_held: bool) -> Job | str:
    model = config.target.model
    if model is None:
        return "no target is set; write target.model in the config"
    converted = find_converted(model, store_of(config))
    found = find_target(reports, model)
    if converted is not None:
        target, target_bytes = converted.config, converted.size_bytes
    elif found is not None and found.config is not None:
        target, target_bytes = found.config, found.weights_bytes or 0
    elif model.startswith(STORED):
        return f"this machine holds of {model} only what a drafter needs; a worker of the cpu pool runs the target"
    elif model.endswith(".gguf"):
        return f"the sizes of {model} are read when it is converted; run: dflash-eval prepare"
    else:
        return f"no host holds the target {model!r} as a folder of a model; name its folder under hosts.*.models"
    draft_config = _draft_config(config)
    lengths = _token_counts(config)
    return Job(
        target=target,
        target_bytes=target_bytes,
        target_path=model,
        drafter=_drafter_size(draft_config, target),
        block_size=config.drafter.block_size or _find(draft_config, "block_size", _ASSUMED_BLOCK_SIZE),
        num_tokens=sum(lengths),
        longest_tokens=max(lengths),
        num_selected_layers=len(_find(draft_config, "target_layer_ids", [0] * _ASSUMED_LAYERS)),
        batch_size=config.completions.batch_size,
        device=config.device,
        compute_dtype=config.target.compute_dtype,
        store_dtype=config.target.store_dtype,
        is_target_held=is_target_held,
        store_path=str(store_of(config).root),
    )


def _draft_config(config: Config) -> Mapping[str, Any]:
    if config.drafter.config is None:
        return {}
    try:
        data = json.loads(Path(config.drafter.config).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def _find(draft_config: Mapping[str, Any], key: str, default: Any) -> Any:
    nested = draft_config.get("dflash_config") or {}
    return nested.get(key) or draft_config.get(key) or default


def _drafter_size(draft_config: Mapping[str, Any], target: ModelConfig) -> DrafterSize:
    """Return the size that the draft config gives, else a published drafter's."""
    keys = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
    if not all(isinstance(draft_config.get(key), int) for key in keys):
        return typical_drafter(target)
    layers, heads, kv_heads, head_dim, inner = (draft_config[key] for key in keys)
    width = target.hidden_size
    selected = len(_find(draft_config, "target_layer_ids", [0] * _ASSUMED_LAYERS))
    per_layer = 2 * width * heads * head_dim + 2 * width * kv_heads * head_dim + 3 * width * inner
    return DrafterSize(
        num_parameters=layers * per_layer + selected * width * width,
        num_layers=layers,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        dtype=draft_config.get("dtype") or target.dtype,
    )


def _token_counts(config: Config) -> list[int]:
    """Return an estimate of the tokens of each transcript, by prompt; the tokenizer is not needed."""
    counts: dict[str, int] = {}
    for prompt in load_prompts(config.prompts):
        characters = sum(len(content) for _, content in prompt.messages)
        own = math.ceil(characters / _CHARACTERS_PER_TOKEN) + _TEMPLATE_TOKENS + config.completions.max_new_tokens
        # A later turn is read with the earlier ones and their answers before it.
        counts[prompt.id] = own + (counts.get(prompt.follows, 0) if prompt.follows is not None else 0)
    return list(counts.values())
