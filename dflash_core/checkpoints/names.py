"""Names of a drafter's tensors: from what trainers write to z-lab's own, or a refusal by name.

Wrappers leave prefixes (`module.`, `_orig_mod.`, ...) that are stripped until none is left. What
remains must be a tensor that DFlash, DFlash2 or DSpark has, the frozen embedding or head of the
target, or one of the few buffers that can be recomputed. Anything else is refused: an optional head
that is dropped in silence would score another drafter than the one that was trained. Whether the
drafter's config calls for a head that is known is asked later, against its facts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from dflash_core.errors import CheckpointError, CheckpointMismatch, UnsupportedCheckpoint

Role = Literal["drafter", "embedding", "head", "ignored", "unknown"]

# Parts of a path that a wrapper inserts anywhere, and prefixes that only stand in front.
WRAPPER_PARTS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
WRAPPER_PREFIXES = frozenset({"module", "trainer_module"})
# Modules that hold a drafter inside of something larger: what stands after one is the drafter's.
SCOPES = frozenset({"draft_model", "dflash_module", "drafter", "speculator"})
# Where such a module exists, names that begin like this are the target's own, saved along with it.
_BASE_MODEL = re.compile(
    r"^((base_model|target|target_model|verifier)\.|(model\.)?(language_model|visual|vision_tower|mtp)\."
    r"|(model\.)?(layers\.\d|embed_tokens\.|norm\.)|lm_head\.)"
)
# Other trainers' names of the same tensors (vLLM, TorchSpec, transformers' assistants; SpecForge's first
# DSpark, and Model-Optimizer's, whose heads have no module of their own).
RENAMES = (
    (re.compile(r"^midlayer\."), "layers.0."),
    (re.compile(r"^(encoder\.fc|context_proj)\."), "fc."),
    (re.compile(r"^(encoder\.output_norm_enc|context_norm)\."), "hidden_norm."),
    (re.compile(r"^final_norm\."), "norm."),
    (re.compile(r"^(candidate_selector\.(?:predecessor|successor)_codebook)\.weight$"), r"\1"),
    (re.compile(r"^logit_head\.(?=(markov_|confidence_|gate_proj\.|joint_proj\.))"), ""),
    (re.compile(r"^(?=(markov_w[12]|gate_proj|joint_proj)\.)"), "markov_head."),
    (re.compile(r"^confidence_proj\."), "confidence_head.proj."),
)

REQUIRED = ("fc.weight", "hidden_norm.weight", "norm.weight")
REQUIRED_PER_LAYER = (
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"self_attn.{name}_norm.weight" for name in "qk"),
    *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
)
OPTIONAL_PER_LAYER = tuple(f"self_attn.{name}_proj.bias" for name in "qkvo")
DFLASH2_PER_LAYER = tuple(
    f"{conv}.{name}" for conv in ("attention_conv", "mlp_conv") for name in ("base_kernel", "kernel_projection.weight")
)
DFLASH2 = tuple(
    f"candidate_selector.{name}" for name in ("predecessor_codebook", "successor_codebook", "hidden_projection.weight")
)
MARKOV = ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight")
"""DSpark's Markov head: every kind has these two; the gated one has `gate_proj`, the recurrent one `joint_proj`."""
MARKOV_GATES = tuple(
    f"markov_head.{name}.{part}" for name in ("gate_proj", "joint_proj") for part in ("weight", "bias")
)
CONFIDENCE = ("confidence_head.proj.weight", "confidence_head.proj.bias")
"""DSpark's optional head that predicts acceptance."""
_GLOBAL_NAMES = frozenset(REQUIRED + DFLASH2 + MARKOV + MARKOV_GATES + CONFIDENCE)
_LAYER_NAMES = frozenset(REQUIRED_PER_LAYER + OPTIONAL_PER_LAYER + DFLASH2_PER_LAYER)
_LAYER = re.compile(r"^layers\.(\d{1,4})\.(.+)$")

DRAFT_VOCABULARY = ("d2t", "t2d")
"""Buffers that map a reduced draft vocabulary to the target's."""

