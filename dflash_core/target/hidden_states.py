"""The target's hidden states on the transcripts, taken once and kept per layer.

One teacher-forced forward pass over a transcript gives every state that any drafter will ask for.

    file                    tensor           holds
    layer_0014.safetensors  hidden           (T, D) residual stream after 0-based decoder layer 14, before any norm
    final.safetensors       hidden           (T, D) after the final norm: the head's input
    choices.safetensors     margin           (T,)   logit of the next transcript token - best other logit
                            chosen           (T,)   the target's arg-max token
                            rank             (T,)   tokens that the target prefers to the transcript's; 0 = arg-max
                            log_probability  (T,)   of the next transcript token

T runs over all transcripts one after another, prompt and response each. Layer ids are 0-based decoder
layers; transformers' tuple index is one more, and its last entry is after the final norm, which is
why the last layer's state is taken from the layer itself. `extraction` says how the target runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dflash_core.errors import CheckpointMismatch
from dflash_core.store import Artifact, Store, digest
from dflash_core.target.cpu import ITEMSIZES
from dflash_core.target.loading import Target
from dflash_core.target.parts import CHOICES, FINAL, Part, part_name
from dflash_core.target.transcripts import Transcript, transcripts_digest

if TYPE_CHECKING:
    from torch import Tensor

    from dflash_core.target.choices import Choices

__all__ = [
    "CHOICES",
    "EXTRACTION_VERSION",
    "FINAL",
    "KIND",
    "HiddenStates",
    "Part",
    "extract_hidden_states",
    "find_hidden_states",
    "layer_key",
    "store_dtype_of",
]

EXTRACTION_VERSION = 2
"""Raised in the commit that changes a stored number."""
KIND = "hidden_states"


@dataclass(frozen=True, kw_only=True, slots=True)
class HiddenStates:
    """Handles of the stored states of one target on one set of transcripts."""

    layers: dict[int, Artifact]
    """0-based decoder layer to its artifact."""
    final: Artifact
    choices: Artifact
    was_built: bool
    """Did this call run the target?"""

    def load_layer(self, layer: int) -> Tensor:
        """Return hidden_TD of one decoder layer, memory-mapped."""
        return _load(self.layers[layer], layer, "hidden")[0]

    def load_final(self) -> Tensor:
        """Return hidden_TD after the final norm, memory-mapped."""
        return _load(self.final, FINAL, "hidden")[0]

    def load_margins(self) -> Tensor:
        """Return margin_T; negative where the transcript's next token is not the target's arg-max."""
        return _load(self.choices, CHOICES, "margin")[0]

    def load_choices(self) -> Choices:
        """Return what the target says about every next token, over T."""
        from dflash_core.target.choices import Choices

        chosen, margin, rank, log_probability = _load(
            self.choices, CHOICES, "chosen", "margin", "rank", "log_probability"
        )
        return Choices(chosen=chosen, margin=margin, rank=rank, log_probability=log_probability)

    @property
    def warnings(self) -> list[str]:
        """Return what a person should know before trusting scores on these transcripts."""
        return list(self.choices.meta["warnings"])


def layer_key(target: Target, transcripts: str, part: Part, *, compute_dtype: str, store_dtype: str) -> str:
    """Return the key of one stored part: a decoder layer, `final` or `choices`."""
    from dflash_core.target.choices import num_choosable  # it loads torch, which a known checkpoint needs not

    facts = [KIND, EXTRACTION_VERSION, target.identity, transcripts, part, compute_dtype, store_dtype]
    if part == CHOICES and num_choosable(target) < target.config.vocab_size:
        facts.append(num_choosable(target))
    return digest(*facts)


def store_dtype_of(target: Target, configured: str, compute_dtype: str) -> str:
    """Resolve `target.store_dtype: auto`: the target's own dtype, float32 where float32 is computed on request."""
    if configured != "auto":
        return configured
    return target.config.dtype if target.config.dtype in ITEMSIZES else compute_dtype


