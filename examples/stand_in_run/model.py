"""A DFlash drafter as a trainer writes it: plain torch, drafting from many anchors in one pass.

One draft step reads a block of K slots: slot 0 is the anchor (the last known token, at position
s), slots 1..K-1 hold the mask token. Slot j answers for the token at its own position s + j:

    position          s-2   s-1 |   s      s+1     s+2          context ends before the anchor
    token             the   cat |  sat      on     the
    context features   *     *  |                               hidden states of the target
    block                       |  sat   [mask]  [mask]         slots 0, 1, 2
    answers for                 |   -      on     the           slot 0 is never scored

Queries come from the block; keys and values from the context features and from the block, whose
slots all see each other. Blocks at different anchors see only their own slots, and of the context
only what lies before their anchor, so that one pass over (context + all blocks) trains them all.

Shapes: B transcripts, T context tokens, A anchors a transcript, K block slots, L selected target
layers, D hidden size, H query heads, G key/value heads, E head size, Q = A * K block rows.
Tensor names are those of z-lab's published drafters, and so are the rules (arXiv 2602.06036).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from dflash_core.errors import DraftConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftConfig:
    """The facts of a draft config that decide the drafter's shape and arithmetic."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    initializer_range: float
    vocab_size: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    """0-based decoder layers of the target whose outputs are the context, in the order of `fc`."""


def read_draft_config(path: Path) -> DraftConfig:
    """Read a draft config in the form of z-lab's `config.json`.

    Raises:
        DraftConfigError: the file cannot be read, or a fact is missing or impossible.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DraftConfigError(f"cannot read the draft config {str(path)!r}: {error}; check --config") from error
    facts = {**data, **data.get("dflash_config", {})}
    names = [name for name in DraftConfig.__dataclass_fields__ if name not in facts]
    if names:
        raise DraftConfigError(f"{path} lacks {', '.join(names)}; add them in the form of z-lab's config.json")
    values = {name: facts[name] for name in DraftConfig.__dataclass_fields__}
    values["target_layer_ids"] = tuple(values["target_layer_ids"])
    config = DraftConfig(**values)
    if config.num_attention_heads % config.num_key_value_heads:
        raise DraftConfigError(
            f"{path}: {config.num_attention_heads} query heads cannot share {config.num_key_value_heads} "
            "key/value heads; make the first a multiple of the second"
        )
    if not 0 <= config.mask_token_id < config.vocab_size:
        raise DraftConfigError(
            f"{path}: mask_token_id {config.mask_token_id} lies outside the vocabulary of {config.vocab_size} tokens"
        )
    return config


class RMSNorm(nn.Module):
    """Divide by the root mean square of the last axis, then scale by a learned weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Return x normalised; any shape whose last axis is `size`."""
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Attention of the block rows over (context features, block rows), with normed q and k."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        query_size = config.num_attention_heads * config.head_dim
        key_size = config.num_key_value_heads * config.head_dim
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, key_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, key_size, bias=False)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, x_BQD: Tensor, context_BTD: Tensor, angles: Angles, visible_BQS: Tensor) -> Tensor:
        """Return what each block row gathers, shape [B, Q, D]; S = T + Q keys."""
        source_BSD = torch.cat([context_BTD, x_BQD], dim=1)
        q_BHQE = self.q_norm(self._heads(self.q_proj(x_BQD))).transpose(1, 2)
        k_BGSE = self.k_norm(self._heads(self.k_proj(source_BSD))).transpose(1, 2)
        v_BGSE = self._heads(self.v_proj(source_BSD)).transpose(1, 2)
        gathered_BHQE = functional.scaled_dot_product_attention(
            rotate(q_BHQE, angles.last(x_BQD.shape[1])),
            rotate(k_BGSE, angles),
            v_BGSE,
            attn_mask=visible_BQS[:, None],
            enable_gqa=True,
        )
        return self.o_proj(gathered_BHQE.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))


class MLP(nn.Module):
    """The gated feed-forward part of a layer."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return down(silu(gate(x)) * up(x))."""
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One drafter layer: attention and MLP, each after its norm and added to the residual."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x_BQD: Tensor, context_BTD: Tensor, angles: Angles, visible_BQS: Tensor) -> Tensor:
        """Return the block rows after this layer; the context is not normed again and stays as it is."""
        x_BQD = x_BQD + self.self_attn(self.input_layernorm(x_BQD), context_BTD, angles, visible_BQS)
        return x_BQD + self.mlp(self.post_attention_layernorm(x_BQD))