FROZEN: dict[str, tuple[Role, str]] = {
    "embed_tokens.weight": ("embedding", "frozen copy of the target's embedding"),
    "lm_head.weight": ("head", "frozen copy of the target's head"),
}
_OF_VERIFIER = re.compile(r"^verifier_\w+\.")
# Tensors of drafters that are built otherwise: what each is, and what can be done.
FOREIGN = (
    (
        re.compile(r"(^|\.)self_attn\.qkv_proj\.|(^|\.)qkv_proj\."),
        "queries, keys and values in one tensor (MiMo, Laguna)",
        "split its rows into q_proj, k_proj and v_proj and save again",
    ),
    (re.compile(r"(^|\.)gate_up_proj\."), "gate and up in one tensor", "split its rows into gate_proj and up_proj"),
    (re.compile(r"^(prefix_gru|embed_proj)\."), "Domino's correction head", "Domino is not scored"),
    (re.compile(r"(^|\.)mask_embedding$"), "a learned mask vector", "mask tokens of the vocabulary are read"),
    (re.compile(r"attention_sink_bias$|(^|\.)sinks?$"), "an attention sink", "attention without sinks is computed"),
    (re.compile(r"(^|\.)self_attn\.g_proj\."), "a gate on attention", "attention without a gate is computed"),
    (re.compile(r"^aux_hidden_norms\."), "a norm for each layer of the target", "one norm behind fc is computed"),
)
# Tensors of an optimizer, a scheduler or a random generator that lie in one dict with the weights.
_TRAINING_TENSOR = re.compile(
    r"^(optim|optimizers?|scheduler|lr_scheduler|scaler|grad_scaler|rng|random|\w+_rng)(_states?(_dict)?)?(\.|$)"
    r"|^\w*rng_states?\w*$"
)
_COUNTER = re.compile(r"(^|\.)((global|local|num)_)?(step|epoch)s?$")
_RECOMPUTED = re.compile(r"(^|\.)rotary_emb\.(inv_freq|original_inv_freq|cos_cached|sin_cached)$")
MAX_NAMES_SHOWN = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedRole:
    """What a tensor of a checkpoint is."""

    role: Role
    canonical_name: str | None
    """z-lab's name; None unless the tensor is the drafter's own."""
    reason: str
    """Why it has this role, for people."""


def read_roles(names: Iterable[str]) -> dict[str, NamedRole]:
    """Say of every tensor what it is; one that nothing is known of has the role `unknown`.

    Args:
        names: all tensor names of one weights dict.
    """
    stripped = strip_wrappers(names)
    has_scope = any(_scope_end(name.split(".")) for name in stripped)
    owners: dict[str, str] = {}
    roles: dict[str, NamedRole] = {}
    for name, short in stripped.items():
        if has_scope and not _scope_end(name.split(".")):
            roles[name] = _role_outside(short)
            continue
        role = _role_of(short)
        other = owners.setdefault(short, name)
        if other != name and role.role != "unknown":
            role = _unknown(f"{other!r} means the same tensor {short!r}: there is more than one model here")
        roles[name] = role
    return roles


def refusal(roles: Mapping[str, NamedRole], *, where: str) -> CheckpointError | None:
    """Return why tensors of these roles cannot be scored as one drafter, or None.

    Args:
        roles: what `read_roles` said.
        where: the checkpoint, for messages.

    Returns:
        UnsupportedCheckpoint where a tensor would have to be dropped, CheckpointMismatch where one is missing.
    """
    unknown = {name: role for name, role in roles.items() if role.role == "unknown"}
    foreign = [f"{name!r} is {why}; {do}" for name in unknown for pattern, why, do in FOREIGN if pattern.search(name)]
    doubled = [f"{name!r} and {role.reason}" for name, role in unknown.items() if role.reason != NO_PART]
    if doubled:
        return UnsupportedCheckpoint(f"{where}: {doubled[0]}; a checkpoint must hold one drafter")
    if unknown:
        known = f" ({foreign[0]})" if foreign else ""
        return UnsupportedCheckpoint(
            f"{where}: {len(unknown)} tensors are {NO_PART}: {shortened(unknown)}{known}; "
            "they would be dropped, so the checkpoint is refused"
        )
    return _incomplete({role.canonical_name for role in roles.values() if role.canonical_name}, where)


def looks_like_drafter(names: Iterable[str]) -> bool:
    """Tell whether tensor names include the marks of a DFlash drafter: its context projection and norm."""
    stripped = set(strip_wrappers(names).values())
    return "fc.weight" in stripped or "hidden_norm.weight" in stripped


