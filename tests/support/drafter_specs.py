"""Drafters' facts for questions of memory: the published one of a 27 B target, and small ones."""

from __future__ import annotations

from typing import Any

from dflash_core.drafter.footprint import Workload
from dflash_core.drafter.spec import DrafterSpec

LARGE = DrafterSpec(
    hidden_size=5120,
    num_layers=5,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=17408,
    vocab_size=248320,
    rms_norm_eps=1e-6,
    rope={"rope_theta": 1e7, "rope_type": "default"},
    max_position_embeddings=262144,
    block_size=16,
    mask_token_id=248070,
    target_layer_ids=(1, 16, 31, 46, 61),
    is_causal=(True, True, True, True, False),
    windows=(2048, 2048, 2048, 2048, None),
    input_embedding_scale=1.0,
    output_multiplier=1.0,
    final_logit_softcapping=None,
)
"""The published drafter of a 27 B target: 1.73 B weights."""
SMALL_WORK = Workload(block_size=8, longest_tokens=600, num_tokens=3000, num_transcripts=8, most_anchors=300)


def small_spec(**changes: Any) -> DrafterSpec:
    """Return the facts of a drafter that runs in milliseconds; layers of the kind that the first one has."""
    facts: dict[str, Any] = {
        "hidden_size": 64,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "intermediate_size": 128,
        "vocab_size": 300,
        "rms_norm_eps": 1e-6,
        "rope": {"rope_theta": 1e4, "rope_type": "default"},
        "max_position_embeddings": 8192,
        "block_size": 8,
        "mask_token_id": 1,
        "target_layer_ids": (1, 2, 3),
        "is_causal": (False,),
        "windows": (None,),
        "input_embedding_scale": 1.0,
        "output_multiplier": 1.0,
        "final_logit_softcapping": None,
    } | changes
    for name in ("is_causal", "windows"):
        facts[name] = facts[name][:1] * facts["num_layers"]
    return DrafterSpec(**facts)