class Drafter(nn.Module):
    """The drafter without embedding and head, which are the target's own and frozen."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=config.initializer_range)

    def forward(self, features_BTF: Tensor, block_embeddings_BAKD: Tensor, anchor_positions_BA: Tensor) -> Tensor:
        """Draft from all anchors at once.

        Args:
            features_BTF: the target's hidden states, selected layers side by side (F = L * D);
                rows from the last anchor on are never looked at, so padding may hold anything.
            block_embeddings_BAKD: the target's embeddings of anchor and mask tokens.
            anchor_positions_BA: position of each anchor in its transcript, counted from 0.

        Returns:
            [B, A, K, D], ready for the target's head; slot 0 is not meant to be scored.
        """
        num_anchors, block_size = block_embeddings_BAKD.shape[1:3]
        num_context = features_BTF.shape[1]
        context_BTD = self.hidden_norm(self.fc(features_BTF))
        visible_BQS = visible_keys(anchor_positions_BA, block_size=block_size, num_context=num_context)
        slots_BQ = (anchor_positions_BA[:, :, None] + torch.arange(block_size)).flatten(1)
        positions_BS = torch.cat([torch.arange(num_context).expand(slots_BQ.shape[0], -1), slots_BQ], dim=1)
        angles = Angles.at(positions_BS, head_dim=self.config.head_dim, theta=self.config.rope_theta)
        x_BQD = block_embeddings_BAKD.flatten(1, 2)
        for layer in self.layers:
            x_BQD = layer(x_BQD, context_BTD, angles, visible_BQS)
        return self.norm(x_BQD).unflatten(1, (num_anchors, block_size))


def visible_keys(anchor_positions_BA: Tensor, *, block_size: int, num_context: int) -> Tensor:
    """Return which keys each block row may see, as booleans [B, Q, T + Q].

    A row sees the context strictly before its anchor, and every slot of its own block.
    """
    batch, num_anchors = anchor_positions_BA.shape
    before_anchor_BAT = torch.arange(num_context) < anchor_positions_BA[:, :, None]
    context_BQT = before_anchor_BAT.repeat_interleave(block_size, dim=1)
    block_of_row_Q = torch.arange(num_anchors).repeat_interleave(block_size)
    own_block_QQ = block_of_row_Q[:, None] == block_of_row_Q[None, :]
    return torch.cat([context_BQT, own_block_QQ.expand(batch, -1, -1)], dim=2)


@dataclass(frozen=True, kw_only=True, slots=True)
class Angles:
    """Cosines and sines of the rotary embedding, each [B, 1, S, E]."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def at(cls, positions_BS: Tensor, *, head_dim: int, theta: float) -> Angles:
        """Compute them for absolute positions."""
        frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        turns = (positions_BS[:, None, :, None] * frequencies).repeat(1, 1, 1, 2)
        return cls(cos=turns.cos(), sin=turns.sin())

    def last(self, num_rows: int) -> Angles:
        """Return those of the last rows, which belong to the block."""
        return Angles(cos=self.cos[:, :, -num_rows:], sin=self.sin[:, :, -num_rows:])


def rotate(x: Tensor, angles: Angles) -> Tensor:
    """Turn each pair (i, i + E/2) of the last axis by its position's angle."""
    first, second = x.chunk(2, dim=-1)
    return x * angles.cos + torch.cat([-second, first], dim=-1) * angles.sin
