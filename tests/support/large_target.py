"""A Llama of 1.2 GB, written shard by shard without ever being built, and read in a process with little memory.

    python -m tests.support.large_target WAY TARGET STORE          prints one JSON object

WAY is `layers` (what the product does) or `whole` (the model in memory). The process may allocate, beside what
Python and its libraries took, the largest layer in float32, the activations, and a fifth more.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 10,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
LENGTHS = ((12, 20), (8, 16), (20, 4))
_SLACK_BYTES = 32 << 20
"""Addresses that the C library reserves and does not use; what is used is measured."""


def write_large_target(folder: Path) -> int:
    """Write the target, a shard per layer; return its size in bytes."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    width, inner, heads = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["num_attention_heads"]
    kv = CONFIG["num_key_value_heads"] * CONFIG["head_dim"]
    pool = torch.randn(1 << 22, generator=torch.Generator().manual_seed(0)).mul_(width**-0.5).bfloat16()

    def make(number: int, *shape: int) -> torch.Tensor:
        size = torch.Size(shape).numel()
        return pool.roll(1009 * number).repeat(-(-size // pool.numel()))[:size].view(shape)

    shards: list[dict[str, torch.Tensor]] = [
        {"model.embed_tokens.weight": make(1, CONFIG["vocab_size"], width) * width**0.5},
        {"lm_head.weight": make(2, CONFIG["vocab_size"], width), "model.norm.weight": torch.ones(width).bfloat16()},
    ]
    weight_map: dict[str, str] = {}
    for number in range(CONFIG["num_hidden_layers"] + 2):
        if number < 2:
            tensors = shards[number]
        else:
            name = f"model.layers.{number - 2}"
            tensors = {
                f"{name}.self_attn.q_proj.weight": make(number + 3, heads * CONFIG["head_dim"], width),
                f"{name}.self_attn.k_proj.weight": make(number + 5, kv, width),
                f"{name}.self_attn.v_proj.weight": make(number + 7, kv, width),
                f"{name}.self_attn.o_proj.weight": make(number + 11, width, heads * CONFIG["head_dim"]),
                f"{name}.mlp.gate_proj.weight": make(number + 13, inner, width),
                f"{name}.mlp.up_proj.weight": make(number + 17, inner, width),
                f"{name}.mlp.down_proj.weight": make(number + 19, width, inner),
                f"{name}.input_layernorm.weight": torch.ones(width).bfloat16(),
                f"{name}.post_attention_layernorm.weight": torch.ones(width).bfloat16(),
            }
        file = f"model-{number:05d}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return size


def status_bytes(field: str) -> int:
    """Return a field of this process's memory, such as VmData or VmHWM."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def main(way: str, target_folder: str, store_folder: str) -> None:
    """Extract two layers under a limit, and print what it took."""
    from dflash_core.store import Store
    from dflash_core.target import whole_model
    from dflash_core.target.extraction_plan import make_extraction_plan
    from dflash_core.target.hidden_states import extract_hidden_states
    from dflash_core.target.layer_weights import LayerWeights
    from dflash_core.target.loading import read_target_folder
    from dflash_core.target.transcripts import Transcript

    torch.set_num_threads(1)
    target = read_target_folder(Path(target_folder), name="large")
    generator = torch.Generator().manual_seed(1)
    transcripts = [
        Transcript(
            id=f"p{number}",
            prompt_ids=tuple(torch.randint(0, 32000, (num_prompt,), generator=generator).tolist()),
            response_ids=tuple(torch.randint(0, 32000, (num_response,), generator=generator).tolist()),
            stop_reason="length",
        )
        for number, (num_prompt, num_response) in enumerate(LENGTHS)
    ]
    sequences = [[*one.prompt_ids, *one.response_ids] for one in transcripts]
    plan = make_extraction_plan(LayerWeights(target, "float32"), sequences, "float32")
    # What a first product and a first model class load counts as the libraries' own.
    torch.nn.functional.scaled_dot_product_attention(*torch.randn(3, 1, 4, 8, 16)) @ torch.randn(16, 16)
    activations = plan.activation_bytes + sum(map(len, sequences)) * CONFIG["hidden_size"] * 4
    allowed = int((plan.layer_bytes + activations) * 1.2)
    limit = status_bytes("VmData") + allowed + _SLACK_BYTES
    before = status_bytes("VmRSS")
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    begin = time.perf_counter()
    if way == "layers":
        states = extract_hidden_states(
            Store(store_folder), target, transcripts, [3, 9], compute_dtype="float32", store_dtype="float32"
        )
        assert states.choices.meta["method"] == "layer by layer", states.warnings
    else:
        whole_model.run(
            target,
            sequences,
            list(LENGTHS),
            layers=[3, 9],
            compute_dtype="float32",
            store_dtype=torch.float32,
            stage="hidden_states",
        )
    print(
        json.dumps(
            {
                "seconds": time.perf_counter() - begin,
                "peak_bytes": status_bytes("VmHWM") - before,
                "allowed_bytes": allowed,
                "planned_bytes": plan.peak_bytes,
                "layer_bytes": plan.layer_bytes,
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
