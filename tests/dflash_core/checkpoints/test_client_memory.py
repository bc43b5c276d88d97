"""Memory of a client does not grow with the tensors, however they lie in the file."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.dflash_core.checkpoints.checkpoint_files import drafter_tensors
from tests.support.sftp_server import RecordingSFTPServer

ROOT = Path(__file__).parents[3]
ROWS, COLUMNS = 8192, 8192
"""256 MiB in float32."""
MAX_BYTES = 150_000_000

CODE = """
import json, resource, sys
from pathlib import Path
from dflash_core.checkpoints import stream_checkpoint
from dflash_core.config import HostSettings
url, out, hosts = json.loads(sys.argv[1])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
stream_checkpoint(url, Path(out), hosts={name: HostSettings(**host) for name, host in hosts.items()})
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def rise_of_memory(url: str, out: Path, hosts: dict[str, object]) -> int:
    """Return by how many bytes the peak of a process rises above what its imports take."""
    run = subprocess.run(
        [sys.executable, "-c", CODE, json.dumps([url, str(out), hosts])], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    return int(run.stdout) * 1024


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("box")
    tensors = drafter_tensors(num_layers=1)
    tensors["fc.weight"] = torch.randn(ROWS, COLUMNS)
    torch.save({"model": tensors}, root / "plain.pt")
    tensors["fc.weight"] = tensors["fc.weight"].t()
    torch.save({"model": tensors}, root / "transposed.pt")
    yield root
    for path in root.iterdir():
        path.unlink()


@pytest.mark.parametrize("name", ["plain.pt", "transposed.pt"])
def test_a_tensor_of_256_mib_from_this_machine(box: Path, tmp_path: Path, name: str) -> None:
    assert rise_of_memory(str(box / name), tmp_path / "o.st", {}) < MAX_BYTES


@pytest.mark.parametrize("transport", ["openssh", "asyncssh"])
def test_a_tensor_of_256_mib_over_sftp(box: Path, tmp_path: Path, transport: str) -> None:
    with RecordingSFTPServer(box) as server:
        host = server.host_settings.model_copy(update={"transport": transport}).model_dump()
        assert rise_of_memory(server.url("plain.pt"), tmp_path / "o.st", {"box": host}) < MAX_BYTES


def test_the_transposed_tensor_comes_out_right(box: Path, tmp_path: Path) -> None:
    from safetensors import safe_open

    from dflash_core.checkpoints import stream_checkpoint

    stream_checkpoint(str(box / "transposed.pt"), tmp_path / "o.st")
    stored = torch.load(box / "transposed.pt", mmap=True, weights_only=True)["model"]["fc.weight"]
    with safe_open(tmp_path / "o.st", framework="pt") as file:
        assert torch.equal(file.get_tensor("fc.weight"), stored)
