from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import asyncssh
import pytest
import torch
from safetensors.torch import save, save_file

from dflash_core.checkpoints import inspect_checkpoint, open_source, stream_checkpoint
from dflash_core.checkpoints.source_base import ByteRange
from dflash_core.config import HostSettings
from dflash_core.errors import (
    CheckpointChanged,
    CheckpointCorrupt,
    CheckpointError,
    CheckpointNotFound,
    DoesNotFit,
    HostKeyUnknown,
    HostUnreachable,
)
from tests.dflash_core.checkpoints.checkpoint_files import drafter_tensors, save_mixed
from tests.support.sftp_server import RecordingSFTPServer, SFTPOperation

READING = {"open", "read", "close", "stat", "lstat", "fstat", "scandir", "realpath"}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RecordingSFTPServer]:
    root = tmp_path / "box"
    root.mkdir()
    with RecordingSFTPServer(root) as running:
        yield running


@pytest.fixture
def hosts(server: RecordingSFTPServer) -> dict[str, HostSettings]:
    return {"box": server.host_settings}


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out.safetensors"


def changed(server: RecordingSFTPServer, **settings: object) -> dict[str, HostSettings]:
    return {"box": server.host_settings.model_copy(update=settings)}


# What it costs, and what it does to the host.


def test_only_the_drafters_bytes_leave_the_host(
    server: RecordingSFTPServer, hosts: dict[str, HostSettings], out: Path
) -> None:
    path = server.root / "run" / "step_100" / "checkpoint.pt"
    tensors = save_mixed(path, hidden=256, dtype=torch.bfloat16)
    result = stream_checkpoint(server.url("run/step_100"), out, hosts=hosts)
    assert out.read_bytes() == save(tensors)
    assert server.bytes_sent == result.bytes_read <= result.bytes_wanted + max(result.bytes_wanted // 100, 1_000_000)
    assert result.bytes_read < result.bytes_total / 4
    assert result.ref.url == server.url("run/step_100")
    assert (result.ref.run, result.ref.step) == ("run", 100)


def test_inspecting_reads_only_the_index(server: RecordingSFTPServer, hosts: dict[str, HostSettings]) -> None:
    save_mixed(server.root / "step_1" / "checkpoint.pt", hidden=128)
    found = inspect_checkpoint(server.url("step_1"), hosts=hosts)
    assert server.bytes_sent == found.bytes_read < 150_000 < found.bytes_wanted


def test_the_host_sees_nothing_but_reading(
    server: RecordingSFTPServer, hosts: dict[str, HostSettings], out: Path
) -> None:
    save_mixed(server.root / "step_1" / "checkpoint.pt")
    stream_checkpoint(server.url("step_1"), out, hosts=hosts)
    assert {operation.name for operation in server.ops} <= READING
    assert {operation.flags for operation in server.ops if operation.name == "open"} == {asyncssh.FXF_READ}
    assert (server.write_attempts, server.execs, server.num_connections) == ([], [], 1)
    assert [path.name for path in (server.root / "step_1").iterdir()] == ["checkpoint.pt"]
    opened = sum(operation.name == "open" for operation in server.ops)
    assert opened == sum(operation.name == "close" for operation in server.ops)


def test_one_source_serves_many_calls_over_one_connection(
    server: RecordingSFTPServer, hosts: dict[str, HostSettings], out: Path
) -> None:
    save_mixed(server.root / "step_1" / "checkpoint.pt")
    with open_source(server.url(), hosts) as source:
        inspect_checkpoint(server.url("step_1"), source=source)
        result = stream_checkpoint(server.url("step_1"), out, source=source)
        assert source.bytes_read > result.bytes_read
    assert server.num_connections == 1


def test_progress_ends_at_what_was_wanted(
    server: RecordingSFTPServer, hosts: dict[str, HostSettings], out: Path
) -> None:
    save_mixed(server.root / "c.pt", hidden=128)
    seen: list[tuple[int, int]] = []
    result = stream_checkpoint(server.url("c.pt"), out, hosts=hosts, on_progress=lambda *state: seen.append(state))
    assert seen[-1] == (result.bytes_wanted, result.bytes_wanted)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_the_read_rate_is_kept(server: RecordingSFTPServer) -> None:
    (server.root / "big").write_bytes(os.urandom(6_000_000))
    with open_source(server.url(), changed(server, max_read_mb_s=3.0)) as source, source.open("/big") as file:
        start = time.monotonic()
        file.read_at(0, 6_000_000)
        seconds = time.monotonic() - start
    assert 1.8 < seconds < 2.2


def test_several_ranges_come_in_order_whatever_the_server_answers(
    server: RecordingSFTPServer, hosts: dict[str, HostSettings]
) -> None:
    data = os.urandom(3_000_000)
    (server.root / "file").write_bytes(data)
    server.faults.max_answer_bytes = 10_007
    wanted = [
        ByteRange(offset=5, size=1_000_000),
        ByteRange(offset=2_000_000, size=7),
        ByteRange(offset=11, size=300_000),
    ]
    got: list[tuple[int, bytes]] = []
    with open_source(server.url(), hosts) as source, source.open("/file") as file:
        file.read_ranges(wanted, lambda offset, block: got.append((offset, block)))
    assert b"".join(block for _, block in got) == b"".join(data[part.offset : part.end] for part in wanted)
    assert all(data[offset : offset + len(block)] == block for offset, block in got)


def test_blocks_stay_small_though_the_server_offers_more(
    server: RecordingSFTPServer, hosts: dict[str, HostSettings]
) -> None:
    (server.root / "file").write_bytes(os.urandom(3_000_000))
    with open_source(server.url(), hosts) as source:
        source.read_at("/file", 0, 3_000_000)
    assert max(operation.size or 0 for operation in server.ops) == 255 * 1024


# What goes wrong on the way.


def test_a_connection_cut_on_the_way_gives_the_same_bytes(
    server: RecordingSFTPServer, hosts: dict[str, HostSettings], out: Path
) -> None:
    tensors = save_mixed(server.root / "c.pt", hidden=384, vocab=100)
    server.faults.cut_after_bytes, server.faults.cuts_left = 2_000_000, 2
    result = stream_checkpoint(server.url("c.pt"), out, hosts=hosts)
    assert out.read_bytes() == save(tensors)
    assert result.bytes_wanted > 5_000_000
    assert (server.num_connections, server.faults.cuts_left) == (3, 0)


def test_a_connection_that_keeps_breaking_is_given_up(
    server: RecordingSFTPServer, hosts: dict[str, HostSettings], out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash_core.checkpoints.sftp_session.RECONNECT_WAITS_S", (0.01, 0.02, 0.03))
    save_mixed(server.root / "c.pt", hidden=128)
    server.faults.cut_after_bytes, server.faults.cuts_left = 1000, 100
    with pytest.raises(HostUnreachable, match="after 3 reconnects"):
        stream_checkpoint(server.url("c.pt"), out, hosts=hosts)
    assert server.num_connections == 4
    assert [path.name for path in out.parent.iterdir()] == ["box"]


def test_a_host_that_stops_answering_is_given_up_in_time(
    server: RecordingSFTPServer, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash_core.checkpoints.sftp_session.RECONNECT_WAITS_S", (0.01,))
    save_mixed(server.root / "c.pt")
    server.faults.hang_reads = True
    start = time.monotonic()
    with pytest.raises(HostUnreachable, match=r"no answer within 0\.3 s"):
        stream_checkpoint(server.url("c.pt"), out, hosts=changed(server, timeout_s=0.3))
    assert time.monotonic() - start < 5


def test_a_source_survives_a_restart_of_the_server(server: RecordingSFTPServer, hosts: dict[str, HostSettings]) -> None:
    save_mixed(server.root / "c.pt")
    with open_source(server.url(), hosts) as source:
        first = inspect_checkpoint(server.url("c.pt"), source=source)
        server.stop()
        server.start()
        assert inspect_checkpoint(server.url("c.pt"), source=source).ref == first.ref


def replace_when_reading(server: RecordingSFTPServer, path: Path, data: bytes, *, after_reads: int) -> None:
    """Put another file at a path, by rename, once so many reads of it have come in."""
    count = 0

    def on_read(_operation: SFTPOperation) -> None:
        nonlocal count
        count += 1
        if count == after_reads:
            new = path.with_suffix(".new")
            new.write_bytes(data)
            os.utime(new, (1, 1))
            new.rename(path)

    server.faults.before_read = on_read


def test_a_file_replaced_while_it_is_read_gives_nothing(
    server: RecordingSFTPServer, hosts: dict[str, HostSettings], out: Path
) -> None:
    path = server.root / "c.pt"
    save_mixed(path, hidden=128)
    replace_when_reading(server, path, path.read_bytes(), after_reads=6)
    with pytest.raises(CheckpointChanged, match="changed while it was read"):
        stream_checkpoint(server.url("c.pt"), out, hosts=hosts)
    assert [path.name for path in out.parent.iterdir()] == ["box"]


def test_a_file_replaced_during_a_reconnect_is_noticed_before_any_of_it_is_used(
    server: RecordingSFTPServer, hosts: dict[str, HostSettings], out: Path
) -> None:
    path = server.root / "c.pt"
    save_mixed(path, hidden=256)
    replace_when_reading(server, path, path.read_bytes(), after_reads=6)
    server.faults.cut_after_bytes, server.faults.cuts_left = 500_000, 1
    with pytest.raises(CheckpointChanged):
        stream_checkpoint(server.url("c.pt"), out, hosts=hosts)
    assert server.num_connections == 2


def test_a_file_cut_short_while_it_is_read_is_noticed(
    server: RecordingSFTPServer, hosts: dict[str, HostSettings], out: Path
) -> None:
    path = server.root / "c.pt"
    save_mixed(path, hidden=256)
    count = 0

    def on_read(_operation: SFTPOperation) -> None:
        nonlocal count
        count += 1
        if count == 6:
            os.truncate(path, 10_000)

    server.faults.before_read = on_read
    with pytest.raises(CheckpointChanged):
        stream_checkpoint(server.url("c.pt"), out, hosts=hosts)


def test_a_safetensors_file_rewritten_in_place_within_one_second_is_noticed(
    server: RecordingSFTPServer, hosts: dict[str, HostSettings], out: Path
) -> None:
    path = server.root / "model.safetensors"
    tensors = drafter_tensors(hidden=64)
    save_file(tensors, path)
    times = (path.stat().st_atime, path.stat().st_mtime)
    renamed = save({name.replace("q_proj", "o_proj") if "q_proj" in name else name: t for name, t in tensors.items()})

    def on_read(_operation: SFTPOperation) -> None:
        if len([one for one in server.ops if one.name == "read"]) == 3:
            with path.open("r+b") as file:
                file.write(renamed[:500])
            os.utime(path, times)

    server.faults.before_read = on_read
    with pytest.raises(CheckpointChanged, match="rewritten"):
        stream_checkpoint(server.url("model.safetensors"), out, hosts=hosts)


def test_another_identity_than_expected_is_refused_before_any_tensor_is_read(
    server: RecordingSFTPServer, hosts: dict[str, HostSettings], out: Path
) -> None:
    save_mixed(server.root / "c.pt", hidden=128)
    found = inspect_checkpoint(server.url("c.pt"), hosts=hosts)
    save_mixed(server.root / "c.pt", hidden=128, seed=1)
    server.forget()
    with pytest.raises(CheckpointChanged, match="no longer the checkpoint"):
        stream_checkpoint(server.url("c.pt"), out, hosts=hosts, expected_identity=found.ref.identity)
    assert server.bytes_sent < 150_000


# What is wrong with the file.


@pytest.mark.parametrize("missing", [1, 60, 0.5], ids=["one_byte", "sixty_bytes", "half"])
def test_a_truncated_file_is_not_ready_and_gives_nothing(
    server: RecordingSFTPServer, hosts: dict[str, HostSettings], out: Path, missing: float
) -> None:
    path = server.root / "c.pt"
    save_mixed(path)
    size = path.stat().st_size
    os.truncate(path, size - int(missing if missing >= 1 else size * missing))
    found = inspect_checkpoint(server.url("c.pt"), hosts=hosts)
    assert (found.ready, found.tensors) == (False, ())
    assert str(found.not_ready_reason).startswith("cut off: ")
    with pytest.raises(CheckpointCorrupt, match="cut off"):
        stream_checkpoint(server.url("c.pt"), out, hosts=hosts)
    assert [path.name for path in out.parent.iterdir()] == ["box"]


def drafter_record(path: Path) -> int:
    """Return an offset inside the data of the drafter's first large tensor."""
    tensors = torch.load(path, weights_only=False)["model_state_dict"]
    return path.read_bytes().index(tensors["fc.weight"].numpy().tobytes()) + 1000


@pytest.mark.parametrize("damage", [b"\x40", b"\0" * 20_000], ids=["bit_flip", "zeros"])
def test_damaged_bytes_are_found_by_their_checksum(
    server: RecordingSFTPServer, hosts: dict[str, HostSettings], out: Path, damage: bytes
) -> None:
    path = server.root / "c.pt"
    save_mixed(path, hidden=64)
    offset = drafter_record(path)
    with path.open("r+b") as file:
        file.seek(offset)
        old = file.read(1)
        file.seek(offset)
        file.write(bytes([old[0] ^ damage[0]]) if len(damage) == 1 else damage)
    assert inspect_checkpoint(server.url("c.pt"), hosts=hosts).ready
    with pytest.raises(CheckpointCorrupt, match="CRC-32|does not lie where"):
        stream_checkpoint(server.url("c.pt"), out, hosts=hosts)
    assert [path.name for path in out.parent.iterdir()] == ["box"]


def test_damage_outside_the_drafter_does_not_matter(
    server: RecordingSFTPServer, hosts: dict[str, HostSettings], out: Path
) -> None:
    path = server.root / "c.pt"
    tensors = save_mixed(path)
    embedding = torch.load(path, weights_only=False)["model_state_dict"]["embed_tokens.weight"]
    offset = path.read_bytes().index(embedding.numpy().tobytes())
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(b"\0" * 1000)
    stream_checkpoint(server.url("c.pt"), out, hosts=hosts)
    assert out.read_bytes() == save(tensors)


# What the user got wrong.


def test_missing_paths_are_named(server: RecordingSFTPServer, hosts: dict[str, HostSettings]) -> None:
    (server.root / "empty").mkdir()
    with pytest.raises(CheckpointNotFound, match=r"'/nowhere/c\.pt'"):
        inspect_checkpoint(server.url("nowhere/c.pt"), hosts=hosts)
    with pytest.raises(CheckpointNotFound, match="it holds nothing"):
        inspect_checkpoint(server.url("empty"), hosts=hosts)


def test_an_unreadable_file_says_so(server: RecordingSFTPServer, hosts: dict[str, HostSettings]) -> None:
    save_mixed(server.root / "c.pt")

    def deny(operation: SFTPOperation) -> None:
        raise asyncssh.SFTPPermissionDenied("no")

    server.faults.before_read = deny
    with pytest.raises(CheckpointError, match="does not let this user read"):
        inspect_checkpoint(server.url("c.pt"), hosts=hosts)


def test_an_unknown_host_key_is_refused_and_says_what_to_do(server: RecordingSFTPServer, tmp_path: Path) -> None:
    other_key = asyncssh.generate_private_key("ssh-ed25519").export_public_key().decode()
    other = tmp_path / "other_known_hosts"
    other.write_text(f"[127.0.0.1]:{server.port} {other_key}")
    for known_hosts in (tmp_path / "missing", other):
        with pytest.raises(HostKeyUnknown, match=f"ssh-keyscan -p {server.port}"):
            inspect_checkpoint(server.url("c.pt"), hosts=changed(server, known_hosts=str(known_hosts)))
    assert server.ops == []


def test_hosts_that_cannot_be_used_are_named(server: RecordingSFTPServer) -> None:
    server.faults.refuse_login = True
    with pytest.raises(HostUnreachable, match="refused the login"):
        open_source(server.url(), {"box": server.host_settings})
    with pytest.raises(HostUnreachable, match=r"no host is called 'no-such-host\.invalid'"):
        open_source("ssh://no-such-host.invalid/x", changed(server, url="ssh://no-such-host.invalid"))
    url = server.url()
    server.stop()
    with pytest.raises(HostUnreachable, match="cannot connect"):
        open_source(url, {"box": server.host_settings})
    server.start()


def test_an_alias_of_the_ssh_config_is_followed(
    server: RecordingSFTPServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_mixed(server.root / "run" / "step_1" / "checkpoint.pt")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ssh").mkdir()
    config = f"Host training-box\n  HostName 127.0.0.1\n  Port {server.port}\n  User reader\n"
    (tmp_path / ".ssh" / "config").write_text(config)
    hosts = changed(server, url="ssh://training-box/data")
    found = inspect_checkpoint("ssh://training-box/run/step_1", hosts=hosts)
    assert (found.ready, found.ref.run, found.ref.url) == (True, "run", "ssh://training-box/run/step_1")


def test_an_interrupt_leaves_neither_file_nor_thread(
    server: RecordingSFTPServer, hosts: dict[str, HostSettings], out: Path
) -> None:
    save_mixed(server.root / "c.pt", hidden=256, vocab=10)
    before = set(threading.enumerate())
    server.faults.read_delay_s = 0.02
    main_thread = threading.main_thread().ident
    assert main_thread is not None

    def interrupt(done: int, wanted: int) -> None:
        if done > wanted // 2 and not interrupted:
            interrupted.append(done)
            signal.pthread_kill(main_thread, signal.SIGINT)

    interrupted: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        stream_checkpoint(server.url("c.pt"), out, hosts=hosts, on_progress=interrupt)
    assert set(threading.enumerate()) == before
    assert [path.name for path in out.parent.iterdir()] == ["box"]


def test_no_thread_is_left_behind(server: RecordingSFTPServer, hosts: dict[str, HostSettings], out: Path) -> None:
    save_mixed(server.root / "c.pt")
    before = set(threading.enumerate())
    stream_checkpoint(server.url("c.pt"), out, hosts=hosts)
    with pytest.raises(CheckpointNotFound):
        stream_checkpoint(server.url("d.pt"), out, hosts=hosts)
    assert set(threading.enumerate()) == before


def test_a_full_disk_is_noticed_before_anything_is_fetched(
    server: RecordingSFTPServer, hosts: dict[str, HostSettings], out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_mixed(server.root / "c.pt", hidden=128)
    usage = os.statvfs(out.parent)
    monkeypatch.setattr("dflash_core.checkpoints.streaming.DISK_RESERVE_BYTES", usage.f_blocks * usage.f_frsize)
    with pytest.raises(DoesNotFit, match="GB are free"):
        stream_checkpoint(server.url("c.pt"), out, hosts=hosts)
    assert server.bytes_sent < 150_000


def test_what_a_killed_writer_left_behind_is_removed(tmp_path: Path) -> None:
    save_mixed(tmp_path / "c.pt")
    out = tmp_path / "store" / "out.safetensors"
    out.parent.mkdir()
    (out.parent / ".out.safetensors.99-abcd.tmp").write_bytes(b"half a file")
    stream_checkpoint(str(tmp_path / "c.pt"), out)
    assert [path.name for path in out.parent.iterdir()] == ["out.safetensors"]
