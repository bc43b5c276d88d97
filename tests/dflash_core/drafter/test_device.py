"""Where the drafter runs: what the config says, what there is, and what fits. Only the GPU's answers are faked."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from dflash_core.drafter import device as device_module
from dflash_core.drafter.device import free_bytes, place_drafter, plan_scoring
from dflash_core.drafter.footprint import USUAL, Footprint, Workload
from dflash_core.drafter.memory import plan_memory
from dflash_core.errors import DoesNotFit, InputError
from tests.support.drafter_specs import LARGE, SMALL_WORK, small_spec

GIB = 1 << 30
WORK = Workload(
    block_size=16,
    longest_tokens=4096,
    num_tokens=500 * 2048,
    num_transcripts=500,
    most_anchors=2047,
    stored_itemsize=2,
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


@pytest.mark.parametrize("configured", ["auto", "cpu"])
@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_it_computes_in_float32_on_the_cpu(configured: str) -> None:
    placement = place_drafter(configured, LARGE)
    assert (placement.device, placement.dtype) == ("cpu", "float32")
    assert placement.reason


@pytest.mark.usefixtures("no_gpu")
def test_a_gpu_that_was_asked_for_and_is_not_there_is_an_error() -> None:
    with pytest.raises(InputError, match="torch sees no CUDA device; set device: auto or cpu"):
        place_drafter("cuda", LARGE)


@pytest.mark.parametrize("configured", ["auto", "cuda"])
@pytest.mark.parametrize(("has_bf16", "dtype"), [(True, "bfloat16"), (False, "float32")])
def test_a_gpu_with_room_is_used_in_the_dtype_it_has(
    monkeypatch: pytest.MonkeyPatch, configured: str, has_bf16: bool, dtype: str
) -> None:
    fake_gpu(monkeypatch, free_gib=15.5, has_bf16=has_bf16)
    placement = place_drafter(configured, LARGE)
    assert (placement.device, placement.dtype) == ("cuda", dtype)
    assert "GPU X" in placement.reason


def test_a_gpu_is_left_alone_where_the_config_says_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpu(monkeypatch, free_gib=100)
    assert place_drafter("cpu", LARGE).device == "cpu"


def test_a_full_gpu_is_passed_over_or_an_error_with_the_numbers_of_each_part(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpu(monkeypatch, free_gib=4.0)
    placement = place_drafter("auto", LARGE)
    assert (placement.device, placement.dtype) == ("cpu", "float32")
    assert placement.reason.startswith("the GPU is too full: 6.2 GiB needed (weights 3.2 GiB, head 2.4 GiB")
    assert placement.reason.endswith("4.0 GiB free on GPU X")
    with pytest.raises(DoesNotFit) as error:
        place_drafter("cuda", LARGE)
    message = str(error.value)
    assert message.startswith("the drafter does not fit, even one block at a time: 6.2 GiB needed (weights 3.2 GiB")
    assert message.endswith("4.0 GiB free on GPU X; free the GPU, or set device: cpu")


def test_the_boundary_is_what_the_least_plan_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    footprint = Footprint(LARGE, WORK, itemsize=2, on_host=False)
    needed = plan_memory(footprint, 0, runtime_bytes=512 << 20).needed_bytes
    for spare, device in ((0, "cuda"), (-1, "cpu")):
        fake_gpu(monkeypatch, free_gib=1)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device, free=needed + spare: (free, free))
        assert place_drafter("auto", LARGE, WORK).device == device


def test_the_published_drafter_is_placed_on_a_gpu_with_14_5_gb_free(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpu(monkeypatch, free_gib=14.5e9 / GIB)
    placement = place_drafter("auto", LARGE, WORK)
    assert (placement.device, placement.dtype) == ("cuda", "bfloat16")
    assert placement.reason.startswith("7.4 GiB needed (weights 3.2 GiB, head 2.4 GiB, context 640 MiB, ")


def test_a_longer_text_can_be_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    long = dataclasses.replace(WORK, longest_tokens=200_000, num_tokens=10**7)
    fake_gpu(monkeypatch, free_gib=8)
    assert place_drafter("auto", LARGE, WORK).device == "cuda"
    assert "context 3.8 GiB" in place_drafter("auto", LARGE, long).reason
    assert place_drafter("auto", LARGE, long).device == "cpu"


def test_what_torch_holds_without_using_it_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a drafter was scored its memory stays with torch, and the driver calls it taken."""
    fake_gpu(monkeypatch, free_gib=4.0)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _device: 9 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _device: 1 * GIB)
    assert free_bytes(torch.device("cuda", 0)) == 12 * GIB
    assert place_drafter("cuda", LARGE, WORK).device == "cuda"


class TestPlanOfARun:
    def test_a_gpu_that_has_filled_up_since_is_an_error_with_the_numbers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fake_gpu(monkeypatch, free_gib=2.0)
        with pytest.raises(DoesNotFit, match=r"even one block at a time: 6\.\d GiB needed .* 2\.0 GiB free on GPU X"):
            plan_scoring(torch.device("cuda", 0), torch.bfloat16, LARGE, WORK)

    def test_a_gpu_with_little_room_gets_smaller_slices(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fake_gpu(monkeypatch, free_gib=6.6)
        plan = plan_scoring(torch.device("cuda", 0), torch.bfloat16, LARGE, WORK)
        assert plan.needed_bytes <= 6.6 * GIB
        assert plan.slicing.num_anchors < USUAL.num_anchors

    def test_the_cpus_free_memory_is_the_hosts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(device_module, "own_free_bytes", lambda: 10 * GIB)
        with pytest.raises(DoesNotFit) as error:
            plan_scoring(torch.device("cpu"), torch.float32, LARGE, WORK)
        assert "weights 6.4 GiB, head 4.7 GiB" in str(error.value)
        assert str(error.value).endswith("10.0 GiB free on this machine; free memory, or take a machine with more")
        for free in (None, 30 * GIB):
            monkeypatch.setattr(device_module, "own_free_bytes", lambda free=free: free)
            assert plan_scoring(torch.device("cpu"), torch.float32, LARGE, WORK).slicing == USUAL

    def test_it_is_asked_of_this_machine(self) -> None:
        plan = plan_scoring(torch.device("cpu"), torch.float32, small_spec(), SMALL_WORK)
        assert plan.free_bytes is None or plan.free_bytes > plan.needed_bytes
        assert plan.slicing == USUAL
