from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal

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
)
from examples.training_box import TrainingBox, find_sshd
from tests.dflash_core.checkpoints.checkpoint_files import drafter_tensors, save_mixed
from tests.support.sftp_server import RecordingSFTPServer, SFTPOperation

Transport = Literal["openssh", "asyncssh"]
ChangeSettings = Callable[..., dict[str, HostSettings]]

READING = {"open", "read", "close", "stat", "lstat", "fstat", "scandir", "realpath"}


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


def test_no_handle_is_left_open(server: RecordingSFTPServer, hosts: dict[str, HostSettings]) -> None:
    (server.root / "folder").mkdir()
    (server.root / "file").write_bytes(b"1234")
    with open_source(server.url(), hosts) as source:
        for path in ("/file", "/nowhere", "/folder"):
            with suppress(CheckpointError), source.open(path) as file:
                file.read_at(0, 4)
        source.list_dirs(["/folder", "/nowhere", "/file"])
        names = [operation.name for operation in server.ops]
        assert (names.count("open"), names.count("close")) == (3, 1)  # two were refused


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


def test_the_read_rate_is_kept_within_a_tenth(server: RecordingSFTPServer, changed: ChangeSettings) -> None:
    (server.root / "big").write_bytes(os.urandom(6_000_000))
    with open_source(server.url(), changed(max_read_mb_s=2.0)) as source, source.open("/big") as file:
        begin = time.monotonic()
        file.read_at(0, 3_000_000)
        file.read_at(3_000_000, 3_000_000)  # the limit is the source's, not the call's
        seconds = time.monotonic() - begin
        assert source.bytes_read == 6_000_000
    assert 2.7 < seconds < 3.3


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


def test_answers_out_of_turn_are_put_in_order(server: RecordingSFTPServer, hosts: dict[str, HostSettings]) -> None:
    data = os.urandom(4_000_000)
    (server.root / "file").write_bytes(data)
    server.faults.max_answer_bytes = 100_001

    def hold_back_every_other(operation: SFTPOperation) -> None:
        server.faults.read_delay_s = 0.01 if (operation.offset or 0) // 100_000 % 2 else 0.0

    server.faults.before_read = hold_back_every_other
    with open_source(server.url(), hosts) as source:
        assert source.read_at("/file", 3, 3_999_990) == data[3:3_999_993]
        assert source.bytes_read == server.bytes_sent == 3_999_990


def test_folders_and_links_are_listed_alike(server: RecordingSFTPServer, hosts: dict[str, HostSettings]) -> None:
    for number in range(250):  # more than one answer holds
        (server.root / "run" / f"step_{number}").mkdir(parents=True)
    (server.root / "run" / "file").write_bytes(b"1234567")
    (server.root / "run" / "file").touch()
    (server.root / "run" / "latest").symlink_to("step_7")
    (server.root / "run" / "gone").symlink_to("step_999")
    with open_source(server.url(), hosts) as source:
        listed = {entry.name: entry for entry in source.list_dir("/run")}
        assert list(listed) == sorted(path.name for path in (server.root / "run").iterdir())
        file, link, dangling = listed["file"], listed["latest"], listed["gone"]
        assert file.stat is not None
        assert (file.stat.size, file.stat.kind, file.is_link, file.path) == (7, "file", False, "/run/file")
        assert file.stat.mtime_ns // 10**9 == int((server.root / "run" / "file").stat().st_mtime)
        assert link.stat is not None
        assert (link.stat.kind, link.is_link) == ("folder", True)
        assert (dangling.stat, dangling.is_link) == (None, True)
        assert source.realpath("/run/latest") == "/run/step_7"
        several = source.list_dirs(["/run/step_1", "/nowhere", "/run"])
        assert (several["/run/step_1"], several["/nowhere"], len(several["/run"])) == ([], [], 253)
        assert source.stat("/run/latest").kind == "folder"
    names = [operation.name for operation in server.ops]
    assert set(names) <= READING
    assert server.num_connections == 1


