"""The tensors that a drafter's facts call for, and the comparison with those of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from dflash_core.errors import CheckpointMismatch, UnsupportedCheckpoint

if TYPE_CHECKING:
    from dflash_core.drafter.spec import DrafterSpec

EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"
_CONVOLUTIONS = ("attention_conv", "mlp_conv")


class Backbone(Protocol):
    """The facts that decide the tensors which all drafters of the family share."""

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream, the target's too."""

    @property
    def intermediate_size(self) -> int:
        """Inner width of the layers' MLP."""

    @property
    def num_heads(self) -> int:
        """Query heads."""

    @property
    def num_kv_heads(self) -> int:
        """Key and value heads."""

    @property
    def head_dim(self) -> int:
        """Width of a head."""

    @property
    def num_layers(self) -> int:
        """Layers of the drafter."""

    @property
    def target_layer_ids(self) -> Sequence[int]:
        """Layers of the target that `fc` reads."""


def backbone_shapes(facts: Backbone) -> dict[str, list[int]]:
    """Return canonical name to shape for `fc`, the norms and the layers, biases aside."""
    hidden, inner = facts.hidden_size, facts.intermediate_size
    queries, keys = facts.num_heads * facts.head_dim, facts.num_kv_heads * facts.head_dim
    shapes = {
        "fc.weight": [hidden, len(facts.target_layer_ids) * hidden],
        "hidden_norm.weight": [hidden],
        "norm.weight": [hidden],
    }
    for layer in range(facts.num_layers):
        prefix = f"layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": [hidden],
            f"{prefix}.post_attention_layernorm.weight": [hidden],
            f"{prefix}.self_attn.q_proj.weight": [queries, hidden],
            f"{prefix}.self_attn.k_proj.weight": [keys, hidden],
            f"{prefix}.self_attn.v_proj.weight": [keys, hidden],
            f"{prefix}.self_attn.o_proj.weight": [hidden, queries],
            f"{prefix}.self_attn.q_norm.weight": [facts.head_dim],
            f"{prefix}.self_attn.k_norm.weight": [facts.head_dim],
            f"{prefix}.mlp.gate_proj.weight": [inner, hidden],
            f"{prefix}.mlp.up_proj.weight": [inner, hidden],
            f"{prefix}.mlp.down_proj.weight": [hidden, inner],
        }
    return shapes


def expected_shapes(spec: DrafterSpec) -> dict[str, list[int]]:
    """Return canonical name to shape for every tensor that the facts call for; own tables are `table_shapes`."""
    shapes = backbone_shapes(spec)
    if spec.attention_bias:
        shapes |= _bias_shapes(spec)
    if spec.proposal_rule == "dflash2":
        shapes |= _dflash2_shapes(spec)
    if spec.markov_rank:
        shapes |= _markov_shapes(spec)
    if spec.has_confidence_head:
        width = spec.hidden_size + (spec.markov_rank if spec.confidence_head_with_markov else 0)
        shapes["confidence_head.proj.weight"] = [1, width]
    if spec.draft_vocab_size is not None:
        shapes["d2t"] = [spec.draft_vocab_size]
    return shapes


def optional_shapes(spec: DrafterSpec) -> dict[str, list[int]]:
    """Return name to shape for tensors that may be there or not: what they hold follows from others, or is 0."""
    shapes = {}
    if spec.draft_vocab_size is not None:
        shapes["t2d"] = [spec.vocab_size]
    if spec.has_confidence_head:
        shapes["confidence_head.proj.bias"] = [1]
    return shapes


def table_shapes(spec: DrafterSpec) -> dict[str, list[int]]:
    """Return name to shape for the embedding and the head that a drafter may bring along."""
    num_drafted = spec.vocab_size if spec.draft_vocab_size is None else spec.draft_vocab_size
    return {EMBEDDING: [spec.vocab_size, spec.hidden_size], HEAD: [num_drafted, spec.hidden_size]}


def has_biases(shapes: Mapping[str, Sequence[int]]) -> bool:
    """Tell whether any projection of attention has a bias."""
    return any(".self_attn." in name and name.endswith("_proj.bias") for name in shapes)


def check_tensors(spec: DrafterSpec, shapes: Mapping[str, Sequence[int]], where: str) -> None:
    """Check that a checkpoint holds what the facts call for, in the right shapes, and nothing else.

    Raises:
        CheckpointMismatch: a tensor is missing or of another shape.
        UnsupportedCheckpoint: one has no use.
    """
    expected, optional = expected_shapes(spec), optional_shapes(spec)
    for name, shape in expected.items():
        if name not in shapes:
            raise CheckpointMismatch(
                f"the checkpoint lacks {name}, which {where} calls for; is it the config of this run?"
            )
        if list(shapes[name]) != shape:
            raise CheckpointMismatch(_shape_message(name, list(shapes[name]), shape, spec, where))
    for name, shape in optional.items():
        if name in shapes and list(shapes[name]) != shape:
            raise CheckpointMismatch(_shape_message(name, list(shapes[name]), shape, spec, where))
    extra = sorted(set(shapes) - set(expected) - set(optional))
    if extra:
        raise UnsupportedCheckpoint(
            f"the checkpoint holds {extra[:3]}, which {where} has no use for; refused, not dropped"
        )


