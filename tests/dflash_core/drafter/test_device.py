"""Where the drafter runs: what the config says, what there is, and what fits. Only the GPU's answers are faked."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from dflash_core.drafter.device import drafter_bytes, place_drafter
from dflash_core.drafter.spec import DrafterSpec
from dflash_core.errors import DoesNotFit, InputError

GIB = 1 << 30
# The published drafter of a 27 B target.
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


def fake_gpu(monkeypatch: pytest.MonkeyPatch, *, free_gib: float, has_bf16: bool = True) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: has_bf16)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (int(free_gib * GIB), 16 * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "GPU X")


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_the_memory_of_the_published_drafter_is_counted() -> None:
    """1.73 B weights and a head of 1.27 B in bf16 are 5.6 GiB; a fifth and one GiB are added."""
    parameters = 1_730_213_120 + 248320 * 5120
    assert drafter_bytes(LARGE, torch.bfloat16) == int(parameters * 2 * 1.2) + GIB
    assert drafter_bytes(LARGE, torch.float32) == int(parameters * 4 * 1.2) + GIB


@pytest.mark.parametrize("configured", ["auto", "cpu"])
@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_it_computes_in_float32_on_the_cpu(configured: str) -> None:
    placement = place_drafter(configured, LARGE)
    assert (placement.device.type, placement.dtype) == ("cpu", torch.float32)
    assert placement.reason


@pytest.mark.usefixtures("no_gpu")
def test_a_gpu_that_was_asked_for_and_is_not_there_is_an_error() -> None:
    with pytest.raises(InputError, match="torch sees no CUDA device; set device: auto or cpu"):
        place_drafter("cuda", LARGE)


@pytest.mark.parametrize("configured", ["auto", "cuda"])
@pytest.mark.parametrize(("has_bf16", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_a_gpu_with_room_is_used_in_the_dtype_it_has(
    monkeypatch: pytest.MonkeyPatch, configured: str, has_bf16: bool, dtype: torch.dtype
) -> None:
    fake_gpu(monkeypatch, free_gib=15.5, has_bf16=has_bf16)
    placement = place_drafter(configured, LARGE)
    assert (placement.device, placement.dtype) == (torch.device("cuda", 0), dtype)
    assert "GPU X" in placement.reason


def test_a_gpu_is_left_alone_where_the_config_says_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpu(monkeypatch, free_gib=100)
    assert place_drafter("cpu", LARGE).device.type == "cpu"


def test_a_full_gpu_is_passed_over_or_an_error_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpu(monkeypatch, free_gib=4.0)
    placement = place_drafter("auto", LARGE)
    assert (placement.device.type, placement.dtype) == ("cpu", torch.float32)
    assert "4.0 GiB free on GPU X" in placement.reason
    with pytest.raises(DoesNotFit, match=r"7\.7 GiB needed, 4\.0 GiB free on GPU X"):
        place_drafter("cuda", LARGE)


def test_the_boundary_is_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = drafter_bytes(LARGE, torch.bfloat16)
    for spare, device in ((0, "cuda"), (-1, "cpu")):
        fake_gpu(monkeypatch, free_gib=1)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device, free=needed + spare: (free, free))
        assert place_drafter("auto", LARGE).device.type == device


def test_a_smaller_drafter_needs_less() -> None:
    small = dataclasses.replace(LARGE, num_layers=1, is_causal=(True,), windows=(None,))
    assert drafter_bytes(small, torch.float32) < drafter_bytes(LARGE, torch.float32)
