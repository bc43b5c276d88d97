"""The target's hidden states on the transcripts, taken once and kept per layer.

One teacher-forced forward pass over a transcript gives every state that any drafter will ask for.

    file                    tensor   holds
    layer_0014.safetensors  hidden   (T, D) residual stream after 0-based decoder layer 14, before any norm
    final.safetensors       hidden   (T, D) after the final norm: the head's input
    choices.safetensors     margin   (T,)   logit of the next transcript token - best other logit

T runs over all transcripts one after another, prompt and response each. Layer ids are 0-based decoder
layers; transformers' tuple index is one more, and its last entry is after the final norm, which is
why states are taken by hooks on the layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from dflash_core import progress
from dflash_core.errors import ArtifactDamaged, CheckpointMismatch
from dflash_core.store import Artifact, Store, digest
from dflash_core.target.loading import Target
from dflash_core.target.runtime import DTYPES, decoder_of, load_model
from dflash_core.target.transcripts import Transcript, transcripts_digest

EXTRACTION_VERSION = 1
"""Raised in the commit that changes a stored number."""
KIND = "hidden_states"
FINAL = "final"
CHOICES = "choices"
NO_NEXT_TOKEN = float("inf")
"""Margin stored at the last token of a transcript, which has no next token."""


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
        return _load(self.layers[layer], _layer_name(layer), "hidden")

    def load_margins(self) -> Tensor:
        """Return margin_T; negative where the transcript's next token is not the target's arg-max."""
        return _load(self.choices, CHOICES, "margin")


def layer_key(target: Target, transcripts: str, part: int | str, *, compute_dtype: str, store_dtype: str) -> str:
    """Return the key of one stored part: a decoder layer, `final` or `choices`."""
    return digest(KIND, EXTRACTION_VERSION, target.identity, transcripts, part, compute_dtype, store_dtype)


def store_dtype_of(target: Target, configured: str, compute_dtype: str) -> str:
    """Resolve `target.store_dtype: auto`: the target's own dtype, float32 where float32 is computed on request."""
    if configured != "auto":
        return configured
    return target.config.dtype if target.config.dtype in DTYPES else compute_dtype


