"""Names of a drafter's tensors: from what trainers write to z-lab's own, or a refusal by name.

Wrappers leave prefixes (`module.`, `_orig_mod.`, ...) that are stripped until none is left. What
remains must be a tensor that DFlash or DFlash2 has, the frozen embedding or head of the target, or
one of the few buffers that can be recomputed. Anything else is refused: an optional head that is
dropped in silence would score another drafter than the one that was trained.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from dflash_core.errors import CheckpointMismatch, UnsupportedCheckpoint

Role = Literal["drafter", "embedding", "head", "ignored"]

# Parts of a path that a wrapper inserts anywhere, and prefixes that only stand in front.
WRAPPER_PARTS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
WRAPPER_PREFIXES = frozenset({"module", "draft_model", "dflash_module", "trainer_module"})
# Other trainers' names of the same tensors (vLLM, TorchSpec, transformers' assistants).
RENAMES = (
    (re.compile(r"^midlayer\."), "layers.0."),
    (re.compile(r"^(encoder\.fc|context_proj)\."), "fc."),
    (re.compile(r"^(encoder\.output_norm_enc|context_norm)\."), "hidden_norm."),
    (re.compile(r"^final_norm\."), "norm."),
    (re.compile(r"^(candidate_selector\.(?:predecessor|successor)_codebook)\.weight$"), r"\1"),
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
_GLOBAL_NAMES = frozenset(REQUIRED + DFLASH2)
_LAYER_NAMES = frozenset(REQUIRED_PER_LAYER + OPTIONAL_PER_LAYER + DFLASH2_PER_LAYER)
_LAYER = re.compile(r"^layers\.(\d{1,4})\.(.+)$")

FROZEN: dict[str, tuple[Role, str]] = {
    "embed_tokens.weight": ("embedding", "frozen copy of the target's embedding"),
    "lm_head.weight": ("head", "frozen copy of the target's head"),
    "verifier_norm.weight": ("ignored", "the target's own norm"),
    "verifier_lm_head.weight": ("ignored", "the target's own head"),
}
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


def assign_roles(names: Iterable[str], *, where: str) -> dict[str, NamedRole]:
    """Say of every tensor what it is.

    Args:
        names: all tensor names of one weights dict.
        where: the checkpoint, for messages.

    Raises:
        UnsupportedCheckpoint: a name is unknown, or two names mean the same tensor.
        CheckpointMismatch: the drafter is incomplete.
    """
    stripped = strip_wrappers(names)
    roles: dict[str, NamedRole] = {}
    unknown: list[str] = []
    owners: dict[str, str] = {}
    for name, short in stripped.items():
        role = _role_of(short)
        if role is None:
            unknown.append(name)
            continue
        other = owners.setdefault(short, name)
        if other != name:
            raise UnsupportedCheckpoint(
                f"{where}: {other!r} and {name!r} both mean {short!r}; "
                "a checkpoint must hold one drafter and no base model"
            )
        roles[name] = role
    if unknown:
        raise UnsupportedCheckpoint(
            f"{where}: {len(unknown)} tensors are no part of a DFlash or DFlash2 drafter: {shortened(unknown)}; "
            "they would be dropped, so the checkpoint is refused"
        )
    _require_complete({role.canonical_name for role in roles.values() if role.canonical_name}, where)
    return roles


def looks_like_drafter(names: Iterable[str]) -> bool:
    """Tell whether tensor names include the marks of a DFlash drafter: its context projection and norm."""
    stripped = set(strip_wrappers(names).values())
    return "fc.weight" in stripped or "hidden_norm.weight" in stripped


def strip_wrappers(names: Iterable[str]) -> dict[str, str]:
    """Map each name to itself without the prefixes that wrappers left, renamed to z-lab's."""
    parts_of = {name: _without_wrappers(name.split(".")) for name in names}
    while any(parts[:1] == ["model"] for parts in parts_of.values()):
        # `model.` counts as a wrapper only where everything (a bare head aside) lies below it.
        if any(parts[:1] != ["model"] and parts != ["lm_head", "weight"] for parts in parts_of.values()):
            break
        parts_of = {
            name: _without_wrappers(parts[1:] if parts[:1] == ["model"] else parts) for name, parts in parts_of.items()
        }
    return {name: _renamed(".".join(parts)) for name, parts in parts_of.items()}


def shortened(names: Iterable[str]) -> str:
    """Return up to three names, quoted, and how many more there are."""
    listed = list(names)
    more = f" and {len(listed) - MAX_NAMES_SHOWN} more" if len(listed) > MAX_NAMES_SHOWN else ""
    return ", ".join(repr(name) for name in listed[:MAX_NAMES_SHOWN]) + more


def _without_wrappers(parts: list[str]) -> list[str]:
    kept = [part for part in parts if part not in WRAPPER_PARTS]
    while len(kept) > 1 and kept[0] in WRAPPER_PREFIXES:
        kept = kept[1:]
    return kept


def _renamed(name: str) -> str:
    for pattern, replacement in RENAMES:
        name = pattern.sub(replacement, name)
    return name


def _role_of(name: str) -> NamedRole | None:
    if name in FROZEN:
        role, reason = FROZEN[name]
        return NamedRole(role=role, canonical_name=None, reason=reason)
    if _RECOMPUTED.search(name):
        return NamedRole(role="ignored", canonical_name=None, reason="computed from the config")
    layer = _LAYER.match(name)
    if name in _GLOBAL_NAMES or (layer is not None and layer[2] in _LAYER_NAMES and str(int(layer[1])) == layer[1]):
        return NamedRole(role="drafter", canonical_name=name, reason="the drafter's own")
    return None


def _require_complete(present: set[str], where: str) -> None:
    """Check that a drafter has all its tensors, for every layer from 0 on."""
    layers = sorted({int(match[1]) for name in present if (match := _LAYER.match(name))})
    if layers != list(range(len(layers))) or not layers:
        raise CheckpointMismatch(f"{where}: drafter layers must be numbered from 0 without gaps, found {layers}")
    wanted = [*REQUIRED, *(f"layers.{i}.{name}" for i in layers for name in REQUIRED_PER_LAYER)]
    if any(name in _DFLASH2_MARKS or name.partition(".")[2].partition(".")[2] in DFLASH2_PER_LAYER for name in present):
        wanted += [*DFLASH2, *(f"layers.{i}.{name}" for i in layers for name in DFLASH2_PER_LAYER)]
    missing = [name for name in wanted if name not in present]
    if missing:
        raise CheckpointMismatch(
            f"{where}: {len(missing)} tensors of the drafter are missing: {shortened(missing)}; was all of it saved?"
        )


_DFLASH2_MARKS = frozenset(DFLASH2)