def strip_wrappers(names: Iterable[str]) -> dict[str, str]:
    """Map each name to itself without the prefixes that wrappers left, renamed to z-lab's."""
    parts_of = {name: _without_wrappers(name.split(".")) for name in names}
    inside = {name for name in parts_of if _scope_end(name.split("."))}
    while any(parts_of[name][:1] == ["model"] for name in (inside or parts_of)):
        # `model.` counts as a wrapper only where everything (a bare head aside) lies below it.
        group = inside or set(parts_of)
        if any(parts_of[name][:1] != ["model"] and parts_of[name] != ["lm_head", "weight"] for name in group):
            break
        for name in group:
            parts = parts_of[name]
            parts_of[name] = _without_wrappers(parts[1:] if parts[:1] == ["model"] else parts)
    return {name: _renamed(".".join(parts)) for name, parts in parts_of.items()}


def shortened(names: Iterable[str]) -> str:
    """Return up to three names, quoted, and how many more there are."""
    listed = list(names)
    more = f" and {len(listed) - MAX_NAMES_SHOWN} more" if len(listed) > MAX_NAMES_SHOWN else ""
    return ", ".join(repr(name) for name in listed[:MAX_NAMES_SHOWN]) + more


def _scope_end(parts: list[str]) -> int:
    """Return where the path inside the drafter's module begins; 0 where no such module is named."""
    return max((at + 1 for at, part in enumerate(parts[:-1]) if part in SCOPES), default=0)


def _without_wrappers(parts: list[str]) -> list[str]:
    kept = [part for part in parts[_scope_end(parts) :] if part not in WRAPPER_PARTS]
    while len(kept) > 1 and kept[0] in WRAPPER_PREFIXES:
        kept = kept[1:]
    return kept


def _renamed(name: str) -> str:
    for pattern, replacement in RENAMES:
        name = pattern.sub(replacement, name)
    return name


NO_PART = "no part of a DFlash, DFlash2 or DSpark drafter"


def _unknown(reason: str = NO_PART) -> NamedRole:
    return NamedRole(role="unknown", canonical_name=None, reason=reason)


def _role_of(name: str) -> NamedRole:
    if name in FROZEN:
        role, reason = FROZEN[name]
        return NamedRole(role=role, canonical_name=None, reason=reason)
    if _OF_VERIFIER.match(name):
        return NamedRole(role="ignored", canonical_name=None, reason="the target's own")
    if _RECOMPUTED.search(name):
        return NamedRole(role="ignored", canonical_name=None, reason="computed from the config")
    layer = _LAYER.match(name)
    is_global = name in _GLOBAL_NAMES or name in DRAFT_VOCABULARY
    if is_global or (layer is not None and layer[2] in _LAYER_NAMES and str(int(layer[1])) == layer[1]):
        return NamedRole(role="drafter", canonical_name=name, reason="the drafter's own")
    if _TRAINING_TENSOR.match(name) or _COUNTER.search(name):
        return NamedRole(role="ignored", canonical_name=None, reason="state of the training")
    return _unknown()


def _role_outside(name: str) -> NamedRole:
    """Say what a tensor is that lies outside the drafter's own module."""
    if _BASE_MODEL.match(name):
        return NamedRole(role="ignored", canonical_name=None, reason="the target's own, outside the drafter's module")
    if _TRAINING_TENSOR.match(name) or _COUNTER.search(name):
        return NamedRole(role="ignored", canonical_name=None, reason="state of the training")
    return _unknown()


def _incomplete(present: set[str], where: str) -> CheckpointMismatch | None:
    """Return what a drafter lacks, for every layer from 0 on, or None."""
    layers = sorted({int(match[1]) for name in present if (match := _LAYER.match(name))})
    if layers != list(range(len(layers))) or not layers:
        return CheckpointMismatch(f"{where}: drafter layers must be numbered from 0 without gaps, found {layers}")
    wanted = [*REQUIRED, *(f"layers.{i}.{name}" for i in layers for name in REQUIRED_PER_LAYER)]
    if any(name in _DFLASH2_MARKS or name.partition(".")[2].partition(".")[2] in DFLASH2_PER_LAYER for name in present):
        wanted += [*DFLASH2, *(f"layers.{i}.{name}" for i in layers for name in DFLASH2_PER_LAYER)]
    if any(name.startswith("markov_head.") for name in present):
        wanted += MARKOV
    if CONFIDENCE[1] in present:
        wanted.append(CONFIDENCE[0])
    missing = [name for name in wanted if name not in present]
    if missing:
        return CheckpointMismatch(
            f"{where}: {len(missing)} tensors of the drafter are missing: {shortened(missing)}; was all of it saved?"
        )
    return None


_DFLASH2_MARKS = frozenset(DFLASH2)
