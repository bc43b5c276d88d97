"""How much memory and disk a job takes: counts of numbers times bytes per number, each in one small function.

Nothing is fudged here; what is an upper bound says so. Sizes are bytes.
"""

from __future__ import annotations

from dflash_core.target.model_config import ModelConfig

DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
}
RUNTIME_BYTES = 512 * 2**20
"""Room for the interpreter with its libraries, or for a CUDA context."""
EXTRACTION_HEADROOM = 1.2
"""Share above the parts of an extraction for the allocator and what torch needs to compute with."""
_LEAST_ARGUMENT_BYTES = 16 << 20
_ASSUMED_DTYPE_BYTES = 2


def num_parameters_of(size_bytes: int, dtype: str | None) -> int:
    """Return how many numbers a model's weight files hold; a dtype that is not known counts as 16-bit."""
    return size_bytes // DTYPE_BYTES.get(dtype or "", _ASSUMED_DTYPE_BYTES)


def weights_bytes(num_parameters: int, dtype: str) -> int:
    """Return the size of weights held in a dtype."""
    return num_parameters * DTYPE_BYTES[dtype]


def head_bytes(target: ModelConfig, dtype: str) -> int:
    """Return the size of the output head [V, D]."""
    return target.vocab_size * target.hidden_size * DTYPE_BYTES[dtype]


def key_value_bytes(num_tokens: int, num_layers: int, num_heads: int, head_size: int, dtype: str) -> int:
    """Return the size of the keys and values of some tokens in all layers."""
    return 2 * num_tokens * num_layers * num_heads * head_size * DTYPE_BYTES[dtype]


def target_cache_bytes(target: ModelConfig, num_tokens: int, dtype: str) -> int:
    """Return the size of the target's cache: an upper bound, as if every layer were full attention."""
    heads = target.num_key_value_heads or target.num_attention_heads or 1
    if target.head_dim is not None:
        head_size = target.head_dim
    else:
        head_size = target.hidden_size // (target.num_attention_heads or 1)
    return key_value_bytes(num_tokens, target.num_layers, heads, head_size, dtype)


def activation_bytes(target: ModelConfig, num_tokens: int, dtype: str) -> int:
    """Return what one layer's pass over some tokens holds at once.

    Four residual-wide tensors (input, normed, attention's output, sum) and three of the MLP's width
    (gate, up, product); where the config does not state that width, four times the residual's.
    """
    intermediate = target.intermediate_size or 4 * target.hidden_size
    return num_tokens * (4 * target.hidden_size + 3 * intermediate) * DTYPE_BYTES[dtype]


def layer_bytes(target: ModelConfig, num_parameters: int, dtype: str) -> int:
    """Return the size of one decoder layer: what is not embedding and head, spread evenly over the layers.

    An estimate: the layers of a hybrid differ, and a multimodal model's towers are counted in.
    """
    tables = (1 if target.tie_word_embeddings else 2) * target.vocab_size * target.hidden_size
    return max(num_parameters - tables, 0) // target.num_layers * DTYPE_BYTES[dtype]


def argument_bytes(largest_layer_bytes: int) -> int:
    """Return what masks and rotary tables of all transcripts may take before they are made anew for every layer."""
    return max(_LEAST_ARGUMENT_BYTES, largest_layer_bytes // 8)


def extraction_bytes(target: ModelConfig, num_parameters: int, longest_tokens: int, dtype: str) -> int:
    """Return what reading hidden states layer by layer takes: one layer and the longest transcript's pass.

    It does not grow with the number of transcripts. The head comes in slices that fit where the layers were.
    """
    layer = layer_bytes(target, num_parameters, dtype)
    resident = layer + activation_bytes(target, longest_tokens, dtype) + argument_bytes(layer)
    return int(resident * EXTRACTION_HEADROOM)


def logits_bytes(num_rows: int, vocab_size: int) -> int:
    """Return the size of logits, which are compared in float32."""
    return num_rows * vocab_size * DTYPE_BYTES["float32"]


def hidden_states_bytes(num_tokens: int, num_layers: int, hidden_size: int, dtype: str) -> int:
    """Return the size of the states of some layers at every token."""
    return num_tokens * num_layers * hidden_size * DTYPE_BYTES[dtype]
