"""An attempt that was killed or cut off for good is gone on with, and only that one."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from dflash_core.checkpoints import partial_file as partial
from dflash_core.checkpoints import stream_checkpoint
from dflash_core.config import HostSettings
from dflash_core.errors import CheckpointCorrupt, DoesNotFit, HostUnreachable
from tests.dflash_core.checkpoints.checkpoint_files import drafter_tensors, save_mixed
from tests.support.sftp_server import RecordingSFTPServer

HIDDEN = 256
ROOT = Path(__file__).parents[3]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / "drafter.safetensors"


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial, "SYNC_BYTES", 64 << 10)


def settings(server: RecordingSFTPServer) -> dict[str, HostSettings]:
    return {"box": server.host_settings.model_copy(update={"timeout_s": 1.0})}


def cut_for_good(server: RecordingSFTPServer, after_bytes: int) -> None:
    """Break every connection after a part of that many bytes, so that four of them get about as far."""
    server.faults.cut_after_bytes = after_bytes // 4
    server.faults.cuts_left = 1000


def mend(server: RecordingSFTPServer) -> None:
    server.faults.cuts_left = 0
    server.forget()


def leftovers(out: Path) -> list[str]:
    return sorted(path.suffix for path in out.parent.iterdir())


def save_step(server: RecordingSFTPServer, seed: int = 0) -> dict[str, torch.Tensor]:
    return save_mixed(server.root / "step_1" / "checkpoint.pt", hidden=HIDDEN, vocab=100, seed=seed)


def test_a_link_that_broke_for_good_is_gone_on_with_at_the_last_whole_tensor(
    server: RecordingSFTPServer, out: Path
) -> None:
    tensors = save_step(server)
    size = sum(tensor.nbytes for tensor in tensors.values())
    cut_for_good(server, after_bytes=size // 2)
    with pytest.raises(HostUnreachable, match="after 3 reconnects"):
        stream_checkpoint(server.url("step_1"), out, hosts=settings(server))
    assert not out.exists()
    assert leftovers(out) == [".journal", ".part"]
    (journal,) = out.parent.glob(".*.journal")
    finished = sum(json.loads(line)[2] for line in journal.read_text().splitlines()[1:])
    assert finished > size // 10
    mend(server)
    progress: list[tuple[int, int]] = []
    result = stream_checkpoint(
        server.url("step_1"), out, hosts=settings(server), on_progress=lambda *at: progress.append(at)
    )
    assert out.read_bytes() == save(tensors)
    assert leftovers(out) == [".safetensors"]
    assert server.bytes_sent < size - finished + 200_000
    assert result.bytes_read == server.bytes_sent
    assert progress[0][0] > finished - 100_000
    assert progress[-1] == (size, size)


def test_a_process_that_was_killed_is_gone_on_with(server: RecordingSFTPServer, out: Path) -> None:
    tensors = save_step(server)
    size = sum(tensor.nbytes for tensor in tensors.values())
    server.faults.read_delay_s = 0.05
    code = f"""
        from pathlib import Path
        from dflash_core.checkpoints import partial_file, stream_checkpoint
        from dflash_core.config import HostSettings
        partial_file.SYNC_BYTES = 1
        host = HostSettings(url={server.url("")!r}, known_hosts={str(server.known_hosts)!r}, max_read_mb_s=1)
        stream_checkpoint({server.url("step_1")!r}, Path({str(out)!r}), hosts={{"box": host}})
    """
    child = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 60
        while server.bytes_sent < size // 3 and child.poll() is None and time.monotonic() < until:
            time.sleep(0.02)
        assert child.poll() is None
        child.send_signal(signal.SIGKILL)
    finally:
        child.wait(timeout=10)
    assert not out.exists()
    mend(server)
    server.faults.read_delay_s = 0.0
    stream_checkpoint(server.url("step_1"), out, hosts=settings(server))
    assert out.read_bytes() == save(tensors)
    assert server.bytes_sent < size
    assert leftovers(out) == [".safetensors"]


def test_what_is_left_of_another_checkpoint_is_not_gone_on_with(server: RecordingSFTPServer, out: Path) -> None:
    save_step(server)
    cut_for_good(server, after_bytes=500_000)
    with pytest.raises(HostUnreachable):
        stream_checkpoint(server.url("step_1"), out, hosts=settings(server))
    mend(server)
    tensors = save_step(server, seed=1)
    stream_checkpoint(server.url("step_1"), out, hosts=settings(server))
    assert out.read_bytes() == save(tensors)
    assert leftovers(out) == [".safetensors"]


def test_of_a_damaged_checkpoint_nothing_is_kept(tmp_path: Path, out: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    tensors = save_mixed(path, hidden=HIDDEN)
    data = bytearray(path.read_bytes())
    at = data.find(tensors["layers.1.mlp.up_proj.weight"].numpy().tobytes())
    data[at + 100] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointCorrupt, match="CRC-32"):
        stream_checkpoint(str(path), out)
    assert leftovers(out) == []


def test_a_torn_journal_is_read_as_far_as_it_is_whole(server: RecordingSFTPServer, out: Path) -> None:
    tensors = save_step(server)
    cut_for_good(server, after_bytes=1_000_000)
    with pytest.raises(HostUnreachable):
        stream_checkpoint(server.url("step_1"), out, hosts=settings(server))
    mend(server)
    (journal,) = out.parent.glob(".*.journal")
    journal.write_text(journal.read_text() + '["/step_1/check')
    stream_checkpoint(server.url("step_1"), out, hosts=settings(server))
    assert out.read_bytes() == save(tensors)


def test_two_at_once_do_not_disturb_each_other(tmp_path: Path, out: Path) -> None:
    tensors = save_mixed(tmp_path / "checkpoint.pt", hidden=HIDDEN)
    url = str(tmp_path / "checkpoint.pt")
    inner: list[bytes] = []

    def stream_again(_done: int, _total: int) -> None:
        if not inner:
            inner.append(b"")
            inner[0] = stream_checkpoint(url, out).path.read_bytes()

    stream_checkpoint(url, out, on_progress=stream_again)
    assert inner[0] == out.read_bytes() == save(tensors)
    assert leftovers(out) == [".safetensors"]


def test_a_disk_that_becomes_full_on_the_way_says_so_and_is_freed(
    tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_mixed(tmp_path / "checkpoint.pt", hidden=HIDDEN)
    real_write = os.pwrite

    def write(descriptor: int, data: bytes, offset: int) -> int:
        if offset > 1_000_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real_write(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", write)
    with pytest.raises(DoesNotFit, match="became full; make room"):
        stream_checkpoint(str(tmp_path / "checkpoint.pt"), out)
    assert leftovers(out) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("a real small disk needs root and the right to mount one")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_a_real_disk_that_is_too_small_is_noticed_before_anything_is_fetched(
    tmp_path: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_mixed(tmp_path / "checkpoint.pt", hidden=HIDDEN)
    with pytest.raises(DoesNotFit, match="GB are needed"):
        stream_checkpoint(str(tmp_path / "checkpoint.pt"), small_disk / "o.st")
    # And by the reservation of its room, where the first look was too hopeful.
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)
    with pytest.raises(DoesNotFit, match="cannot be had"):
        stream_checkpoint(str(tmp_path / "checkpoint.pt"), small_disk / "o.st")
    assert list(small_disk.iterdir()) == []


def test_a_drafter_of_many_pieces_comes_out_right_from_every_point_of_interruption(
    tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash_core.checkpoints.local_source.BLOCK_BYTES", 4 << 10)
    tensors = drafter_tensors()
    torch.save({"model": tensors}, tmp_path / "c.pt")

    class Stopped(Exception):
        pass

    for stop_at in range(1, 18):
        calls = 0

        def stop(_done: int, _total: int) -> None:
            nonlocal calls
            calls += 1
            if calls == stop_at:  # noqa: B023
                raise Stopped

        with pytest.raises(Stopped):
            stream_checkpoint(str(tmp_path / "c.pt"), out, on_progress=stop)
        stream_checkpoint(str(tmp_path / "c.pt"), out)
        assert out.read_bytes() == save(tensors), stop_at
        out.unlink()
