"""What tests put into a store, look for in it, and let another process do with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dflash_core.store import MANIFEST_NAME, Artifact
from tests.support.store_places import REMOTE, StorePlace

ROOT = Path(__file__).parents[2]
SHARED_BY_PROCESSES = ("local", "sshd", "asyncssh", "s3")
BIG = 3_000_000
remote_only = pytest.mark.parametrize("place", REMOTE, indirect=True)
between_processes = pytest.mark.parametrize("place", SHARED_BY_PROCESSES, indirect=True)


def write_two(folder: Path) -> dict[str, Any]:
    (folder / "a.bin").write_bytes(b"a" * 100_000)
    (folder / "sub").mkdir()
    (folder / "sub" / "empty.txt").write_bytes(b"")
    (folder / "sub" / "b.txt").write_text("b")
    return {"count": 2}


def write_other(folder: Path) -> dict[str, Any]:
    write_two(folder)
    (folder / "a.bin").write_bytes(b"c" * 100_000)
    (folder / "sub" / "b.txt").write_text("d")
    return {"count": 3}


def must_not_run(folder: Path) -> dict[str, Any]:
    raise AssertionError(f"built again in {folder}")


def contents(artifact: Artifact | None) -> dict[str, bytes]:
    assert artifact is not None
    files = {path.relative_to(artifact.path).as_posix(): path for path in artifact.path.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in files.items() if name != MANIFEST_NAME}


OTHER = {"a.bin": b"c" * 100_000, "sub/b.txt": b"d", "sub/empty.txt": b""}
TWO = {"a.bin": b"a" * 100_000, "sub/b.txt": b"b", "sub/empty.txt": b""}


def worker(place: StorePlace, mirror: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.support.store_worker", place.url, place.hosts_json(), str(mirror), *arguments],
        cwd=ROOT,
        env=os.environ | dict(place.environment) | {"HOME": str(mirror)} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


def left_of_uploads(place: StorePlace) -> list[str]:
    """Return files that no manifest of the store tells of."""
    files = place.files()
    known = set()
    for path, data in files.items():
        if path.endswith(f"/{MANIFEST_NAME}"):
            manifest = json.loads(data)
            prefix = "/".join(part for part in (path.rpartition("/")[0], manifest.get("folder", "")) if part)
            known |= {path} | {f"{prefix}/{entry['name']}" for entry in manifest["files"]}
    return sorted(set(files) - known)
