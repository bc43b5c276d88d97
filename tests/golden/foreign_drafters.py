"""Logits of tiny drafters by the trainers' own packages: speculators 0.9.0 and SpecForge 0.2.0, in fp32.

    python -m venv /tmp/foreign && /tmp/foreign/bin/pip install torch==2.13.0 "transformers==5.24.0"
    /tmp/foreign/bin/pip install --no-deps speculators==0.9.0 specforge==0.2.0 hs_connectors loguru datasets
    /tmp/foreign/bin/python -m tests.golden.foreign_drafters        writes tests/golden/foreign_drafters.json

(and whatever else of plain packages their imports then ask for). The two are no dependencies of this
project, so that they stand in no environment of it; `test_foreign_drafters.py` compares our logits with
the file. Weights and inputs are computed from names and shapes here, so the file holds outputs alone,
beside each drafter's config as its package writes it.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PATH = Path(__file__).with_suffix(".json")
COMMAND = "python -m tests.golden.foreign_drafters"
HIDDEN, VOCAB, NUM_DRAFTED, MASK, BLOCK, DEPTH = 24, 40, 26, 39, 5, 9
NUM_TOKENS = 17
ANCHORS = (2, 7, 11)
BACKBONE: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "vocab_size": VOCAB,
    "rope_parameters": {"rope_theta": 1000.0, "rope_type": "default"},
}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4, "use_sliding_window": True}
ALL_SLIDING = SLIDING | {"layer_types": ["sliding_attention", "sliding_attention"]}
# SpecForge's mask does not cut the block by the window, serving does: no matter while the window is the longer.
LONGER = SLIDING | {"sliding_window": BLOCK + 1}
YARN = {
    "rope_parameters": {
        "rope_theta": 1000.0, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16,
    }
}  # fmt: skip
TAPS = (6, 2, 4)
"""0-based layers, in the order of `fc`."""

# Name to kind, changes of the backbone and of the config.
SPECULATORS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dflash": ("dflash", {}, {}),
    "dflash causal window, yarn": ("dflash", SLIDING | YARN, {"sliding_window_non_causal": False}),
    "dflash window both ways": ("dflash", ALL_SLIDING, {"sliding_window_non_causal": True}),
    "dflash shifted, reduced": ("dflash", {}, {"sample_from_anchor": True, "draft_vocab_size": NUM_DRAFTED}),
    "dflash2": (
        "dflash2",
        ALL_SLIDING,
        {"conv_kernel_size": 3, "conv_group_size": 4, "selector_rank": 7, "selector_top_k": 6},
    ),
    "dspark vanilla": ("dspark", {}, {"markov_rank": 5, "markov_head_type": "vanilla"}),
    "dspark gated, reduced": (
        "dspark",
        SLIDING,
        {
            "markov_rank": 5,
            "markov_head_type": "gated",
            "draft_vocab_size": NUM_DRAFTED,
            "sliding_window_non_causal": True,
        },
    ),
    "dspark rnn": ("dspark", {}, {"markov_rank": 5, "markov_head_type": "rnn", "confidence_head_with_markov": False}),
    "dspark rnn, same position": (
        "dspark", {}, {"markov_rank": 5, "markov_head_type": "rnn", "sample_from_anchor": False}
    ),
}  # fmt: skip
SPECFORGE: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dflash causal window": ("dflash", LONGER, {}),
    "dspark vanilla": ("dspark", {}, {"markov_rank": 5, "markov_head_type": "vanilla"}),
    "dspark gated": ("dspark", YARN, {"markov_rank": 5, "markov_head_type": "gated"}),
    "dspark rnn": (
        "dspark",
        LONGER,
        {
            "markov_rank": 5,
            "markov_head_type": "rnn",
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
        },
    ),
}  # fmt: skip


def wave(name: str, shape: Sequence[int]) -> Tensor:
    """Return numbers between -1 and 1 that depend on a name and a place alone, on every machine."""
    count = int(torch.tensor(list(shape)).prod())
    start = zlib.crc32(name.encode()) % 10_000
    return torch.sin(torch.arange(count, dtype=torch.float64) * 12.9898 + start).float().reshape(list(shape))


def weights_for(shapes: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    """Return the weights of a drafter; norms lie around one."""
    weights = {}
    for name, shape in shapes.items():
        numbers = wave(name, shape)
        if name.endswith("norm.weight"):
            weights[name] = 1.0 + numbers / 2
        else:
            weights[name] = numbers * (2.0 if len(shape) == 1 else 3.0 * shape[-1] ** -0.5)
    return weights


def target_of_draft() -> Tensor:
    """Return the target's number of every token of the reduced vocabulary."""
    return torch.tensor([token for token in range(VOCAB) if token % 3 != 1][:NUM_DRAFTED])