def find_hidden_states(
    store: Store, target: Target, transcripts: str, layers: Iterable[int], *, compute_dtype: str, store_dtype: str
) -> HiddenStates | None:
    """Return the stored states, or None where a part is missing or damaged."""
    wanted: list[Part] = [*dict.fromkeys(layers), FINAL, CHOICES]
    keys = _keys(target, transcripts, wanted, compute_dtype, store_dtype)
    found = _find(store, keys)
    return _assemble(found, was_built=False) if len(found) == len(keys) else None


def extract_hidden_states(
    store: Store,
    target: Target,
    transcripts: Sequence[Transcript],
    layers: Sequence[int],
    *,
    compute_dtype: str,
    store_dtype: str,
) -> HiddenStates:
    """Return the states of the given layers, running the target only for what the store lacks.

    One process at a time runs a target over the same transcripts; others wait, and take what it made. A run that
    was killed goes on after the last layer that it finished.

    Args:
        store: where states are kept, one artifact per layer.
        target: the model to run, on the CPU.
        transcripts: prompts and responses to read.
        layers: 0-based decoder layers.
        compute_dtype: dtype of the forward pass.
        store_dtype: dtype that is written.

    Raises:
        CheckpointMismatch: a layer lies outside the target.
        DoesNotFit: memory or disk do not suffice; nothing was loaded.
        TargetError: the target cannot be read.
    """
    depth = target.config.num_layers
    outside = [layer for layer in layers if not 0 <= layer < depth]
    if outside:
        raise CheckpointMismatch(
            f"the drafter reads target layers {list(layers)}, but target {target.name!r} has layers 0..{depth - 1}; "
            f"was it trained for another target?"
        )
    name = transcripts_digest(transcripts)
    wanted: list[Part] = [*dict.fromkeys(layers), FINAL, CHOICES]
    keys = _keys(target, name, wanted, compute_dtype, store_dtype)
    found = _find(store, keys)
    if len(found) == len(keys):
        return _assemble(found, was_built=False)
    run = digest(KIND, EXTRACTION_VERSION, target.identity, name, compute_dtype)
    with store.lock(KIND, run):
        found = _find(store, keys)
        missing = [part for part in wanted if part not in found]
        if missing:
            from dflash_core.target.extraction import Extraction

            # Every layer that is there may spare the ones below it.
            everything: list[Part] = [*range(depth), FINAL, CHOICES]
            extraction = Extraction(
                store,
                target,
                transcripts,
                kind=KIND,
                keys=_keys(target, name, everything, compute_dtype, store_dtype),
                compute_dtype=compute_dtype,
                store_dtype=store_dtype,
            )
            found |= extraction.make(missing, run)
    return _assemble(found, was_built=bool(missing))


def _keys(
    target: Target, transcripts: str, parts: Sequence[Part], compute_dtype: str, store_dtype: str
) -> dict[Part, str]:
    return {
        part: layer_key(target, transcripts, part, compute_dtype=compute_dtype, store_dtype=store_dtype)
        for part in parts
    }


def _find(store: Store, keys: Mapping[Part, str]) -> dict[Part, Artifact]:
    found = {part: store.find(KIND, key) for part, key in keys.items()}
    return {part: artifact for part, artifact in found.items() if artifact is not None}


def _assemble(found: Mapping[Part, Artifact], *, was_built: bool) -> HiddenStates:
    layers = {part: artifact for part, artifact in found.items() if isinstance(part, int)}
    return HiddenStates(layers=layers, final=found[FINAL], choices=found[CHOICES], was_built=was_built)


def _load(artifact: Artifact, part: Part, *names: str) -> list[Tensor]:
    from dflash_core.target.state_files import read_tensors

    return read_tensors(artifact.file(f"{part_name(part)}.safetensors"), *names)
