"""What is to be computed, in the numbers that decide memory and disk."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_core.target.model_config import ModelConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterSize:
    """What of a drafter decides its memory."""

    num_parameters: int
    """Without frozen copies of the target's embedding and head."""
    num_layers: int
    num_key_value_heads: int
    head_dim: int
    dtype: str | None
    """Stored dtype."""
    is_assumed: bool = False
    """True: no checkpoint was looked at yet; the sizes are `typical_drafter`'s."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What is to be computed."""

    target: ModelConfig
    target_bytes: int
    """Size of the target's weight files."""
    target_path: str | None
    """Where the target lies, to know which host holds it."""
    drafter: DrafterSize
    block_size: int
    num_tokens: int
    """Tokens of all transcripts, prompts included."""
    longest_tokens: int
    """Tokens of the longest transcript."""
    num_selected_layers: int
    """Target layers that the drafter reads."""
    batch_size: int = 24
    """Transcripts at once."""
    num_blocks_at_once: int = 64
    """Blocks whose logits are held at once."""
    device: str = "auto"
    """Of the drafter: `auto`, `cuda` or `cpu`."""
    compute_dtype: str = "auto"
    """Of the target: `auto`, `float32` or `bfloat16`."""
    store_dtype: str = "auto"
    """Of the hidden states: `auto`, `float32` or `bfloat16`."""
    is_target_held: bool = True
    """Does the target write the transcripts on this host? Then it is held as a whole; reading takes one layer."""
    store_path: str | None = None
    """Folder that the hidden states go to, to know which disk has to hold them."""


def typical_drafter(target: ModelConfig, num_selected_layers: int = 5, num_layers: int = 5) -> DrafterSize:
    """Return the size of a drafter as they are published: five Qwen3 layers as wide as the target.

    For a plan before any checkpoint was looked at. On the 27 B target it gives 1.73 B parameters, the
    published drafter's figure.
    """
    width, heads, head_size, kv_heads = target.hidden_size, 32, 128, 8
    attention = 2 * width * heads * head_size + 2 * width * kv_heads * head_size
    mlp = 3 * width * (target.intermediate_size or 4 * width)
    return DrafterSize(
        num_parameters=num_layers * (attention + mlp) + num_selected_layers * width * width,
        num_layers=num_layers,
        num_key_value_heads=kv_heads,
        head_dim=head_size,
        dtype=target.dtype,
        is_assumed=True,
    )
