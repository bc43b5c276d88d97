"""That there is no CUDA device is told without torch only where torch would tell the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
_ASK = """
import ctypes, json, sys
from pathlib import Path
from dflash_core.drafter import cuda_presence
driver, root, loaded = sys.argv[1:]
if driver != "as it is":
    def load(name):
        assert name == "libcuda.so.1", name
        if driver == "no":
            raise OSError("no such library")
    ctypes.CDLL = load
if loaded == "loaded":
    import torch
may = cuda_presence.may_have_cuda(Path(root))
print(json.dumps([may, "torch" in sys.modules]))
"""


def ask(driver: str, root: Path, *, torch_at: Path | None = None, loaded: bool = False) -> bool:
    """Ask in a process of its own whether there may be a device; torch must not have been loaded for it."""
    path = os.pathsep.join(str(place) for place in (torch_at, ROOT) if place is not None)
    arguments = [driver, str(root), "loaded" if loaded else ""]
    done = subprocess.run(
        [sys.executable, "-c", _ASK, *arguments],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    may, is_loaded = json.loads(done.stdout)
    assert is_loaded == loaded
    return bool(may)


def a_torch(folder: Path, text: str | None) -> Path:
    """Write a torch that says what it was built for and cannot be imported."""
    (folder / "torch").mkdir(parents=True)
    (folder / "torch" / "__init__.py").write_text("raise SystemExit('imported')")
    if text is not None:
        (folder / "torch" / "version.py").write_text(text)
    return folder


VERSION = "__version__ = '2.13.0'\ncuda: Optional[str] = {}\nhip: Optional[str] = {}\n"


@pytest.mark.parametrize(
    ("version", "driver", "files", "expected"),
    [
        (VERSION.format(None, None), "yes", ["dev/nvidia0"], False),
        (VERSION.format("'13.0'", None), "no", [], False),
        (VERSION.format("'13.0'", None), "yes", [], True),
        (VERSION.format("'13.0'", None), "no", ["dev/nvidiactl"], True),
        (VERSION.format("'13.0'", None), "no", ["dev/dxg"], True),
        (VERSION.format("'13.0'", None), "no", ["proc/driver/nvidia/version"], True),
        (VERSION.format("None", "'7.0'"), "no", [], True),
        ("__version__ = '2.13.0'\ncuda = None\n", "no", [], True),
        ("cuda = None\nhip = None\n", "no", [], False),
        (None, "no", [], True),
    ],
    ids=[
        "built for the CPU",
        "built for CUDA, no driver",
        "a driver",
        "a device file",
        "a device file of WSL",
        "a kernel module",
        "built for ROCm",
        "it does not say",
        "it says it without types",
        "no version file",
    ],
)
def test_no_is_said_only_where_torch_cannot_have_a_device(
    tmp_path: Path, version: str | None, driver: str, files: list[str], expected: bool
) -> None:
    root = tmp_path / "root"
    for name in files:
        (root / name).parent.mkdir(parents=True)
        (root / name).write_text("")
    assert ask(driver, root, torch_at=a_torch(tmp_path / "packages", version)) is expected


def test_a_torch_that_is_loaded_is_asked_itself(tmp_path: Path) -> None:
    assert ask("as it is", tmp_path, loaded=True)


def test_it_agrees_with_the_torch_of_this_machine() -> None:
    import torch

    if torch.cuda.is_available():
        assert ask("as it is", Path("/"))
    elif torch.version.cuda is None and torch.version.hip is None:
        assert not ask("as it is", Path("/"))
