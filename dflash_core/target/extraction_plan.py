"""How much memory and disk the extraction of hidden states takes, known before anything is loaded.

One layer is resident at a time, and of the transcripts the longest; the residual stream of all others lies in
files (see `layer_scratch`). After the layers, a slice of the head takes the layer's place.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dflash_core.errors import DoesNotFit
from dflash_core.hosts import memory
from dflash_core.target.choices import LOGITS_AT_ONCE
from dflash_core.target.layer_weights import LayerWeights
from dflash_core.target.runtime import available_memory_bytes

_LOGITS_COPIES = 6
_LEAST_SLICE_BYTES = 16 << 20
_SHARE_OF_LAYER = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class ExtractionPlan:
    """What is resident at once, in bytes."""

    layer_bytes: int
    """The largest decoder layer in the compute dtype, with what its conversion takes besides."""
    outer_bytes: int
    """Final norm, small projections and the embedding's rows of the tokens that occur."""
    activation_bytes: int
    """One layer's pass over the longest transcript."""
    argument_bytes: int
    """Masks and rotary tables of all transcripts; what is more is made anew for every layer."""
    head_bytes: int
    """A slice of the head with its logits."""
    head_rows: int
    """Tokens in such a slice."""
    scratch_bytes: int
    """Disk that the residual stream takes while the extraction runs."""

    @property
    def peak_bytes(self) -> int:
        """Return the memory needed beside Python and torch themselves."""
        resident = max(self.layer_bytes + self.activation_bytes, self.head_bytes)
        return int((resident + self.outer_bytes + self.argument_bytes) * memory.EXTRACTION_HEADROOM)


def make_extraction_plan(weights: LayerWeights, sequences: Sequence[Sequence[int]], dtype: str) -> ExtractionPlan:
    """Work out what the extraction takes, from the shards' headers alone."""
    config = weights.target.config
    lengths = [len(sequence) for sequence in sequences]
    layer = max(weights.layer_bytes(index) + weights.conversion_bytes(index) for index in range(weights.depth))
    largest = max(weights.layer_bytes(index) for index in range(weights.depth))
    row = config.hidden_size * memory.DTYPE_BYTES[dtype]
    head_rows = max(1, min(weights.num_head_rows, int(max(_LEAST_SLICE_BYTES, largest * _SHARE_OF_LAYER)) // row))
    num_tokens = sum(lengths)
    tokens = len(set().union(*(set(sequence) for sequence in sequences)))
    return ExtractionPlan(
        layer_bytes=layer,
        outer_bytes=weights.num_outer_bytes + tokens * weights.embedding_row_bytes,
        activation_bytes=memory.activation_bytes(config, max(lengths), dtype),
        argument_bytes=memory.argument_bytes(largest),
        head_bytes=head_rows * row + _LOGITS_COPIES * memory.logits_bytes(1, LOGITS_AT_ONCE),
        head_rows=head_rows,
        scratch_bytes=2 * num_tokens * row,
    )


def check_plan(plan: ExtractionPlan, name: str, dtype: str, folder: Path) -> None:
    """Refuse, before anything is loaded, what the machine has no room for.

    Raises:
        DoesNotFit: with the numbers.
    """
    available = available_memory_bytes()
    if available is not None and plan.peak_bytes > available:
        raise DoesNotFit(
            f"the hidden states of target {name!r} in {dtype} need {_gib(plan.peak_bytes)} of memory, its largest "
            f"layer {_gib(plan.layer_bytes)} of it; {_gib(available)} are available; use a machine with more, or "
            f"fewer or shorter prompts"
        )
    free = shutil.disk_usage(_existing(folder)).free
    if plan.scratch_bytes > free:
        raise DoesNotFit(
            f"the hidden states of target {name!r} need {_gib(plan.scratch_bytes)} of disk while they are computed, "
            f"{_gib(free)} are free in {folder}; set store to a larger disk or score fewer prompts"
        )


def _existing(folder: Path) -> Path:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f} GiB"
