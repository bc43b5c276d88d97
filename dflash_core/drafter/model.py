"""The drafter's forward pass over many anchors at once.

Context keys and values of a layer depend only on (context feature, position), and blocks at different
anchors do not see each other, so they are computed once per transcript and shared by all anchors.

Shapes: T tokens of one transcript, A anchors, K block slots (slot 0 is the anchor), D hidden size,
H query heads, G key/value heads, E head size, F selected layers x D.

    position      0 ... s-1 |  s      s+1    s+2   ... s+K-1
    seen by       context   |  anchor mask   mask  ... mask      one block
    features of   target    |  (the anchor has no target feature yet)

Which position a row predicts is `DrafterSpec.row_alignment`, what it makes of it is `head`'s business.

Source of the semantics: z-lab/dflash `dflash/model.py` as in PyPI `dflash` 0.1.0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from dflash_core.drafter.convolution import ConvolutionWeights, Corrections, convolve, read_corrections
from dflash_core.drafter.held_at_once import SCORE_BUDGET_ELEMENTS, WHOLE
from dflash_core.drafter.spec import DrafterSpec
from dflash_core.drafter.visibility import visible

HEAD_PARTS = ("candidate_selector.", "markov_head.", "confidence_head.", "d2t", "t2d")
"""How the names of tensors begin that belong to the head and not to the blocks."""


class LayerContext(NamedTuple):
    """Keys (rotated) and values of one layer over one transcript."""

    keys_GTE: Tensor
    values_GTE: Tensor


class Anchors(NamedTuple):
    """Where blocks are drafted: positions in one transcript, and how many slots each block has."""

    position_A: Tensor
    """Absolute position of the anchor token."""
    token_A: Tensor
    """Token id of the anchor."""
    num_slots_A: Tensor
    """Slots of the block, 1..K; shorter near the length limit."""


class _Rows(NamedTuple):
    """What attention needs of the blocks at A anchors of one layer."""

    queries_AKHE: Tensor
    keys_AKGE: Tensor
    values_AKGE: Tensor
    position_A: Tensor
    num_slots_A: Tensor


class _Around(NamedTuple):
    """The convolutions around one sublayer, and what this pass adds to their kernels."""

    weights: ConvolutionWeights
    corrections: Corrections


class Drafter:
    """Weights and facts of one drafter on one device, ready to draft.

    Args:
        spec: the canonical facts.
        weights: canonical tensor name to tensor; those of `HEAD_PARTS` are left to the head.
        embedding_VD: the target's raw embedding, or the drafter's own; may be memory-mapped. It stays where it is:
            only the rows of tokens that are asked for are moved.
        device: where to compute.
        dtype: dtype of the computation.
        score_elements: attention scores that are held at once.
        context_tokens: tokens of a transcript whose features are read at once; all by default.
    """

    def __init__(
        self,
        spec: DrafterSpec,
        weights: Mapping[str, Tensor],
        embedding_VD: Tensor,
        *,
        device: torch.device,
        dtype: torch.dtype,
        score_elements: int = SCORE_BUDGET_ELEMENTS,
        context_tokens: int = WHOLE,
    ) -> None:
        self.spec = spec
        self.device = device
        self.dtype = dtype
        self.score_elements = score_elements
        self.context_tokens = context_tokens
        self._weights = {
            name: tensor.to(device=device, dtype=dtype)
            for name, tensor in weights.items()
            if not name.startswith(HEAD_PARTS)
        }
        self._embedding_VD = embedding_VD
        self._inverse_frequency_E, self._rope_scale = _rope_frequencies(spec)
        self._inverse_frequency_E = self._inverse_frequency_E.to(device)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Return the scaled noise embedding of token ids, any shape.

        Nearly all slots of a batch of blocks hold the mask token: each row is read and moved once.
        """
        unique_U, place = torch.unique(token_ids.to(self._embedding_VD.device), return_inverse=True)
        rows_UD = functional.embedding(unique_U, self._embedding_VD).to(device=self.device, dtype=self.dtype)
        return (rows_UD * self.spec.input_embedding_scale)[place.to(self.device)]

    def read_context(self, features_TF: Tensor) -> list[LayerContext]:
        """Return every layer's context keys and values for one transcript.

        Args:
            features_TF: selected hidden states, concatenated in the order of `target_layer_ids`.
        """
        num_tokens = features_TF.shape[0]
        shape = (self.spec.num_kv_heads, num_tokens, self.spec.head_dim)
        empty = partial(torch.empty, shape, device=self.device, dtype=self.dtype)
        contexts = [LayerContext(empty(), empty()) for _ in range(self.spec.num_layers)]
        for first in range(0, num_tokens, self.context_tokens):
            part = slice(first, min(first + self.context_tokens, num_tokens))
            self._read_part(
                features_TF[part], [LayerContext(*(whole[:, part] for whole in one)) for one in contexts], first
            )
        return contexts

    def _read_part(self, features_TF: Tensor, contexts: Sequence[LayerContext], first: int) -> None:
        """Fill keys and values of consecutive tokens, of which the first stands at a position."""
        features_TF = features_TF.to(device=self.device, dtype=self.dtype)
        context_TD = self._norm(functional.linear(features_TF, self._weights["fc.weight"]), "hidden_norm.weight")
        positions_T = torch.arange(first, first + features_TF.shape[0], device=self.device)
        for layer, context in enumerate(contexts):
            self._fill(context, context_TD, positions_T, layer)

    def draft_hidden(
        self, contexts: Sequence[Sequence[LayerContext]], anchors: Sequence[Anchors], num_slots: int
    ) -> list[Tensor]:
        """Run blocks at anchors of several transcripts in one pass.

        Args:
            contexts: per transcript, the result of `read_context`.
            anchors: per transcript, its anchors; the same length as `contexts`.
            num_slots: K, slots computed per block; slots beyond a block's own number are meaningless.

        Returns:
            Per transcript hidden_AKD, after the final norm: the head's input.
        """
        counts = [one.position_A.shape[0] for one in anchors]
        token_AK = torch.full((sum(counts), num_slots), self.spec.mask_token_id)
        token_AK[:, 0] = torch.cat([one.token_A for one in anchors])
        hidden_AKD = self.embed(token_AK)
        position_A = torch.cat([one.position_A for one in anchors]).to(self.device)
        num_slots_A = torch.cat([one.num_slots_A for one in anchors]).to(self.device)
        for layer in range(self.spec.num_layers):
            layer_contexts = [context[layer] for context in contexts]
            hidden_AKD = self._layer(hidden_AKD, layer, layer_contexts, counts, position_A, num_slots_A)
        return list(self._norm(hidden_AKD, "norm.weight").split(counts))

    def _layer(
        self,
        hidden_AKD: Tensor,
        layer: int,
        contexts: Sequence[LayerContext],
        counts: Sequence[int],
        position_A: Tensor,
        num_slots_A: Tensor,
    ) -> Tensor:
        prefix = f"layers.{layer}"
        normed_AKD = self._norm(hidden_AKD, f"{prefix}.input_layernorm.weight")
        normed_AKD, around = self._convolve_input(normed_AKD, f"{prefix}.attention_conv")
        position_AK = position_A[:, None] + torch.arange(hidden_AKD.shape[1], device=self.device)
        queries_AKHE = self._heads(normed_AKD, f"{prefix}.self_attn.q", self.spec.num_heads)
        queries_AKHE = self._rotate(queries_AKHE, position_AK)
        keys_AKGE = self._heads(normed_AKD, f"{prefix}.self_attn.k", self.spec.num_kv_heads)
        keys_AKGE = self._rotate(keys_AKGE, position_AK)
        values_AKGE = self._project(normed_AKD, f"{prefix}.self_attn.v_proj").unflatten(
            -1, (self.spec.num_kv_heads, -1)
        )
        rows = _Rows(queries_AKHE, keys_AKGE, values_AKGE, position_A, num_slots_A)
        of_each = [_Rows(*part) for part in zip(*(tensor.split(list(counts)) for tensor in rows), strict=True)]
        attended = [self._attend(layer, context, part) for context, part in zip(contexts, of_each, strict=True)]
        attended_AKD = self._project(torch.cat(attended), f"{prefix}.self_attn.o_proj")
        hidden_AKD = hidden_AKD + self._convolve_output(attended_AKD, around)
        normed_AKD = self._norm(hidden_AKD, f"{prefix}.post_attention_layernorm.weight")
        normed_AKD, around = self._convolve_input(normed_AKD, f"{prefix}.mlp_conv")
        gate = functional.silu(self._project(normed_AKD, f"{prefix}.mlp.gate_proj"))
        inner = gate * self._project(normed_AKD, f"{prefix}.mlp.up_proj")
        return hidden_AKD + self._convolve_output(self._project(inner, f"{prefix}.mlp.down_proj"), around)

    def _convolve_input(self, normed_AKD: Tensor, name: str) -> tuple[Tensor, _Around | None]:
        """Return a sublayer's input, convolved where the drafter is a DFlash2, and what its output needs then."""
        if self.spec.conv_group_size is None:
            return normed_AKD, None
        weights = ConvolutionWeights(
            self._weights[f"{name}.base_kernel"], self._weights[f"{name}.kernel_projection.weight"]
        )
        corrections = read_corrections(weights, normed_AKD, self.spec.conv_group_size)
        convolved_AKD = convolve(normed_AKD, weights.base_kernel_2TD[0], corrections.input_AKTN)
        return convolved_AKD, _Around(weights, corrections)

    def _convolve_output(self, hidden_AKD: Tensor, around: _Around | None) -> Tensor:
        if around is None:
            return hidden_AKD
        return convolve(hidden_AKD, around.weights.base_kernel_2TD[1], around.corrections.output_AKTN)

    def _attend(self, layer: int, context: LayerContext, rows: _Rows) -> Tensor:
        """Return attention's output (A, K, H*E) for anchors of one transcript, in slices of anchors."""
        num_anchors, num_slots, num_heads, _ = rows.queries_AKHE.shape
        if num_anchors == 0:
            return rows.queries_AKHE.new_zeros(0, num_slots, num_heads * self.spec.head_dim)
        # The last position that any anchor may see: what lies beyond is left out of the products.
        end = int(rows.position_A.max())
        slice_size = max(1, self.score_elements // max(1, num_slots * num_heads * (end + num_slots)))
        context = LayerContext(context.keys_GTE[:, :end], context.values_GTE[:, :end])
        slices = (slice(first, first + slice_size) for first in range(0, num_anchors, slice_size))
        return torch.cat(
            [self._attend_slice(layer, context, _Rows(*(tensor[part] for tensor in rows))) for part in slices]
        )

    def _attend_slice(self, layer: int, context: LayerContext, rows: _Rows) -> Tensor:
        queries_AKHE, keys_AKGE, values_AKGE, position_A, num_slots_A = rows
        A, K, H, E = queries_AKHE.shape
        G = self.spec.num_kv_heads
        R = H // G  # query heads that share one key/value head
        queries_GARKE = queries_AKHE.view(A, K, G, R, E).permute(2, 0, 3, 1, 4)
        context_scores = queries_GARKE.reshape(G, A * R * K, E) @ context.keys_GTE.transpose(1, 2)
        context_scores = context_scores.view(G, A, R, K, -1)
        keys_GAEK = keys_AKGE.permute(2, 0, 3, 1)
        block_scores = queries_GARKE.reshape(G, A, R * K, E) @ keys_GAEK
        block_scores = block_scores.view(G, A, R, K, K)
        context_mask, block_mask = visible(
            self.spec,
            layer,
            num_context=context.keys_GTE.shape[1],
            num_slots=K,
            position_A=position_A,
            num_slots_A=num_slots_A,
        )
        scores = torch.cat(
            [
                context_scores.masked_fill(~context_mask[:, None], -torch.inf),
                block_scores.masked_fill(~block_mask[:, None], -torch.inf),
            ],
            dim=-1,
        )
        weights = torch.softmax(scores * E**-0.5, dim=-1, dtype=torch.float32).to(self.dtype)
        T = context.keys_GTE.shape[1]
        from_context = weights[..., :T].reshape(G, A * R * K, T) @ context.values_GTE
        values_GAKE = values_AKGE.permute(2, 0, 1, 3)
        from_block = weights[..., T:].reshape(G, A, R * K, K) @ values_GAKE
        output_GARKE = from_context.view(G, A, R, K, E) + from_block.view(G, A, R, K, E)
        return output_GARKE.permute(1, 3, 0, 2, 4).reshape(A, K, H * E)

    def _fill(self, context: LayerContext, context_TD: Tensor, positions_T: Tensor, layer: int) -> None:
        prefix = f"layers.{layer}.self_attn"
        keys_TGE = self._rotate(self._heads(context_TD, f"{prefix}.k", self.spec.num_kv_heads), positions_T)
        values_TGE = self._project(context_TD, f"{prefix}.v_proj").unflatten(-1, (self.spec.num_kv_heads, -1))
        context.keys_GTE.copy_(keys_TGE.transpose(0, 1))
        context.values_GTE.copy_(values_TGE.transpose(0, 1))

    def _heads(self, hidden: Tensor, name: str, num_heads: int) -> Tensor:
        """Return projected and normalised heads (..., heads, E) of queries or keys, not yet rotated."""
        return self._norm(self._project(hidden, f"{name}_proj").unflatten(-1, (num_heads, -1)), f"{name}_norm.weight")

    def _project(self, hidden: Tensor, name: str) -> Tensor:
        return functional.linear(hidden, self._weights[f"{name}.weight"], self._weights.get(f"{name}.bias"))

    def _norm(self, hidden: Tensor, name: str) -> Tensor:
        """RMSNorm as Qwen3 has it: in fp32, then weight times the result in the working dtype."""
        wide = hidden.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.spec.rms_norm_eps)
        return self._weights[name] * wide.to(self.dtype)

    def _rotate(self, heads: Tensor, positions: Tensor) -> Tensor:
        """Apply RoPE to (..., heads, E) at positions of the leading shape."""
        angles = positions[..., None].float() * self._inverse_frequency_E
        angles = torch.cat([angles, angles], dim=-1)[..., None, :]
        cos = (angles.cos() * self._rope_scale).to(self.dtype)
        sin = (angles.sin() * self._rope_scale).to(self.dtype)
        first, second = heads.chunk(2, dim=-1)
        return heads * cos + torch.cat([-second, first], dim=-1) * sin


def _rope_frequencies(spec: DrafterSpec) -> tuple[Tensor, float]:
    """Return inverse frequencies (E/2) and the factor on cos and sin, by transformers' own code."""
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    config = Qwen3Config(
        hidden_size=spec.hidden_size,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        num_hidden_layers=spec.num_layers,
        head_dim=spec.head_dim,
        max_position_embeddings=spec.max_position_embeddings,
        rope_parameters=dict(spec.rope),
    )
    rotary = Qwen3RotaryEmbedding(config)
    return rotary.inv_freq.float(), float(rotary.attention_scaling)
