from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from safetensors.torch import save

from dflash_core.checkpoints import inspect_checkpoint, open_source, stream_checkpoint
from dflash_core.checkpoints.source_base import ByteRange, SourceFile
from dflash_core.config import HostSettings
from dflash_core.errors import (
    CheckpointChanged,
    CheckpointNotFound,
    CheckpointVanished,
    HostUnreachable,
)
from tests.dflash_core.checkpoints.checkpoint_files import save_mixed
from tests.support.sftp_server import RecordingSFTPServer, SFTPOperation

ChangeSettings = Callable[..., dict[str, HostSettings]]


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
    monkeypatch.setattr("dflash_core.checkpoints.host_errors.RECONNECT_WAITS_S", (0.01, 0.02, 0.03))
    save_mixed(server.root / "c.pt", hidden=128)
    server.faults.cut_after_bytes, server.faults.cuts_left = 1000, 100
    with pytest.raises(HostUnreachable, match="after 3 reconnects"):
        stream_checkpoint(server.url("c.pt"), out, hosts=hosts)
    assert server.num_connections == 4
    assert not out.exists()


def test_a_host_that_stops_answering_is_given_up_in_time(
    server: RecordingSFTPServer, changed: ChangeSettings, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash_core.checkpoints.host_errors.RECONNECT_WAITS_S", (0.01,))
    save_mixed(server.root / "c.pt")
    server.faults.hang_reads = True
    start = time.monotonic()
    with pytest.raises(HostUnreachable, match=r"no answer within 0\.3 s"):
        stream_checkpoint(server.url("c.pt"), out, hosts=changed(timeout_s=0.3))
    assert time.monotonic() - start < 5


def test_a_host_that_stalls_for_a_while_costs_a_reconnect_and_nothing_else(
    server: RecordingSFTPServer, changed: ChangeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash_core.checkpoints.host_errors.RECONNECT_WAITS_S", (0.01, 0.05, 0.1))
    data = os.urandom(6_000_000)
    (server.root / "file").write_bytes(data)

    def stall_once(operation: SFTPOperation) -> None:
        server.faults.hang_reads = server.num_connections == 1 and (operation.offset or 0) > 3_000_000

    server.faults.before_read = stall_once
    with open_source(server.url(), changed(timeout_s=1.0)) as source:
        assert source.read_at("/file", 0, len(data)) == data
    assert server.num_connections == 2


def test_a_slow_host_is_not_a_silent_one(server: RecordingSFTPServer, changed: ChangeSettings) -> None:
    """Every answer comes in time, though all of them together take longer than one may."""
    (server.root / "file").write_bytes(os.urandom(3_000_000))

    def one_at_a_time(_operation: SFTPOperation) -> None:
        time.sleep(0.15)

    server.faults.before_read = one_at_a_time
    begin = time.monotonic()
    with open_source(server.url(), changed(timeout_s=1.0)) as source:
        source.read_at("/file", 0, 3_000_000)
    assert time.monotonic() - begin > 1.5
    assert server.num_connections == 1


def test_a_slow_receiver_is_not_a_silent_host(server: RecordingSFTPServer, changed: ChangeSettings) -> None:
    data = os.urandom(3_000_000)
    (server.root / "file").write_bytes(data)
    got: list[bytes] = []

    def receive(_offset: int, block: bytes) -> None:
        if not got:
            time.sleep(1.5)
        got.append(block)

    with open_source(server.url(), changed(timeout_s=1.0)) as source, source.open("/file") as file:
        file.read_ranges([ByteRange(offset=0, size=len(data))], receive)
    assert b"".join(got) == data


@pytest.mark.parametrize("error", [ConnectionResetError("full"), TimeoutError("full"), OSError(28, "full")])
def test_an_error_of_the_receiver_is_its_own(
    server: RecordingSFTPServer, hosts: dict[str, HostSettings], error: Exception
) -> None:
    (server.root / "file").write_bytes(os.urandom(3_000_000))
    calls = 0

    def fail(_offset: int, _block: bytes) -> None:
        nonlocal calls
        calls += 1
        raise error

    with open_source(server.url(), hosts) as source, source.open("/file") as file:
        with pytest.raises(type(error)) as raised:
            file.read_ranges([ByteRange(offset=0, size=3_000_000)], fail)
        assert (str(raised.value), calls) == (str(error), 1)
        assert len(file.read_at(0, 1_000_000)) == 1_000_000


def test_a_source_survives_a_restart_of_the_server(server: RecordingSFTPServer, hosts: dict[str, HostSettings]) -> None:
    save_mixed(server.root / "c.pt")
    with open_source(server.url(), hosts) as source:
        first = inspect_checkpoint(server.url("c.pt"), source=source)
        server.stop()
        server.start()
        assert inspect_checkpoint(server.url("c.pt"), source=source).ref == first.ref


def test_a_server_that_restarts_in_mid_read_is_waited_for(
    server: RecordingSFTPServer, hosts: dict[str, HostSettings]
) -> None:
    data = os.urandom(8_000_000)
    (server.root / "file").write_bytes(data)
    got: list[bytes] = []
    restarting: list[threading.Thread] = []

    def restart() -> None:
        server.stop()
        time.sleep(0.5)
        server.start()

    def receive(_offset: int, block: bytes) -> None:
        got.append(block)
        if not restarting:
            restarting.append(threading.Thread(target=restart))
            restarting[0].start()

    server.faults.read_delay_s = 0.01
    with open_source(server.url(), hosts) as source, source.open("/file") as file:
        file.read_ranges([ByteRange(offset=0, size=len(data))], receive)
    restarting[0].join()
    assert b"".join(got) == data
    assert server.num_connections == 2


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
    assert not out.exists()


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


def test_a_file_that_grows_while_it_is_read_is_noticed(
    server: RecordingSFTPServer, hosts: dict[str, HostSettings], out: Path
) -> None:
    path = server.root / "c.pt"
    save_mixed(path, hidden=128)
    replace_when_reading(server, path, path.read_bytes() + b"more", after_reads=6)
    with pytest.raises(CheckpointChanged, match="changed while it was read"):
        stream_checkpoint(server.url("c.pt"), out, hosts=hosts)
    assert not out.exists()


def read_and_check(file: SourceFile) -> None:
    file.read_at(0, file.stat.size)
    file.check_unchanged()


@pytest.mark.parametrize("is_cut", [False, True], ids=["link_holds", "link_breaks"])
def test_a_folder_renamed_away_in_mid_read_has_vanished(
    server: RecordingSFTPServer, hosts: dict[str, HostSettings], is_cut: bool
) -> None:
    (server.root / "step_1").mkdir()
    (server.root / "step_1" / "file").write_bytes(os.urandom(4_000_000))
    if is_cut:
        server.faults.cut_after_bytes, server.faults.cuts_left = 1_000_000, 1

    def rotate(_operation: SFTPOperation) -> None:
        if (server.root / "step_1").exists():
            (server.root / "step_1").rename(server.root / "rotated")

    with open_source(server.url(), hosts) as source, source.open("/step_1/file") as file:
        server.faults.before_read = rotate
        with pytest.raises(CheckpointVanished, match="deleted or renamed while it was read"):
            read_and_check(file)


def test_what_lies_beyond_the_end_is_not_even_asked_for(
    server: RecordingSFTPServer, hosts: dict[str, HostSettings]
) -> None:
    (server.root / "file").write_bytes(b"1234")
    with (
        open_source(server.url(), hosts) as source,
        source.open("/file") as file,
        pytest.raises(CheckpointChanged, match="ended at byte 4"),
    ):
        file.read_at(2, 100)
    assert [operation.name for operation in server.ops if operation.name == "read"] == []


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A job that a shell starts in the background is born deaf to SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_leaves_neither_half_a_file_nor_a_thread(
    server: RecordingSFTPServer, hosts: dict[str, HostSettings], out: Path
) -> None:
    save_mixed(server.root / "c.pt", hidden=256, vocab=10)
    before, children = set(threading.enumerate()), child_processes()
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
    assert (set(threading.enumerate()), child_processes()) == (before, children)
    assert not out.exists()


def child_processes() -> set[int]:
    """Return the processes that this one has started and that have not been waited for, zombies too."""
    pids: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError):  # a thread that has just ended
            pids |= {int(pid) for pid in (task / "children").read_text().split()}
    return pids


def test_neither_thread_nor_process_is_left_behind(
    server: RecordingSFTPServer, hosts: dict[str, HostSettings], out: Path
) -> None:
    save_mixed(server.root / "c.pt")
    before, children = set(threading.enumerate()), child_processes()
    stream_checkpoint(server.url("c.pt"), out, hosts=hosts)
    with pytest.raises(CheckpointNotFound):
        stream_checkpoint(server.url("d.pt"), out, hosts=hosts)
    with open_source(server.url(), hosts) as source:
        source.open("/c.pt")  # and never closed
    source.close()  # a second time does no harm
    assert (set(threading.enumerate()), child_processes()) == (before, children)
