"""Reading a checkpoint from a training box over loopback SSH: our reader against scp and sftp.

The checkpoint is a mixed file of 291 MB (drafter, frozen embedding and head, AdamW's state), the box a real
sshd. Every way starts with its log-in and ends with bytes in a file on the same disk.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from dflash_core.checkpoints import stream_checkpoint
from dflash_core.checkpoints.source_base import ByteRange
from dflash_core.checkpoints.sources import open_source
from dflash_core.config import HostSettings
from examples.stand_in_run.checkpoint import save_checkpoint
from examples.stand_in_run.model import Drafter, read_draft_config
from examples.training_box import TrainingBox, find_sshd
from tests.benchmarks.demo_run import DRAFT_CONFIG
from tests.benchmarks.measuring import load_average, show, spread

ROUNDS = 5
CIPHER = "aes128-gcm@openssh.com"
"""The first that our reader offers; the peers' own first choice, chacha20, is slower."""


class Scene(NamedTuple):
    """A box with a checkpoint, and a folder to read into."""

    box: TrainingBox
    file: Path
    into: Path

    @property
    def hosts(self) -> dict[str, HostSettings]:
        """Return the configured host that the box is."""
        return {
            "box": HostSettings(
                url=self.box.url(),
                read_only=True,
                known_hosts=str(self.box.known_hosts),
                identity_file=str(self.box.identity_file),
            )
        }

    @property
    def options(self) -> list[str]:
        """Return the options that OpenSSH's clients need for the same log-in."""
        options = {
            "UserKnownHostsFile": self.box.known_hosts,
            "IdentityFile": self.box.identity_file,
            "StrictHostKeyChecking": "yes",
            "IdentitiesOnly": "yes",
            "Ciphers": CIPHER,
        }
        return ["-F", "/dev/null", "-q", *(word for key, value in options.items() for word in ("-o", f"{key}={value}"))]

    @property
    def remote(self) -> str:
        """Return the file as OpenSSH's clients name it."""
        return f"{self.box.user}@127.0.0.1:{self.file}"


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    if find_sshd() is None:
        pytest.skip("the peers of this benchmark need OpenSSH's sshd; install openssh-server")
    runs = tmp_path / "runs"
    file = write_mixed_checkpoint(runs)
    (tmp_path / "into").mkdir()
    with TrainingBox(runs, tmp_path / "box", kind="sshd") as box:
        yield Scene(box, file, tmp_path / "into")


def write_mixed_checkpoint(runs: Path) -> Path:
    """Save an untrained drafter of the demo's shape, its optimizer after one step, embedding and head."""
    torch.manual_seed(0)
    config = read_draft_config(DRAFT_CONFIG)
    drafter = Drafter(config)
    optimizer = torch.optim.AdamW(drafter.parameters())
    for parameter in drafter.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    embedding_VD = torch.randn(config.vocab_size, config.hidden_size)
    args = argparse.Namespace(run="benchmark")
    return save_checkpoint(
        runs, step=1, epoch=0, drafter=drafter, embedding_VD=embedding_VD, optimizer=optimizer, args=args
    )


def read_whole_file(scene: Scene, destination: Path) -> int:
    """Read the whole file with our reader, and write each block as it comes."""
    url = scene.box.url("step_1/checkpoint.pt")
    with open_source(url, scene.hosts) as source, source.open(str(scene.file)) as file, destination.open("wb") as out:

        def write(_offset: int, block: bytes) -> None:
            out.write(block)

        file.read_ranges([ByteRange(offset=0, size=file.stat.size)], write)
        return source.bytes_read


def stream_the_drafter(scene: Scene, destination: Path) -> int:
    """Read the index and the drafter's own tensors, check them, and publish one safetensors file."""
    return stream_checkpoint(scene.box.url("step_1"), destination, hosts=scene.hosts).bytes_read


def copy_with(command: str, *more: str) -> Callable[[Scene, Path], int]:
    """Return a way to read the whole file with one of OpenSSH's clients."""

    def copy(scene: Scene, destination: Path) -> int:
        port = ["-P", str(scene.box.port)]
        subprocess.run([command, *scene.options, *port, *more, scene.remote, str(destination)], check=True)
        return destination.stat().st_size

    return copy


WAYS: dict[str, Callable[[Scene, Path], int]] = {
    "ours, whole file": read_whole_file,
    "scp, whole file": copy_with("scp"),
    "sftp, whole file": copy_with("sftp"),
    "sftp -B 261120 -R 64, whole file": copy_with("sftp", "-B", "261120", "-R", "64"),
    "ours, drafter only": stream_the_drafter,
}


def test_reading_a_mixed_checkpoint_against_scp_and_sftp(scene: Scene) -> None:
    size = scene.file.stat().st_size
    begin_load = load_average()
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    num_bytes: dict[str, int] = {}
    shuffled = random.Random(0)
    for number in range(ROUNDS + 1):
        for name in shuffled.sample(list(WAYS), len(WAYS)):
            destination = scene.into / "read"
            destination.unlink(missing_ok=True)
            os.sync()  # what the way before wrote is not this one's burden
            begin = time.perf_counter()
            num_bytes[name] = WAYS[name](scene, destination)
            if number > 0:  # the first round fills the page cache and pays for imports
                seconds[name].append(time.perf_counter() - begin)
            if "whole" in name:
                assert destination.read_bytes() == scene.file.read_bytes()
    best = min(sorted(seconds[name])[ROUNDS // 2] for name in WAYS if not name.startswith("ours"))
    rows = [
        {
            "way": name,
            "MB from the box": num_bytes[name] / 1e6,
            "seconds": spread(taken),
            "MB/s": spread([num_bytes[name] / 1e6 / one for one in taken], 0),
            "time of the best peer / its time": best / sorted(taken)[ROUNDS // 2],
        }
        for name, taken in seconds.items()
    ]
    show(
        f"A checkpoint of {size / 1e6:.0f} MB over loopback SSH ({CIPHER})",
        rows,
        f"median (least-most) of {ROUNDS} rounds in shuffled order after one to warm up; "
        f"load average at the start {begin_load:.1f}",
    )
