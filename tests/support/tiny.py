"""Tiny targets and drafters made in seconds, good enough that accepted counts run from 0 to a full block."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from dflash_core.drafter.model import Anchors, Drafter
from dflash_core.drafter.spec import DrafterSpec, backbone_shapes, read_drafter_spec
from dflash_core.target.head import load_embedding_and_head
from dflash_core.target.hidden_states import HiddenStates
from dflash_core.target.loading import Target, read_target_folder
from dflash_core.target.transcripts import Transcript

VOCAB = 160
MASK_TOKEN_ID = 159
STOP_TOKEN_ID = 7
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": STOP_TOKEN_ID,
    "bos_token_id": 1,
    "pad_token_id": 0,
}


def write_tiny_target(folder: Path, family: str, *, seed: int = 0, tied: bool = False) -> Target:
    """Save a random target of a family (`qwen3` or `llama`) in float32."""
    torch.manual_seed(seed)
    if family == "qwen3":
        model: Any = Qwen3ForCausalLM(Qwen3Config(**_COMMON, head_dim=16, tie_word_embeddings=tied))
    else:
        model = LlamaForCausalLM(LlamaConfig(**_COMMON, tie_word_embeddings=tied))
    with torch.no_grad():
        # Larger weights than the usual init: the greedy text then varies instead of repeating one token.
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(6.0)
    model.save_pretrained(folder)
    return read_target_folder(folder, name=f"tiny-{family}")


def add_tokenizer(folder: Path) -> None:
    """Save a word-level tokenizer with a chat template beside a tiny target: token i is the word `wi`.

    Special tokens have names of their own: they are looked for inside words, and `w1` is a part of `w10`.
    """
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    special = {0: "<pad>", 1: "<bos>", 3: "<unk>", STOP_TOKEN_ID: "<stop>"}
    words = Tokenizer(
        WordLevel({special.get(token, f"w{token}"): token for token in range(VOCAB)}, unk_token=special[3])
    )
    words.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        unk_token=special[3],
        eos_token=special[STOP_TOKEN_ID],
        pad_token=special[0],
        bos_token=special[1],
    )
    turns = "{% for message in messages %}w10 {{ message['content'] }} {% endfor %}"
    tokenizer.chat_template = turns + "{% if add_generation_prompt %}w11{% endif %}"
    tokenizer.save_pretrained(folder)


def write_prompts(path: Path, num_prompts: int = 4) -> Path:
    """Write a prompt file for a tiny target: two datasets, two groups."""
    lines = [
        json.dumps(
            {
                "id": f"p{number}",
                "dataset": "odd" if number % 2 else "even",
                "group": "first half" if number < num_prompts // 2 else "second half",
                "prompt": " ".join(f"w{20 + (7 * number + place) % 120}" for place in range(5 + 3 * number)),
            }
        )
        for number in range(num_prompts)
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def draft_config(target: Target, **changes: Any) -> dict[str, Any]:
    """Return a z-lab draft config for a tiny target."""
    config: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": target.config.hidden_size,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "vocab_size": target.config.vocab_size,
        "num_target_layers": target.config.num_layers,
        "block_size": 8,
        "dflash_config": {"mask_token_id": MASK_TOKEN_ID, "target_layer_ids": [1, 2, 4]},
    }
    return config | changes


def random_weights(config: dict[str, Any], target: Target, *, seed: int = 0) -> tuple[DrafterSpec, dict[str, Tensor]]:
    """Return the spec of a draft config and random weights of the shapes it calls for."""
    generator = torch.Generator().manual_seed(seed)
    head_norm = {"layers.0.self_attn.q_norm.weight": [config["head_dim"]]}
    shapes = _shapes_of(config, target, head_norm)
    weights = {
        name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * shape[1] ** -0.5
        for name, shape in shapes.items()
    }
    return read_drafter_spec(config, shapes, target.config, where="draft config"), weights


def _shapes_of(config: dict[str, Any], target: Target, seed_shapes: dict[str, list[int]]) -> dict[str, list[int]]:
    class _Facts:
        hidden_size = config["hidden_size"]
        intermediate_size = config["intermediate_size"]
        num_heads = config["num_attention_heads"]
        num_kv_heads = config["num_key_value_heads"]
        head_dim = seed_shapes["layers.0.self_attn.q_norm.weight"][0]
        num_layers = config["num_hidden_layers"]
        target_layer_ids = config["dflash_config"]["target_layer_ids"]

    return backbone_shapes(_Facts)


def train_drafter(
    spec: DrafterSpec,
    weights: dict[str, Tensor],
    target: Target,
    transcripts: list[Transcript],
    states: HiddenStates,
    *,
    snapshots: Sequence[int],
    seed: int = 0,
    learning_rate: float = 3e-3,
) -> dict[int, dict[str, Tensor]]:
    """Fit a drafter to transcripts by our own forward pass; an overfit one drafts whole blocks.

    Returns the weights after each number of steps in `snapshots`, ascending.
    """
    generator = torch.Generator().manual_seed(seed)
    embedding, head = load_embedding_and_head(target)
    weights = {name: tensor.clone().requires_grad_(True) for name, tensor in weights.items()}
    drafter = Drafter(spec, weights, embedding, device=torch.device("cpu"), dtype=torch.float32)
    optimizer = torch.optim.AdamW(weights.values(), lr=learning_rate, weight_decay=0.0)
    features = [features_of(spec, transcripts, states, index) for index in range(len(transcripts))]
    num_drafts = spec.block_size - 1
    taken: dict[int, dict[str, Tensor]] = {}
    for step in range(max(snapshots) + 1):
        if step in snapshots:
            taken[step] = {name: tensor.detach().clone() for name, tensor in weights.items()}
        index = step % len(transcripts)
        transcript = transcripts[index]
        response = torch.tensor(transcript.response_ids)
        chosen = torch.randint(0, max(1, len(response) - num_drafts), (32,), generator=generator)
        first = len(transcript.prompt_ids)
        anchors = Anchors(chosen + first, response[chosen], torch.full_like(chosen, spec.block_size))
        (hidden,) = drafter.draft_hidden([drafter.read_context(features[index])], [anchors], spec.block_size)
        labels = torch.stack([response[chosen + slot] for slot in range(1, spec.block_size)], dim=1)
        logits = hidden[:, 1:] @ head.T
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
        optimizer.step()
    return taken


def features_of(spec: DrafterSpec, transcripts: list[Transcript], states: HiddenStates, index: int) -> Tensor:
    """Return features_TF of one transcript from the stored hidden states."""
    first = sum(transcript.num_tokens for transcript in transcripts[:index])
    end = first + transcripts[index].num_tokens
    return torch.cat([states.load_layer(layer)[first:end] for layer in spec.target_layer_ids], dim=-1)


def write_drafter(folder: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> Path:
    """Save a drafter as a z-lab release folder: config.json and model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors")
    return folder
