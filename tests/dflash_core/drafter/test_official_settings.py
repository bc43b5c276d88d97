"""Every setting that changes drafts, for DFlash and DFlash2, against PyPI `dflash` 0.1.0 in fp32."""

from __future__ import annotations

import time
from typing import Any

import dflash.model as official
import pytest
import torch

from dflash_core.drafter.head import Head, Rows, SelectorHead
from dflash_core.drafter.scoring import BlockRule
from tests.support import official as scenes
from tests.support import tiny
from tests.support.official import SELECTOR, Scene, Trained

SLIDING: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 12,
    "use_sliding_window": True,
}
ALL_SLIDING = SLIDING | {"layer_types": ["sliding_attention", "sliding_attention"]}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}
CAPPED = {"output_multiplier": 0.5, "final_logit_softcapping": 5.0}
RULES: dict[str, dict[str, Any]] = {"dflash": {}, "dflash2": SELECTOR}
# Name to rule, nested settings and settings of the top level.
SETTINGS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dflash, all causal windows": ("dflash", {}, ALL_SLIDING),
    "dflash, windows both ways": ("dflash", {}, SLIDING | {"is_causal": False}),
    "dflash, causal window and causal without": ("dflash", {}, SLIDING | {"is_causal": True}),
    "dflash, yarn": ("dflash", {}, {"rope_parameters": YARN}),
    "dflash, embedding scale": ("dflash", {"input_embedding_scale": 3.0}, {}),
    "dflash, capped logits": ("dflash", CAPPED, {}),
    "dflash2, causal windows": ("dflash2", {}, ALL_SLIDING),
    "dflash2, windows both ways": ("dflash2", {}, ALL_SLIDING | {"is_causal": False}),
    "dflash2, causal without window": ("dflash2", {}, {"is_causal": True}),
    "dflash2, yarn": ("dflash2", {}, {"rope_parameters": YARN}),
    "dflash2, embedding scale, capped logits": ("dflash2", CAPPED | {"input_embedding_scale": 3.0}, {}),
    "dflash2, wide kernels": ("dflash2", {"conv_kernel_size": 3, "conv_group_size": 64}, {}),
    "dflash2, one candidate": ("dflash2", {"selector_top_k": 1}, {}),
    "dflash2, every token a candidate": ("dflash2", {"selector_top_k": tiny.VOCAB}, {}),
}


@pytest.fixture(autouse=True)
def _host_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(official, "_cuda_time", time.perf_counter)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("settings")
    return scenes.make_scene(folder, scenes.write_target(folder / "target", "qwen3", scale=5.0))


@pytest.fixture(scope="module", params=RULES)
def long_blocks(scene: Scene, request: pytest.FixtureRequest) -> Trained:
    config = scenes.z_lab_config(scene.target, nested=RULES[request.param], block_size=16)
    return scenes.train(scene, config, steps=(50,))[50]


@pytest.mark.parametrize("name", SETTINGS)
def test_walks_equal_the_official_ones(scene: Scene, name: str) -> None:
    rule, nested, changes = SETTINGS[name]
    config = scenes.z_lab_config(scene.target, nested=RULES[rule] | nested, **changes)
    one = scenes.train(scene, config, steps=(25,))[25]
    walks = one.walks()
    assert walks == scenes.official_walks(one)
    assert max(length for walk in walks.values() for length in walk) > 2


@pytest.mark.parametrize("block_size", [1, 2, 3, 8, 16])
def test_blocks_of_all_lengths_up_to_the_trained_one(long_blocks: Trained, block_size: int) -> None:
    walks = long_blocks.walks(block_size=block_size)
    assert walks == scenes.official_walks(long_blocks, block_size=block_size)
    lengths = {length for walk in walks.values() for length in walk}
    assert max(lengths) == block_size, "whole blocks occur"
    if block_size == 1:
        assert lengths == {1}, "without a draft tau is 1"


def test_texts_end_inside_accepted_blocks(long_blocks: Trained) -> None:
    """At the stop token and at the limit, where the walk is cut."""
    scene = long_blocks.scene
    walks = long_blocks.walks()
    for reason in ("stop", "length"):
        ended = [transcript.id for transcript in scene.transcripts if transcript.stop_reason == reason]
        assert any(walks[name][-1] > 1 for name in ended), reason


def test_the_selector_has_a_say(scene: Scene) -> None:
    """It overrules the head in some rows, where the walk without it would be another: else nothing was compared."""
    one = scenes.train(scene, scenes.z_lab_config(scene.target, nested=SELECTOR), steps=(40,))[40]
    head = one.head
    assert isinstance(head, SelectorHead)
    without = Head(scene.tables.head_VD, one.drafter)
    rule = BlockRule(block_size=8, max_new_tokens=scenes.MAX_NEW_TOKENS, row_alignment="same_position")
    response = scene.transcripts[-1].response_ids
    context = one.drafter.read_context(one.features(len(scene.transcripts) - 1))
    (hidden_AKD,) = one.drafter.draft_hidden([context], [rule.anchors(scene.transcripts[-1], range(8))], 8)
    selected = [head.propose(rows, response[index]) for index, rows in enumerate(hidden_AKD[:, 1:])]
    best = [without.choose(Rows(rows)).tolist() for rows in hidden_AKD[:, 1:]]
    assert selected != best