def maps() -> tuple[Tensor, Tensor]:
    """Return t2d and d2t: which tokens are kept, and what to add to a kept one's own number."""
    kept = torch.zeros(VOCAB, dtype=torch.bool)
    kept[target_of_draft()] = True
    return kept, target_of_draft() - torch.arange(NUM_DRAFTED)


def features() -> Tensor:
    """Return the target's hidden states, in the order of `fc`."""
    return wave("features", (NUM_TOKENS, len(TAPS) * HIDDEN))


def tokens() -> Tensor:
    """Return the text."""
    return (torch.arange(NUM_TOKENS) * 7 + 3) % (VOCAB - 1)


def tables(num_drafted: int) -> tuple[Tensor, Tensor]:
    """Return embedding and head."""
    return wave("embedding", (VOCAB, HIDDEN)), wave("head", (num_drafted, HIDDEN))


def speculators_case(kind: str, backbone: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Run speculators' own training forward pass at our anchors."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.dflash import core as dflash_core_
    from speculators.models.dflash2.core import DFlash2DraftModel
    from speculators.models.dspark import core as dspark_core
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import Qwen3Config

    models = {
        "dflash": dflash_core_.DFlashDraftModel,
        "dflash2": DFlash2DraftModel,
        "dspark": dspark_core.DSparkDraftModel,
    }
    model_class: Any = models[kind]
    layers = Qwen3Config(**(BACKBONE | backbone))
    layers._attn_implementation = "eager"
    facts = {"draft_vocab_size": VOCAB} | changes
    drafts = BLOCK if facts.get("sample_from_anchor", kind == "dspark") else BLOCK - 1
    config = model_class.config_class(
        transformer_layer_config=layers,
        block_size=BLOCK,
        aux_hidden_state_layer_ids=[layer + 1 for layer in TAPS],
        mask_token_id=MASK,
        speculators_config=SpeculatorsConfig(
            algorithm=kind,
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=drafts)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path="tiny", architectures=["Qwen3ForCausalLM"]),
        ),
        **facts,
    )
    model = model_class(config).eval()
    own = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if not name.startswith(("verifier_", "embed_tokens", "lm_head", "t2d", "d2t"))
    }
    embedding, head = tables(config.draft_vocab_size)
    state = weights_for({name: list(tensor.shape) for name, tensor in own.items()})
    model.load_state_dict(state | {"embed_tokens.weight": embedding, "lm_head.weight": head}, strict=False)
    if config.draft_vocab_size != VOCAB:
        model.load_vocab_mappings(*maps())
    model.verifier_lm_head.weight.data.zero_()
    anchors = torch.tensor(ANCHORS)
    seen: dict[str, Any] = {}

    def noting(*args: Any, **named: Any) -> Any:
        seen["logits"] = named["unary_logits"] if "unary_logits" in named else args[0]
        seen["confidence"] = args[2] if kind == "dspark" else None
        return torch.zeros(()), {}

    module: Any = __import__(model_class.__module__, fromlist=["core"])
    module.compute_metrics = noting
    dflash_core_.select_anchors = lambda *_: (anchors, torch.ones(len(anchors), dtype=torch.bool))  # type: ignore[assignment]
    text = tokens()[None]
    inputs = (features()[None], text, torch.ones_like(text), wave("last", (1, NUM_TOKENS, HIDDEN)), text * 0)
    with torch.no_grad():
        model(*inputs, max_anchors=len(ANCHORS))
        found = {"logits": seen["logits"].view(len(ANCHORS), BLOCK, -1)}
        if seen["confidence"] is not None:
            found["confidence"] = torch.sigmoid(seen["confidence"]).view(len(ANCHORS), BLOCK)
        if kind == "dflash2":
            hidden, logits, _, _, places = model._backbone_forward(*inputs, max_anchors=len(ANCHORS))
            before = model._predecessor_ids(text, places).reshape(1, -1)
            candidates, scores = model.candidate_selector.select(logits, hidden, before)
            found["candidates"] = candidates.view(len(ANCHORS), BLOCK, -1)
            found["scores"] = scores.view(len(ANCHORS), BLOCK, -1)
    return {"config": json.loads(config.to_json_string(use_diff=False)), "shapes": _shapes(own), **_lists(found)}


