"""A pickle read without running it: tensors, objects of torch, bounds, and hostile programs."""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch
import torch.distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from dflash_core.checkpoints.facts import collect_facts, odd_names
from dflash_core.checkpoints.inert_pickle import MAX_NAMES, read_inert, read_inert_from
from dflash_core.checkpoints.pickle_values import GlobalName, Inert, RefusedTensor, TensorRef
from dflash_core.errors import CheckpointCorrupt, UnsupportedCheckpoint
from tests.dflash_core.checkpoints.hostile_pickles import CALLS
from tests.support.inert_reading import PROTOCOLS, read, read_saved

# Tensors and torch's own objects.


class Marked(torch.Tensor):
    pass


def test_parameters_and_buffers_are_tensors() -> None:
    tied = torch.nn.Parameter(torch.randn(4, 3))
    tied.ds_id = 5  # type: ignore[attr-defined]
    content = {
        "parameter": torch.nn.Parameter(torch.randn(4, 3), requires_grad=False),
        "buffer": torch.nn.Buffer(torch.randn(3)),
        "with_attributes": tied,
        "transposed": torch.randn(3, 4).t(),
        "small": torch.zeros(3, dtype=torch.uint16),
        "generator": torch.Generator().get_state(),
    }
    for protocol in (2, 3, 4, 5):
        root = read_saved(content, pickle_protocol=protocol).root
        assert {type(value) for value in root.values()} == {TensorRef}
        for name, tensor in content.items():
            assert (root[name].shape, root[name].strides) == (tensor.shape, tensor.stride())
            assert root[name].element.name == str(tensor.dtype).removeprefix("torch.")


@pytest.mark.filterwarnings("ignore")
def test_other_tensors_are_refused_with_a_reason() -> None:
    content = {
        "quantized": torch.quantize_per_tensor(torch.randn(3), 0.1, 0, torch.qint8),
        "channels": torch.quantize_per_channel(torch.randn(3, 3), torch.ones(3), torch.zeros(3), 0, torch.qint8),
        "sparse": torch.eye(3).to_sparse(),
        "csr": torch.eye(3).to_sparse_csr(),
        "nested": torch.nested.nested_tensor([torch.randn(2), torch.randn(3)]),
        "jagged": torch.nested.nested_tensor([torch.randn(2), torch.randn(3)], layout=torch.jagged),
        "meta": torch.empty(3, device="meta"),
        "marked": torch.randn(3).as_subclass(Marked),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "wide": torch.randn(3, dtype=torch.complex128),
        "tiny": torch.zeros(3, dtype=torch.float4_e2m1fn_x2),
    }
    reasons = {
        "quantized": "built by torch._utils._rebuild_qtensor",
        "channels": "built by torch._utils._rebuild_qtensor",
        "sparse": "built by torch._utils._rebuild_sparse_tensor",
        "csr": "built by torch._utils._rebuild_sparse_tensor",
        "nested": "built by torch._utils._rebuild_nested_tensor",
        "jagged": "of class torch.nested._internal.nested_tensor.NestedTensor",
        "meta": "built by torch._utils._rebuild_meta_tensor_no_storage",
        "marked": f"of class {__name__}.Marked",
        "conjugate": "with metadata ['conj']",
        "wide": "in a torch.ComplexDoubleStorage",
        "tiny": "of type torch.float4_e2m1fn_x2",
    }
    for protocol in (2, 4):
        root = read_saved(content, pickle_protocol=protocol).root
        assert root == {name: RefusedTensor(reason) for name, reason in reasons.items()}


def test_pickle_protocol_0_names_its_storages_in_no_way_that_is_read() -> None:
    root = read_saved({"w": torch.randn(3)}, pickle_protocol=0).root
    assert isinstance(root["w"], RefusedTensor)
    assert "pickle protocol 0" in root["w"].reason


