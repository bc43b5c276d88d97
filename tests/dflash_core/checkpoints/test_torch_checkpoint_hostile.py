"""What is in a file of torch.save is never run, and what is wrong in it is refused."""

from __future__ import annotations

import contextlib
import os
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from dflash_core.checkpoints import inspect_checkpoint
from dflash_core.checkpoints.inert_pickle import read_inert
from dflash_core.errors import CheckpointCorrupt, UnsupportedCheckpoint
from tests.dflash_core.checkpoints.checkpoint_files import (
    drafter_tensors,
    training_args,
)
from tests.support.torch_files import Evil, assert_same, refusal, saved, streamed


def test_an_evil_pickle_runs_nothing_and_still_yields_its_tensors(tmp_path: Path) -> None:
    tensors = drafter_tensors()
    marker = tmp_path / "evil_was_here"
    content = {"model": tensors, "trap": Evil(marker), "args": training_args(trap=Evil(marker)), "step": 4}
    url = saved(tmp_path / "c.pt", content)
    found = inspect_checkpoint(url)
    assert found.odd_globals == ("posix.system",)
    assert_same(streamed(url, tmp_path), tensors)
    assert not marker.exists()


def test_an_evil_value_among_the_weights_is_refused_and_not_run(tmp_path: Path) -> None:
    marker = tmp_path / "evil_was_here"
    message = refusal({"model": {**drafter_tensors(), "trap": Evil(marker)}}, tmp_path / "c.pt")
    assert "'trap'" in message
    assert not marker.exists()


HOSTILE = {
    "reduce": b"cos\nsystem\n(X\x0a\x00\x00\x00touch evil!tR.",
    "inst": b"(X\x0a\x00\x00\x00touch evil!ios\nsystem\n.",
    "obj": b"(cos\nsystem\nX\x0a\x00\x00\x00touch evil!o.",
    "stack_global": b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x0atouch evil!\x85R.",
    "newobj": b"\x80\x02cos\nsystem\nX\x0a\x00\x00\x00touch evil!\x85\x81.",
    "getattr_chain": b"cbuiltins\ngetattr\n(cbuiltins\n__import__\n(X\x02\x00\x00\x00ostR"
    b"X\x06\x00\x00\x00systemtR(X\x0a\x00\x00\x00touch evil!tR.",
    "build_on_a_function": b"\x80\x02cos\nsystem\n}X\x08\x00\x00\x00__code__K\x01sb.",
    "extension_code": b"\x80\x02\x82\x01.",
    "memo_bomb": b"\x80\x02Nr\xff\xff\xff\x7f.",
    "huge_bytearray": b"\x80\x05\x96\x00\x00\x00\x00\x00\x01\x00\x00.",
    "huge_frame": b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7fN.",
    "appends_to_a_name": b"cos\nsystem\n(K\x01e.",
    "cut_off": b"\x80\x02}q\x00(X\x05\x00",
    "nothing": b"",
    "deep": b"(" * 1000 + b"l" * 1000 + b".",
}


@pytest.mark.parametrize("program", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_pickle_does_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: bytes) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("system", "remove"):
        monkeypatch.setattr(os, name, lambda *_: pytest.fail("something in the pickle was run"))
    with contextlib.suppress(CheckpointCorrupt, UnsupportedCheckpoint):
        read_inert(program, where="hostile.pt")
    assert list(tmp_path.iterdir()) == []


def test_laughs_by_the_billion_stay_small() -> None:
    laughs: Any = ["ha"] * 10
    for _ in range(60):
        laughs = [laughs] * 10
    held = read_inert(pickle.dumps({"args": {"laughs": laughs}, "step": 1}), where="laughs.pt")
    assert held.root["step"] == 1


def test_a_pickle_that_copies_without_end_is_refused() -> None:
    pairs = pickle.dumps([(str(i), i) for i in range(20_000)], protocol=2).removesuffix(b".") + b"r\0\0\1\0"
    again = b"ccollections\nOrderedDict\nj\0\0\1\0\x85R0"
    with pytest.raises(UnsupportedCheckpoint, match="copies more than"):
        read_inert(pairs + again * 10_000 + b".", where="copies.pt")


def test_a_tensor_outside_its_storage_is_corrupt(tmp_path: Path) -> None:
    path = tmp_path / "c.pt"
    torch.save(drafter_tensors(), path)
    rebuilt = tmp_path / "outside.pt"
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(rebuilt, "w") as changed:
        for info in archive.infolist():
            data = archive.read(info)
            if info.filename.endswith("data.pkl"):
                # fc.weight is 32 x 96: BININT1 32, BININT1 96 become 255 x 96.
                data = data.replace(b"K\x20K\x60\x86", b"K\xffK\x60\x86")
            changed.writestr(info.filename, data)
    with pytest.raises(CheckpointCorrupt, match=r"'fc\.weight'.*outside its storage"):
        inspect_checkpoint(str(rebuilt))


def test_containers_and_numbers_of_other_libraries_are_read_as_plain_values() -> None:
    content = {"o": OrderedDict(a=1), "n": numpy.int32(-5), "f": numpy.float64(0.25), "b": numpy.bool_(True)}
    for protocol in (2, 4):
        held = read_inert(pickle.dumps(content, protocol=protocol), where="plain.pt")
        assert held.root == {"o": {"a": 1}, "n": -5, "f": 0.25, "b": True}
