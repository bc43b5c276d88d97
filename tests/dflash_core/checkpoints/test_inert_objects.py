"""What a trainer pickles beside its weights: its values are facts, read without any of its classes."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import enum
import functools
import os
import pathlib
import pickle
import random
import sys
import types
from typing import Any

import numpy
import pytest
import torch

from dflash_core.checkpoints.facts import MAX_DEPTH, MAX_FACTS, collect_facts, odd_names
from dflash_core.checkpoints.inert_pickle import read_inert
from tests.support.inert_reading import PROTOCOLS, facts_of, read


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