def specforge_case(kind: str, backbone: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Run SpecForge's own model under its training mask at our anchors."""
    from specforge.algorithms.common.dflash_family_model import create_dflash_sdpa_mask
    from specforge.modeling.draft.dflash import DFlashDraftModel
    from specforge.modeling.draft.dspark import DSparkDraftModel
    from transformers import Qwen3Config

    config = Qwen3Config(
        **(BACKBONE | backbone),
        architectures=["DFlashDraftModel"],
        block_size=BLOCK,
        num_target_layers=DEPTH,
        tie_word_embeddings=False,
        dflash_config={"mask_token_id": MASK, "target_layer_ids": list(TAPS), "projector_type": kind} | changes,
    )
    config._attn_implementation = "sdpa"
    written = json.loads(config.to_json_string(use_diff=False))
    model: Any = (DSparkDraftModel if kind == "dspark" else DFlashDraftModel)(config).eval()
    own = {name: tensor for name, tensor in model.state_dict().items() if "rotary_emb" not in name}
    model.load_state_dict(weights_for({name: list(tensor.shape) for name, tensor in own.items()}), strict=True)
    embedding, head = tables(VOCAB)
    anchors = torch.tensor([ANCHORS])
    ids = torch.full((len(ANCHORS), BLOCK), MASK)
    ids[:, 0] = tokens()[anchors[0]]
    block = (anchors[0][:, None] + torch.arange(BLOCK)).flatten()
    common = (anchors, torch.ones_like(anchors, dtype=torch.bool), NUM_TOKENS, BLOCK, torch.device("cpu"))
    masks = {
        "full_attention": create_dflash_sdpa_mask(*common),
        "sliding_attention": create_dflash_sdpa_mask(*common, sliding_window=config.sliding_window),
    }
    with torch.no_grad():
        hidden = model(
            position_ids=torch.cat([torch.arange(NUM_TOKENS), block])[None],
            attention_mask=masks,
            noise_embedding=embedding[ids].view(1, -1, HIDDEN),
            target_hidden=features()[None],
        ).view(len(ANCHORS), BLOCK, HIDDEN)
        before = tokens()[block].view(len(ANCHORS), BLOCK)
        logits = model.apply_logits_head(hidden @ head.T, prev_token_ids=before, hidden_states=hidden)
        found = {"logits": logits}
        confidence = model.predict_confidence(hidden, prev_token_ids=before)
        if confidence is not None:
            found["confidence"] = torch.sigmoid(confidence)
    return {"config": written, "shapes": _shapes(own), **_lists(found)}


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, list[int]]:
    return {name: list(tensor.shape) for name, tensor in tensors.items()}


def _lists(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return tensors as lists; nine digits name an fp32 number."""
    return {
        name: json.loads(json.dumps(tensor.tolist()), parse_float=lambda text: float(f"{float(text):.9g}"))
        for name, tensor in tensors.items()
    }


def main() -> None:
    """Write the golden file."""
    from importlib.metadata import version

    torch.set_num_threads(1)
    os.environ["HF_HUB_OFFLINE"] = "1"  # the verifier is a name, nothing is to be fetched
    document = {
        "command": COMMAND,
        "packages": {name: version(name) for name in ("speculators", "specforge", "torch", "transformers")},
        "speculators": {name: speculators_case(*case) for name, case in SPECULATORS.items()},
        "specforge": {name: specforge_case(*case) for name, case in SPECFORGE.items()},
    }
    PATH.write_text(json.dumps(document, separators=(",", ":")) + "\n", encoding="utf-8")
    print(f"wrote {PATH}")


if __name__ == "__main__":
    main()