def test_a_distributed_tensor_is_refused_with_a_reason(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        tensor = distribute_tensor(torch.randn(4, 4), mesh, [Shard(0)])
        held = read_saved({"w": tensor, "p": torch.nn.Parameter(tensor), "step": 1})
    finally:
        torch.distributed.destroy_process_group()
    refused = RefusedTensor("of class torch.distributed.tensor.DTensor")
    assert held.root == {"w": refused, "p": refused, "step": 1}


def test_dtypes_devices_and_sizes_are_plain() -> None:
    held = read_saved({"dtype": torch.bfloat16, "device": torch.device("cuda", 1), "size": torch.Size([1, 2])})
    assert held.root["dtype"] == GlobalName("torch", "bfloat16")
    assert held.root["size"] == (1, 2)
    assert isinstance(held.root["device"], Inert)
    assert held.root["device"].args == ("cuda", 1)
    assert odd_names(held.global_names) == ()


def test_text_of_python_2_is_read() -> None:
    assert read_inert(b"\x80\x02}U\x03keyU\x02\xc3\xa9s.", where="test.pt").root == {"key": "é"}
    assert read_inert(b"\x80\x02U\x01\xff.", where="test.pt").root == "\udcff"


def test_text_that_cannot_be_printed_names_nothing() -> None:
    content = {"good": "é😀", "half": "\ud800", "list": ["a", "\udfff"], "\ud83d": 1}
    for protocol in (0, 2, 4):
        root = read(content, protocol).root
        assert collect_facts(root) == {"good": "é😀"}
        assert [str(key) for key in root] == ["good", "half", "list", "<a key>"]


# Bounds.


def test_too_many_names_are_refused() -> None:
    names = b"".join(b"cm\nn%d\n0" % i for i in range(MAX_NAMES + 2))
    with pytest.raises(UnsupportedCheckpoint):
        read_inert(names + b"N.", where="test.pt")


def test_one_pickle_after_another_is_read_from_a_stream() -> None:
    values = [{"a": [1, 2]}, 7, "text" * 100_000, numpy.float64(0.5)]
    for protocol in PROTOCOLS:
        stream = io.BytesIO(b"".join(pickle.dumps(value, protocol=protocol) for value in values) + b"rest")
        assert [read_inert_from(stream, where="test.pt").root for _ in values] == values
        assert stream.read() == b"rest"


def test_a_frame_that_goes_on_behind_its_pickle_is_corrupt() -> None:
    frame = b"N.N."
    stream = io.BytesIO(b"\x80\x04\x95" + len(frame).to_bytes(8, "little") + frame)
    with pytest.raises(CheckpointCorrupt, match="goes on"):
        read_inert_from(stream, where="test.pt")


# What is hostile: each program is run in a process that watches what Python does.


@pytest.mark.slow
def test_nothing_hostile_runs_anything_or_takes_long_or_much() -> None:
    report = run_watched("inert")
    assert len(report) > 80
    for name, (outcome, events, seconds) in report.items():
        assert events == [], (name, events)
        assert outcome in ("read", "CheckpointCorrupt", "UnsupportedCheckpoint", "NoDrafter"), (name, outcome)
        assert seconds < 20, (name, seconds)
    # Those that must be whole pickles, for otherwise they show nothing.
    whole = [name for name in report if name in CALLS or name.startswith(("laugh", "deep", "copied"))]
    assert len(whole) > 20
    assert [name for name in whole if report[name][0] == "CheckpointCorrupt"] == []


def test_the_watch_sees_what_the_real_unpickler_runs() -> None:
    report = run_watched("pickle")
    first = {
        name: next(event for event in events if event != "pickle.find_class") for name, (_, events, _) in report.items()
    }
    assert first.keys() == set(CALLS)
    assert first.pop("import") in ("import", "open", "os.listdir")
    assert first == {
        **dict.fromkeys(("reduce", "inst", "obj", "stack_global", "getattr_chain"), "os.system"),
        **{"eval": "compile", "exec": "compile", "open": "open"},
    }


def run_watched(how: str) -> dict[str, tuple[str, list[str], float]]:
    """Read all hostile programs in a process with limits, and return (outcome, events, seconds) of each."""
    script = Path(__file__).with_name("hostile_pickles.py")
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, str(script), how],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    report: dict[str, tuple[str, list[str], float]] = {}
    for line in done.stdout.splitlines():
        name, outcome, seconds, *events = line.split("\t")
        report[name] = (outcome, events, float(seconds))
    return report