def find_hidden_states(
    store: Store, target: Target, transcripts: str, layers: Iterable[int], *, compute_dtype: str, store_dtype: str
) -> HiddenStates | None:
    """Return the stored states, or None where a part is missing or damaged."""
    wanted: list[int | str] = [*layers, FINAL, CHOICES]
    found = {
        part: store.find(
            KIND, layer_key(target, transcripts, part, compute_dtype=compute_dtype, store_dtype=store_dtype)
        )
        for part in wanted
    }
    return _assemble({part: artifact for part, artifact in found.items() if artifact is not None}, wanted, False)


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

    Args:
        store: where states are kept, one artifact per layer.
        target: the model to run, on the CPU.
        transcripts: prompts and responses to read.
        layers: 0-based decoder layers.
        compute_dtype: dtype of the forward pass.
        store_dtype: dtype that is written.

    Raises:
        CheckpointMismatch: a layer lies outside the target.
    """
    depth = target.config.num_layers
    outside = [layer for layer in layers if not 0 <= layer < depth]
    if outside:
        raise CheckpointMismatch(
            f"the drafter reads target layers {list(layers)}, but target {target.name!r} has layers 0..{depth - 1}; "
            f"was it trained for another target?"
        )
    name = transcripts_digest(transcripts)
    wanted: list[int | str] = [*dict.fromkeys(layers), FINAL, CHOICES]
    key_of = {
        part: layer_key(target, name, part, compute_dtype=compute_dtype, store_dtype=store_dtype) for part in wanted
    }
    found = {part: store.find(KIND, key) for part, key in key_of.items()}
    missing = [part for part, artifact in found.items() if artifact is None]
    if missing:
        taken = _run_target(load_model(target, compute_dtype), transcripts, missing, DTYPES[store_dtype])
        for part in missing:
            found[part] = store.build(KIND, key_of[part], _writer(part, taken, compute_dtype, store_dtype))
    states = _assemble({part: artifact for part, artifact in found.items() if artifact}, wanted, bool(missing))
    assert states is not None, found
    return states


def _assemble(found: dict[int | str, Artifact], wanted: list[int | str], was_built: bool) -> HiddenStates | None:
    if set(found) != set(wanted):
        return None
    layers = {part: artifact for part, artifact in found.items() if isinstance(part, int)}
    return HiddenStates(layers=layers, final=found[FINAL], choices=found[CHOICES], was_built=was_built)


def _layer_name(part: int | str) -> str:
    return f"layer_{part:04d}" if isinstance(part, int) else part


def _load(artifact: Artifact, name: str, tensor: str) -> Tensor:
    path = artifact.file(f"{name}.safetensors")
    try:
        with safe_open(path, framework="pt") as file:
            return file.get_tensor(tensor)
    except Exception as error:  # safetensors raises its own type, which derives from Exception alone
        raise ArtifactDamaged(f"{path} cannot be read: {error}; remove its folder, it will be made again") from error


def _writer(part: int | str, taken: dict[int | str, Tensor], compute_dtype: str, store_dtype: str) -> Any:
    def write(folder: Path) -> dict[str, Any]:
        name = _layer_name(part)
        values = taken[part]
        save_file({"margin" if part == CHOICES else "hidden": values}, folder / f"{name}.safetensors")
        convention = "residual, before the next norm" if isinstance(part, int) else "after the final norm"
        meta: dict[str, Any] = {"part": part, "compute_dtype": compute_dtype, "num_tokens": values.shape[0]}
        if part == CHOICES:
            meta["num_not_greedy"] = int((values < 0).sum())
        else:
            meta |= {"store_dtype": store_dtype, "convention": convention, "width": values.shape[1]}
        return meta

    return write


@torch.inference_mode()
def _run_target(
    model: Any, transcripts: Sequence[Transcript], parts: Sequence[int | str], store_dtype: torch.dtype
) -> dict[int | str, Tensor]:
    """Run one forward pass per transcript and keep what the parts ask for, concatenated over T."""
    decoder = decoder_of(model)
    kept: dict[int | str, list[Tensor]] = {part: [] for part in parts}
    hooks = []
    for part in parts:
        if isinstance(part, int):
            hooks.append(decoder.layers[part].register_forward_hook(_keeper(kept[part], store_dtype)))
    total = sum(transcript.num_tokens for transcript in transcripts)
    done = 0
    try:
        for transcript in transcripts:
            ids_1T = torch.tensor([[*transcript.prompt_ids, *transcript.response_ids]])
            # logits_to_keep: the head over the prompt is work that nobody reads.
            first = len(transcript.prompt_ids) - 1
            keep = ids_1T.shape[1] - first
            final: list[Tensor] = []
            hook = decoder.norm.register_forward_hook(_keeper(final, None))
            try:
                output = model(input_ids=ids_1T, use_cache=False, logits_to_keep=keep)
            finally:
                hook.remove()
            if FINAL in kept:
                kept[FINAL].append(final[-1].to(store_dtype))
            if CHOICES in kept:
                kept[CHOICES].append(_margins(output.logits[0], ids_1T[0], first))
            done += ids_1T.shape[1]
            progress.report(KIND, done, total)
    finally:
        for hook in hooks:
            hook.remove()
    return {part: torch.cat(values).contiguous() for part, values in kept.items()}


def _keeper(kept: list[Tensor], dtype: torch.dtype | None) -> Any:
    def keep(_module: Any, _inputs: Any, output: Any) -> None:
        hidden_1TD = output[0] if isinstance(output, tuple) else output
        # clone: later layers may add into the same memory.
        kept.append(hidden_1TD[0].to(dtype, copy=True) if dtype is not None else hidden_1TD[0].clone())

    return keep


def _margins(logits_RV: Tensor, ids_T: Tensor, first: int) -> Tensor:
    """Return margin_T: how clearly the target prefers each next token of the response.

        place        first       first+1     ...  last
        next token   response 0  response 1       none
        margin       l[r0]-best  l[r1]-best       inf

    Places before `first` predict prompt tokens, which nobody judges: they get inf as well.
    """
    margin_T = torch.full((ids_T.shape[0],), NO_NEXT_TOKEN)
    next_ids_R = ids_T[first + 1 :]
    logits_RV = logits_RV[: next_ids_R.shape[0]].float()
    chosen_R = logits_RV.gather(1, next_ids_R[:, None])[:, 0]
    others_RV = logits_RV.scatter(1, next_ids_R[:, None], -torch.inf)
    margin_T[first : first + next_ids_R.shape[0]] = chosen_R - others_RV.amax(dim=1)
    return margin_T
