"""Reading a checkpoint from a training box over loopback SSH: our two clients against scp, sftp and rsync.

The checkpoint is a mixed file of 345 MB (drafter, frozen embedding and head, AdamW's state; the drafter is
under a third of it), the box a real sshd. Every way starts with its log-in and ends with bytes in a file on
the same disk. The long link is the same box behind a proxy that delays everything by half a round trip.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_core.checkpoints import stream_checkpoint
from dflash_core.checkpoints.source_base import ByteRange
from dflash_core.checkpoints.sources import open_source
from dflash_core.config import HostSettings
from examples import training_box
from examples.stand_in_run.checkpoint import WEIGHTS_PREFIX, save_checkpoint
from examples.stand_in_run.model import Drafter, read_draft_config
from examples.training_box import TrainingBox, find_sshd
from tests.benchmarks.demo_run import DRAFT_CONFIG
from tests.benchmarks.measuring import PROJECT, load_average, show, spread
from tests.support.delay_proxy import DelayProxy

ROUNDS = 5
LONG_ROUNDS = 3
LONG_ROUND_TRIP_S = 0.080
CIPHER = "aes128-gcm@openssh.com"
"""The first that our clients offer; the peers' own first choice, chacha20, is slower."""
LARGE_BLOCKS = ("-B", "261120", "-R", "64")
Transport = Literal["auto", "openssh", "asyncssh"]


