"""DFlash and DFlash2 walks against PyPI `dflash` 0.1.0, block by block in fp32, over tiny targets of every family."""

from __future__ import annotations

import time
from typing import Any

import dflash.model as official
import pytest
import torch

from tests.support import official as scenes
from tests.support.official import SELECTOR, Scene, Trained

FAMILIES = ("llama", "qwen3", "qwen3 moe", "qwen3.5", "gemma3", "gemma4", "gpt-oss")
RULES: dict[str, dict[str, Any]] = {"dflash": {}, "dflash2": SELECTOR}
STEPS = (30,)


@pytest.fixture(autouse=True)
def _host_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(official, "_cuda_time", time.perf_counter)


@pytest.fixture(scope="module", params=FAMILIES)
def scene(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Scene:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp(request.param.replace(" ", "-"))
    scale = 8.0 if request.param == "llama" else 5.0
    return scenes.make_scene(folder, scenes.write_target(folder / "target", request.param, scale=scale))


@pytest.fixture(scope="module", params=RULES)
def trained(scene: Scene, request: pytest.FixtureRequest) -> dict[int, Trained]:
    """Sliding windows are shorter than the context, causal; the bare embedding is used, as the official loop does."""
    nested = RULES[request.param] | {"input_embedding_scale": 1.0}
    sliding = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 12, "use_sliding_window": True}
    return scenes.train(scene, scenes.z_lab_config(scene.target, nested=nested, **sliding), steps=STEPS)


def test_walks_equal_the_official_ones(trained: dict[int, Trained]) -> None:
    lengths: set[int] = set()
    for one in trained.values():
        walks = one.walks()
        assert walks == scenes.official_walks(one)
        lengths |= {length for walk in walks.values() for length in walk}
    assert min(lengths) == 1
    assert max(lengths) >= 5, "from nothing to most of a block"
    assert len(lengths) >= 3


def test_drafting_at_every_anchor_gives_the_same_walk(trained: dict[int, Trained]) -> None:
    one = trained[STEPS[-1]]
    assert one.walks(anchors="all") == one.walks()