def check_biases(spec: DrafterSpec, shapes: Mapping[str, Sequence[int]], configured: bool | None, where: str) -> None:
    """Check that attention's biases are all there or none, and as the config says.

    Raises:
        CheckpointMismatch: some are missing, or the config says otherwise.
    """
    expected = _bias_shapes(spec)
    present = [name for name in expected if name in shapes]
    wanted = bool(present) if configured is None else configured
    if wanted == bool(present) and (not wanted or len(present) == len(expected)):
        return
    missing = next((name for name in expected if name not in shapes), None)
    said = f"holds {present[0]}" if present else "holds no bias"
    raise CheckpointMismatch(
        f"{where}: attention_bias = {configured!r}, but the checkpoint {said}"
        + (f" and lacks {missing}" if wanted and missing else "")
        + "; is it the config of this run?"
    )


def check_tables(spec: DrafterSpec, tables: Mapping[str, Sequence[int]], where: str) -> None:
    """Check the shapes of the embedding and head that came with a drafter.

    Args:
        spec: its facts.
        tables: `embed_tokens.weight` and `lm_head.weight`, those that are there.
        where: the checkpoint, for messages.

    Raises:
        UnsupportedCheckpoint: a table has rows for another vocabulary, or another width, or a reduced vocabulary has
            no head over it.
    """
    for name, shape in table_shapes(spec).items():
        if name in tables and list(tables[name]) != shape:
            raise UnsupportedCheckpoint(
                f"{where}: {name} has the shape {list(tables[name])}, expected {shape} by vocab_size = "
                f"{spec.vocab_size} and draft_vocab_size = {spec.draft_vocab_size}; a reduced vocabulary needs "
                f"draft_vocab_size and the tensor d2t"
            )
    if spec.draft_vocab_size is not None and HEAD not in tables:
        raise UnsupportedCheckpoint(
            f"{where}: holds no {HEAD} over the {spec.draft_vocab_size} tokens of its reduced vocabulary "
            f"({spec.sources.get('draft_vocab_size')}); such a head is trained, so it cannot be taken from the "
            f"target's: save the whole drafter"
        )


def _bias_shapes(spec: DrafterSpec) -> dict[str, list[int]]:
    return {
        name.replace(".weight", ".bias"): shape[:1]
        for name, shape in backbone_shapes(spec).items()
        if ".self_attn." in name and name.endswith("_proj.weight")
    }


def _dflash2_shapes(spec: DrafterSpec) -> dict[str, list[int]]:
    """DFlash2: two kernels per convolution (input and output side), one correction per tap and group of channels."""
    kernel, group, rank = spec.conv_kernel_size, spec.conv_group_size, spec.selector_rank
    if kernel is None or group is None or rank is None:
        raise ValueError(
            f"DFlash2 needs conv_kernel_size, conv_group_size and selector_rank, got {kernel, group, rank}"
        )
    hidden = spec.hidden_size
    shapes = {}
    for layer in range(spec.num_layers):
        for name in _CONVOLUTIONS:
            prefix = f"layers.{layer}.{name}"
            shapes[f"{prefix}.base_kernel"] = [2, kernel, hidden]
            shapes[f"{prefix}.kernel_projection.weight"] = [2 * kernel * (hidden // group), hidden]
    return shapes | {
        "candidate_selector.predecessor_codebook": [spec.vocab_size, rank],
        "candidate_selector.successor_codebook": [spec.vocab_size, rank],
        "candidate_selector.hidden_projection.weight": [rank, hidden],
    }


def _markov_shapes(spec: DrafterSpec) -> dict[str, list[int]]:
    """DSpark: the token before is looked up in the target's vocabulary, the bias is over the drafter's."""
    rank, hidden = spec.markov_rank, spec.hidden_size
    num_drafted = spec.vocab_size if spec.draft_vocab_size is None else spec.draft_vocab_size
    shapes = {
        "markov_head.markov_w1.weight": [spec.vocab_size, rank],
        "markov_head.markov_w2.weight": [num_drafted, rank],
    }
    if spec.markov_head_type == "gated":
        shapes |= {"markov_head.gate_proj.weight": [rank, hidden + rank], "markov_head.gate_proj.bias": [rank]}
    if spec.markov_head_type == "rnn":
        width = 2 * rank + hidden
        shapes |= {"markov_head.joint_proj.weight": [3 * rank, width], "markov_head.joint_proj.bias": [3 * rank]}
    return shapes


def _shape_message(name: str, found: list[int], wanted: list[int], spec: DrafterSpec, where: str) -> str:
    if name == "fc.weight" and len(found) == 2 and found[0] == wanted[0]:
        num_ids, num_read = len(spec.target_layer_ids), found[1] / spec.hidden_size
        hint = "compare the config with the run"
        if num_read == num_ids + 1:
            hint = "speculators' converter drops a tap of the last layer but not its columns, so find the missing id"
        return (
            f"fc.weight reads {num_read:g} target layers of width {spec.hidden_size}, but target_layer_ids "
            f"{list(spec.target_layer_ids)} ({spec.sources['target_layer_ids']}) are {num_ids}; {hint}"
        )
    return f"{name} has shape {found}, but {where} calls for {wanted}; is it the config of this run?"