@pytest.mark.skipif(find_sshd() is None, reason="OpenSSH's sshd is not installed")
def test_openssh_serves_the_same_as_the_recording_server(
    tmp_path: Path, transport: Literal["openssh", "asyncssh"]
) -> None:
    root = tmp_path / "root"
    data = os.urandom(5_000_000)
    (root / "run").mkdir(parents=True)
    (root / "run" / "file").write_bytes(data)
    (root / "latest").symlink_to("run")
    (root / "gone").symlink_to("nowhere")
    with TrainingBox(root, tmp_path / "state", kind="sshd") as box:
        settings = HostSettings(
            url=box.url(),
            known_hosts=str(box.known_hosts),
            identity_file=str(box.identity_file),
            transport=transport,
        )
        with open_source(box.url(), {"box": settings}) as source:
            listed = {entry.name: entry for entry in source.list_dir(str(root))}
            assert list(listed) == ["gone", "latest", "run"]
            assert (listed["gone"].stat, listed["latest"].stat) == (None, source.stat(str(root / "run")))
            assert source.realpath(str(root / "latest" / "file")) == str(root / "run" / "file")
            for path in (root / "run" / "nothing", root / "run" / "file" / "inside"):
                with pytest.raises(CheckpointNotFound, match="nothing lies at"):
                    source.open(str(path))
            with source.open(str(root / "latest" / "file")) as file:
                assert file.stat.size == len(data)
                assert file.read_at(1, len(data) - 2) == data[1:-1]
                file.check_unchanged()


def test_addresses_and_paths_are_the_same_whoever_reads(
    server: RecordingSFTPServer, hosts: dict[str, HostSettings]
) -> None:
    (server.root / "run a#1").mkdir()
    (server.root / "run a#1" / "übung").write_bytes(b"x")
    with open_source(server.url(), hosts) as source:
        assert source.path_of(server.url("run%20a%231/%C3%BCbung")) == "/run a#1/übung"
        assert source.url_of("/run a#1/übung") == server.url("run%20a%231/%C3%BCbung")
        assert source.path_of(f"ssh://reader@127.0.0.1:{server.port}") == "."
        assert [entry.path for entry in source.list_dir("/run a#1")] == ["/run a#1/übung"]
        with source.open("/run a#1/übung") as file:
            assert (file.read_at(0, 1), file.display) == (b"x", source.url_of(file.path))


def test_blocks_stay_small_though_the_server_offers_more(
    server: RecordingSFTPServer, hosts: dict[str, HostSettings]
) -> None:
    (server.root / "file").write_bytes(os.urandom(3_000_000))
    with open_source(server.url(), hosts) as source:
        source.read_at("/file", 0, 3_000_000)
    assert max(operation.size or 0 for operation in server.ops) == 255 * 1024


# What is wrong with the file.


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
    assert not out.exists()


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
    assert not out.exists()


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
    server.faults.before_read, server.faults.deny_paths = None, frozenset({"/c.pt", "/closed"})
    with open_source(server.url(), hosts) as source:
        for look in (source.stat, source.open):
            with pytest.raises(CheckpointError, match=r"does not let this user read '/c\.pt'; check its permissions"):
                look("/c.pt")
    assert server.num_connections == 2  # a refusal is an answer, and no reason to connect again


def test_an_error_of_the_hosts_disk_is_no_network_error(
    server: RecordingSFTPServer, hosts: dict[str, HostSettings]
) -> None:
    (server.root / "file").write_bytes(b"1234")

    def fail(_operation: SFTPOperation) -> None:
        raise asyncssh.SFTPFailure("Input/output error")

    server.faults.before_read = fail
    with open_source(server.url(), hosts) as source, source.open("/file") as file:
        with pytest.raises(CheckpointError, match="failed to read '/file': Input/output error"):
            file.read_at(0, 4)
        server.faults.before_read = None
        assert file.read_at(0, 4) == b"1234"
    assert server.num_connections == 1
