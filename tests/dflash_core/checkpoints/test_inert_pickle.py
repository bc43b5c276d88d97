"""What a trainer pickles beside its weights, read without any of its classes."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import enum
import functools
import io
import os
import pathlib
import pickle
import random
import subprocess
import sys
import types
import zipfile
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from dflash_core.checkpoints.facts import MAX_DEPTH, MAX_FACTS, collect_facts, odd_names
from dflash_core.checkpoints.inert_pickle import MAX_NAMES, InertPickle, read_inert, read_inert_from
from dflash_core.checkpoints.pickle_values import GlobalName, Inert, RefusedTensor, TensorRef
from dflash_core.errors import CheckpointCorrupt, UnsupportedCheckpoint
from tests.dflash_core.checkpoints.hostile_pickles import CALLS

PROTOCOLS = range(6)


class Mode(enum.Enum):
    TRAIN = "train"
    LEVEL = 3


class Level(enum.IntEnum):
    HIGH = 7


class Dialect(str, enum.Enum):  # noqa: UP042 (as older trainers write it)
    NEW = "new"


class Switch(enum.StrEnum):
    ON = "on"


class Parts(enum.Flag):
    HEAD = 1
    TAIL = 2


@dataclasses.dataclass
class Settings:
    block_size: int = 8
    name: str = "drafter"
    level: Level = Level.HIGH
    inner: Any = None

    class Nested(enum.Enum):
        VALUE = "nested"


def read(value: Any, protocol: int = 2) -> InertPickle:
    return read_inert(pickle.dumps(value, protocol=protocol), where="test.pt")


def facts_of(value: Any, protocol: int = 2) -> dict[str, Any]:
    return collect_facts(read(value, protocol).root)


def read_saved(value: Any, **options: Any) -> InertPickle:
    """Read the pickle that torch.save writes."""
    content = io.BytesIO()
    torch.save(value, content, **options)
    with zipfile.ZipFile(content) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("data.pkl"))
        return read_inert(archive.read(name), where="test.pt")


# Objects of trainers.


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_values_of_arguments_are_facts(protocol: int) -> None:
    args = argparse.Namespace(
        block_size=8,
        layers=[1, 14, 27],
        path=pathlib.PosixPath("/data/a"),
        seed=numpy.int64(7),
        rate=numpy.float32(0.5),
        flag=numpy.bool_(True),
        swapped=numpy.dtype(">i4").type(-5),
        mode=Mode.TRAIN,
        level=Level.HIGH,
        dialect=Dialect.NEW,
        switch=Switch.ON,
        parts=Parts.HEAD | Parts.TAIL,
        modes=[Mode.TRAIN, Mode.LEVEL],
        nested=Settings.Nested.VALUE,
        settings=Settings(inner=Settings(name="inner")),
        device=torch.device("cpu"),
        counts=collections.Counter("aab"),
        by_name=collections.defaultdict(list, {"a": [1]}),
        ordered=collections.OrderedDict(b=2),
        nothing=None,
        step=types.SimpleNamespace(now=3),
    )
    assert facts_of({"args": args}, protocol) == {
        "args.block_size": 8,
        "args.layers": [1, 14, 27],
        "args.path": "/data/a",
        "args.seed": 7,
        "args.rate": 0.5,
        "args.flag": True,
        "args.swapped": -5,
        "args.mode": "train",
        "args.level": 7,
        "args.dialect": "new",
        "args.switch": "on",
        "args.parts": 3,
        "args.modes": ["train", 3],
        "args.nested": "nested",
        "args.settings.block_size": 8,
        "args.settings.name": "drafter",
        "args.settings.level": 7,
        "args.settings.inner.block_size": 8,
        "args.settings.inner.name": "inner",
        "args.settings.inner.level": 7,
        "args.device": "cpu",
        "args.counts.a": 2,
        "args.counts.b": 1,
        "args.by_name.a": [1],
        "args.ordered.b": 2,
        "args.step.now": 3,
    }


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_everything_else_of_python_is_read_past(protocol: int) -> None:
    content = {
        "partial": functools.partial(print, 1, end=""),
        "deque": collections.deque([1, 2], maxlen=3),
        "sets": [{1, (2, 3), "a"}, frozenset({1, (2,)}), set(), frozenset()],
        "bytes": [b"", b"abc", b"\xff" * 300, bytearray(b"abc"), bytearray(300)],
        "numbers": [1 << 100, -(1 << 100), 1j, float("inf"), True, None, ...],
        "ranges": [range(3), slice(1, 2)],
        "times": [datetime.timedelta(1), datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)],
        "keys": {(1, 2): 3, 1 << 90: 4, None: 5, 1.5: 6, b"k": 7, True: 8, Mode.TRAIN: 9, int: 10},
        "arrays": [numpy.arange(9), numpy.array(5), numpy.zeros((2, 2), order="F"), numpy.array(["a", None])],
        "scalars": [numpy.complex64(1j), numpy.str_("hey"), numpy.datetime64("2020-01-01")],
        "random": [random.getstate(), numpy.random.get_state(), numpy.random.default_rng(0)],
        "names": [int, print, os.path.join, Settings],
        "step": 3,
    }
    assert facts_of(content, protocol) == {"step": 3}


NO_SUCH_TRAINER = """
import dataclasses, enum
class Kind(enum.Enum):
    A = "a"
@dataclasses.dataclass
class Config:
    lr: float = 0.5
    kind: Kind = Kind.A