class Scene(NamedTuple):
    """A box with a checkpoint, and a folder to read into."""

    box: TrainingBox
    file: Path
    into: Path
    port: int
    """The box's own port, or that of a proxy before it."""
    known_hosts: Path

    def settings(self, transport: Transport) -> HostSettings:
        """Return the settings of the host that the box is."""
        return HostSettings(
            url=self.url,
            read_only=True,
            known_hosts=str(self.known_hosts),
            identity_file=str(self.box.identity_file),
            transport=transport,
        )

    @property
    def url(self) -> str:
        """Return the checkpoint's address."""
        return self.box.url("step_1").replace(f":{self.box.port}/", f":{self.port}/")

    @property
    def options(self) -> list[str]:
        """Return the options that OpenSSH's clients need for the same log-in."""
        options = {
            "UserKnownHostsFile": self.known_hosts,
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


Way = Callable[[Scene, Path], int]
"""Reads from a scene into a file, and returns how many bytes came from the box."""


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    if find_sshd() is None:
        pytest.skip("the peers of this benchmark need OpenSSH's sshd; install openssh-server")
    # rsync is a command on the box, which a training box refuses; here it may run for once.
    config = training_box.SSHD_CONFIG.replace("ForceCommand internal-sftp -R\n", "")
    monkeypatch.setattr(training_box, "SSHD_CONFIG", config)
    runs = tmp_path / "runs"
    file = write_mixed_checkpoint(runs)
    (tmp_path / "into").mkdir()
    with TrainingBox(runs, tmp_path / "box", kind="sshd") as box:
        yield Scene(box, file, tmp_path / "into", box.port, box.known_hosts)


@pytest.fixture
def far_scene(scene: Scene, tmp_path: Path) -> Iterator[Scene]:
    with DelayProxy(scene.box.port, round_trip_s=LONG_ROUND_TRIP_S) as proxy:
        known_hosts = tmp_path / "known_hosts_of_the_proxy"
        known_hosts.write_text(scene.known_hosts.read_text().replace(str(scene.box.port), str(proxy.port), 1))
        yield scene._replace(port=proxy.port, known_hosts=known_hosts)


def write_mixed_checkpoint(runs: Path) -> Path:
    """Save an untrained drafter, its optimizer after one step, embedding and head."""
    torch.manual_seed(0)
    config = dataclasses.replace(read_draft_config(DRAFT_CONFIG), intermediate_size=4608, num_hidden_layers=3)
    drafter = Drafter(config)
    optimizer = torch.optim.AdamW(drafter.parameters())
    for parameter in drafter.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    embedding_VD = torch.randn(8000, config.hidden_size)
    args = argparse.Namespace(run="benchmark")
    return save_checkpoint(
        runs, step=1, epoch=0, drafter=drafter, embedding_VD=embedding_VD, optimizer=optimizer, args=args
    )


# The ways.


def read_whole_file(transport: Transport) -> Way:
    """Return our way to read the whole file, each block written as it comes."""

    def read(scene: Scene, destination: Path) -> int:
        hosts = {"box": scene.settings(transport)}
        with (
            open_source(scene.url, hosts) as source,
            source.open(str(scene.file)) as file,
            destination.open("wb", buffering=0) as out,
        ):

            def write(_offset: int, block: bytes) -> None:
                out.write(block)

            file.read_ranges([ByteRange(offset=0, size=file.stat.size)], write)
            return source.bytes_read

    return read


def stream_the_drafter(transport: Transport) -> Way:
    """Return our way to the drafter: read the index and its own tensors, check them, publish one safetensors file."""

    def stream(scene: Scene, destination: Path) -> int:
        return stream_checkpoint(scene.url, destination, hosts={"box": scene.settings(transport)}).bytes_read

    return stream


def copy_with(command: str, *more: str) -> Way:
    """Return a way to read the whole file with one of OpenSSH's clients."""

    def copy(scene: Scene, destination: Path) -> int:
        words = [command, *scene.options, "-P", str(scene.port), *more, scene.remote, str(destination)]
        subprocess.run(words, check=True)
        return destination.stat().st_size

    return copy


def copy_with_rsync(scene: Scene, destination: Path) -> int:
    """Read the whole file with rsync over ssh; it runs itself on the box."""
    ssh = " ".join(["ssh", *scene.options, "-p", str(scene.port)])
    subprocess.run(["rsync", "--whole-file", "-e", ssh, scene.remote, str(destination)], check=True)
    return destination.stat().st_size


def copy_and_convert(scene: Scene, destination: Path) -> int:
    """Copy the whole file with scp, load it, and save the drafter's tensors."""
    copied = scene.into / "copied"
    num_bytes = copy_with("scp")(scene, copied)
    state = torch.load(copied, map_location="cpu", mmap=True, weights_only=False)["model_state_dict"]
    tensors = {
        name.removeprefix(WEIGHTS_PREFIX): tensor for name, tensor in state.items() if name.startswith(WEIGHTS_PREFIX)
    }
    save_file(tensors, destination)
    copied.unlink()
    return num_bytes


PEERS: dict[str, Way] = {
    "scp": copy_with("scp"),
    "sftp": copy_with("sftp"),
    "sftp -B 261120 -R 64": copy_with("sftp", *LARGE_BLOCKS),
    **({"rsync -W": copy_with_rsync} if shutil.which("rsync") else {}),
}
WHOLE: dict[str, Way] = {
    "ours, ssh": read_whole_file("openssh"),
    "ours, asyncssh": read_whole_file("asyncssh"),
    **PEERS,
}
DRAFTER: dict[str, Way] = {
    "ours, ssh": stream_the_drafter("openssh"),
    "ours, asyncssh": stream_the_drafter("asyncssh"),
    "scp + torch.load + save_file": copy_and_convert,
}
FAR: dict[str, Way] = {
    "ours, auto": read_whole_file("auto"),
    "ours, ssh": read_whole_file("openssh"),
    "scp": copy_with("scp"),
    "sftp -B 261120 -R 64": copy_with("sftp", *LARGE_BLOCKS),
}


def compare(title: str, scene: Scene, ways: dict[str, Way], check: Callable[[Path], None], *, rounds: int) -> None:
    """Run all ways in shuffled order, check what each has read, and print how they compare with the best peer."""
    begin_load = load_average()
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    num_bytes: dict[str, int] = {}
    shuffled = random.Random(0)
    for number in range(rounds + 1):
        for name in shuffled.sample(list(ways), len(ways)):
            destination = scene.into / "read"
            destination.unlink(missing_ok=True)
            os.sync()  # what the way before wrote is not this one's burden
            begin = time.perf_counter()
            num_bytes[name] = ways[name](scene, destination)
            if number > 0:  # the first round fills the page cache and pays for imports
                seconds[name].append(time.perf_counter() - begin)
            check(destination)
    best = min(sorted(seconds[name])[rounds // 2] for name in ways if not name.startswith("ours"))
    rows = [
        {
            "way": name,
            "MB from the box": num_bytes[name] / 1e6,
            "seconds": spread(taken),
            "MB/s": spread([num_bytes[name] / 1e6 / one for one in taken], 0),
            "time of the best peer / its time": best / sorted(taken)[rounds // 2],
        }
        for name, taken in seconds.items()
    ]
    show(
        title,
        rows,
        f"median (least-most) of {rounds} rounds in shuffled order after one to warm up; "
        f"load average at the start {begin_load:.1f}",
        *([] if shutil.which("rsync") else ["rsync is not installed here and was not compared"]),
    )


def test_reading_a_whole_file_against_scp_sftp_and_rsync(scene: Scene) -> None:
    def check(read: Path) -> None:
        assert read.read_bytes() == scene.file.read_bytes()

    size = scene.file.stat().st_size
    compare(f"A file of {size / 1e6:.0f} MB over loopback SSH ({CIPHER})", scene, WHOLE, check, rounds=ROUNDS)


def test_reading_the_drafter_against_scp_and_torch(scene: Scene) -> None:
    state = torch.load(scene.file, weights_only=False)["model_state_dict"]

    def check(read: Path) -> None:
        tensors = load_file(read)
        assert len(tensors) == len(state) - 2
        assert all(torch.equal(tensor, state[WEIGHTS_PREFIX + name]) for name, tensor in tensors.items())

    share = sum(tensor.nbytes for name, tensor in state.items() if name.startswith(WEIGHTS_PREFIX))
    share /= scene.file.stat().st_size
    compare(
        f"The drafter of a mixed checkpoint, {share:.0%} of its bytes, as safetensors",
        scene,
        DRAFTER,
        check,
        rounds=ROUNDS,
    )


def test_reading_over_a_long_link_against_scp(far_scene: Scene) -> None:
    def check(read: Path) -> None:
        assert read.read_bytes() == far_scene.file.read_bytes()

    size = far_scene.file.stat().st_size
    title = f"A file of {size / 1e6:.0f} MB with {LONG_ROUND_TRIP_S * 1e3:.0f} ms of added round trip"
    compare(title, far_scene, FAR, check, rounds=LONG_ROUNDS)


MEASURE_MEMORY = """
import re, sys
from pathlib import Path
from dflash_core.checkpoints import open_source, stream_checkpoint
from dflash_core.checkpoints.source_base import ByteRange
from dflash_core.config import HostSettings
import asyncssh  # what auto would import anyway
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
settings = HostSettings.model_validate_json(sys.argv[1])
way, file, destination = sys.argv[2:]
before = peak()
if way == "stream":
    stream_checkpoint(settings.url, Path(destination), hosts={"box": settings})
else:
    out = open(destination, "wb")
    with open_source(settings.url, {"box": settings}) as source, source.open(file) as opened:
        opened.read_ranges([ByteRange(offset=0, size=opened.stat.size)], lambda _, block: out.write(block))
print(peak() - before)
"""


def test_memory_of_reading(scene: Scene) -> None:
    rows = []
    transports: tuple[Transport, ...] = ("openssh", "asyncssh")
    for transport in transports:
        for way in ("whole file", "stream"):
            settings = scene.settings(transport).model_dump_json()
            words = [sys.executable, "-c", MEASURE_MEMORY, settings, way, str(scene.file), str(scene.into / way)]
            done = subprocess.run(words, cwd=PROJECT, stdout=subprocess.PIPE, text=True, check=True)
            rows.append({"client": transport, "what": way, "MB beyond the imports": int(done.stdout) / 1e6})
    tensors = load_file(scene.into / "stream")
    largest = max(tensor.nbytes for tensor in tensors.values())
    show(
        f"Peak memory of a client that reads {scene.file.stat().st_size / 1e6:.0f} MB",
        rows,
        f"VmHWM of a process of its own, less what it was after the imports; largest tensor {largest / 1e6:.0f} MB",
    )