class Slotted:
    __slots__ = ("width",)
    def __init__(self):
        self.width = 4
class Listy(list):
    pass
class Dicty(dict):
    pass
"""


def test_a_class_of_a_module_that_is_not_installed_is_read_by_its_state() -> None:
    module = types.ModuleType("no_such_trainer")
    sys.modules[module.__name__] = module
    try:
        exec(NO_SUCH_TRAINER, module.__dict__)
        listy, dicty = module.Listy([1, 2]), module.Dicty(a=1)
        listy.note, dicty.note = "l", "d"
        content = {"config": module.Config(), "slotted": module.Slotted(), "listy": listy, "dicty": dicty}
        data = pickle.dumps(content, protocol=4)
    finally:
        del sys.modules[module.__name__]
    with pytest.raises(ModuleNotFoundError):
        pickle.loads(data)
    held = read_inert(data, where="test.pt")
    assert collect_facts(held.root) == {
        "config.lr": 0.5,
        "config.kind": "a",
        "slotted.width": 4,
        "listy.note": "l",
        "dicty.a": 1,
        "dicty.note": "d",
    }
    assert "no_such_trainer.Config" in odd_names(held.global_names)
    assert "no_such_trainer" not in sys.modules


@pytest.fixture
def omegaconf(monkeypatch: pytest.MonkeyPatch) -> dict[str, type]:
    """Classes that pickle as those of OmegaConf do, for as long as the test runs."""
    modules: dict[str, tuple[str, ...]] = {
        "omegaconf": (),
        "omegaconf.base": ("ContainerMetadata", "Metadata"),
        "omegaconf.dictconfig": ("DictConfig",),
        "omegaconf.listconfig": ("ListConfig",),
        "omegaconf.nodes": ("AnyNode", "IntegerNode", "EnumNode", "PathNode"),
    }
    made: dict[str, type] = {}
    for name, classes in modules.items():
        module = types.ModuleType(name)
        monkeypatch.setitem(sys.modules, name, module)
        for each in classes:
            made[each] = type(each, (), {"__module__": name})
            setattr(module, each, made[each])
    return made


def config_node(classes: dict[str, type], value: Any, parent: Any = None, kind: str = "AnyNode") -> Any:
    """Return a value as OmegaConf 2.4 holds it: `_metadata`, `_parent` and `_content` or `_val`."""
    is_container = isinstance(value, dict | list)
    if is_container:
        kind = "DictConfig" if isinstance(value, dict) else "ListConfig"
    node = classes[kind]()
    metadata = classes["ContainerMetadata" if is_container else "Metadata"]()
    metadata.__dict__.update(ref_type=Any, object_type=dict, optional=True, key=None, flags={})
    metadata.__dict__.update(resolver_cache=collections.defaultdict(dict))
    content: Any = value
    if isinstance(value, dict):
        content = {key: config_node(classes, inner, node) for key, inner in value.items()}
    elif isinstance(value, list):
        content = [config_node(classes, inner, node) for inner in value]
    node.__dict__.update(_metadata=metadata, _parent=parent)
    node.__dict__["_content" if is_container else "_val"] = content
    return node


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_config_of_omegaconf_gives_its_values_dotted(omegaconf: dict[str, type], protocol: int) -> None:
    values = {
        "model": {"block_size": 8, "draft": {"layers": [1, 2], "name": "${name}"}},
        "name": "run",
        "mode": Mode.TRAIN,
        "lr": 1e-3,
        "nothing": None,
    }
    held = read({"config": config_node(omegaconf, values), "step": 4}, protocol)
    assert collect_facts(held.root) == {
        "config.model.block_size": 8,
        "config.model.draft.layers": [1, 2],
        "config.model.draft.name": "${name}",
        "config.name": "run",
        "config.mode": "train",
        "config.lr": 1e-3,
        "step": 4,
    }
    assert odd_names(held.global_names) == (f"{__name__}.Mode",)


def test_a_call_of_a_function_is_no_fact() -> None:
    class Call:
        def __reduce__(self) -> Any:
            return os.system, ("touch evil",)

    assert facts_of({"trap": Call(), "args": argparse.Namespace(trap=Call()), "step": 1}) == {"step": 1}


def test_state_of_the_training_is_no_fact() -> None:
    content = {"optimizer": {"lr": 1}, "lr_scheduler": {"step": 2}, "rng_state": {"pos": 3}, "scaler": {"scale": 4}}
    assert facts_of({**content, "epoch": 5}) == {"epoch": 5}


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


def test_facts_of_what_holds_itself_end() -> None:
    loop = argparse.Namespace(name="loop")
    loop.self, loop.list = loop, [loop]
    assert facts_of({"args": loop, "step": 1}) == {"args.name": "loop", "step": 1}


def test_facts_end_at_a_depth() -> None:
    nested: Any = {"x": 1}
    for _ in range(30):
        nested = {"in": nested, "x": 1}
    assert list(facts_of(nested)) == ["in." * depth + "x" for depth in reversed(range(MAX_DEPTH))]


def test_facts_are_limited_in_number_and_length() -> None:
    many = {str(i): i for i in range(3 * MAX_FACTS)}
    assert len(facts_of({"args": many})) == MAX_FACTS
    long = {f"k{i}": ["x" * 4000] * 1000 for i in range(50)}
    assert sum(len(text) for value in facts_of(long).values() for text in value) <= 1 << 20


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
