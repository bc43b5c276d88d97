from __future__ import annotations

import ast
import inspect
import struct
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_core.checkpoints import open_source, sftp_packets
from dflash_core.checkpoints.sftp_packets import Answer, MalformedPacket
from dflash_core.config import HostSettings
from dflash_core.errors import DFlashEvalError

ROOT = Path(__file__).parents[3]
READING = {1: "INIT", 3: "OPEN", 4: "CLOSE", 5: "READ", 8: "FSTAT", 11: "OPENDIR", 12: "READDIR"} | {
    16: "REALPATH",
    17: "STAT",
    200: "EXTENDED",
}
REQUESTS = [
    sftp_packets.open_for_reading(b"/a"),
    sftp_packets.close(b"h"),
    sftp_packets.read(b"h", 1 << 40, 9),
    sftp_packets.stat_handle(b"h"),
    sftp_packets.stat_path(b"/a"),
    sftp_packets.open_folder(b"/a"),
    sftp_packets.read_folder(b"h"),
    sftp_packets.real_path(b"/a"),
    sftp_packets.limits(),
]


def string(value: bytes) -> bytes:
    return struct.pack(">I", len(value)) + value


def attributes(*, size: int | None, owner: bool, mode: int | None, mtime: int | None, extra: int) -> bytes:
    flags = (size is not None) | owner << 1 | (mode is not None) << 2 | (mtime is not None) << 3 | (extra > 0) << 31
    body = struct.pack(">I", flags)
    body += b"" if size is None else struct.pack(">Q", size)
    body += struct.pack(">II", 7, 8) if owner else b""
    body += b"" if mode is None else struct.pack(">I", mode)
    body += b"" if mtime is None else struct.pack(">II", 99, mtime)
    return body + (struct.pack(">I", extra) + (string(b"k") + string(b"value")) * extra if extra else b"")


ATTRIBUTES = st.fixed_dictionaries(
    {
        "size": st.none() | st.integers(0, 2**64 - 1),
        "owner": st.booleans(),
        "mode": st.none() | st.sampled_from([0o100644, 0o040755, 0o120777, 0o020666]),
        "mtime": st.none() | st.integers(0, 2**32 - 1),
        "extra": st.integers(0, 2),
    }
)


def test_every_request_that_exists_only_reads() -> None:
    makers = [
        function
        for _, function in inspect.getmembers(sftp_packets, inspect.isfunction)
        if inspect.signature(function).return_annotation == "Request"
    ]
    assert len(makers) == len(REQUESTS)
    assert {request.kind for request in REQUESTS} == set(READING) - {1}


def test_a_file_can_be_opened_in_no_other_way_than_for_reading() -> None:
    (opening,) = [request for request in REQUESTS if request.kind == 3]
    assert opening.payload == string(b"/a") + struct.pack(">II", 1, 0)
    assert list(inspect.signature(sftp_packets.open_for_reading).parameters) == ["path"]


def test_no_other_module_makes_requests_of_its_own() -> None:
    for name in ("openssh_pipe", "openssh_session", "openssh_source", "ssh_source"):
        tree = ast.parse((ROOT / "dflash_core" / "checkpoints" / f"{name}.py").read_text())
        calls = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Call)]
        assert not [call for call in calls if call.startswith(("Request(", "packets.Request(", "struct."))]
        packets = [call for call in calls if call.startswith("packets.packet(")]
        assert set(packets) <= {
            "packets.packet(packets.INIT, packets.VERSION)",
            "packets.packet(request.kind, self._last_number, request.payload)",
        }


def test_a_request_is_its_length_kind_number_and_payload() -> None:
    packet = sftp_packets.packet(5, 77, sftp_packets.read(b"h", 2**40, 9).payload)
    assert packet == struct.pack(">IBI", len(packet) - 4, 5, 77) + string(b"h") + struct.pack(">QI", 2**40, 9)


@given(st.lists(st.tuples(st.binary(max_size=9), ATTRIBUTES), max_size=4))
def test_names_are_taken_apart_as_they_were_put_together(entries: list[tuple[bytes, dict[str, int | None]]]) -> None:
    body = struct.pack(">I", len(entries))
    for name, attrs in entries:
        body += string(name) + string(b"-rw-r--r-- 1 me") + attributes(**attrs)  # type: ignore[arg-type]
    answer = Answer(sftp_packets.NAME, body)
    names = answer.names()
    assert answer.is_empty
    for found, (name, attrs) in zip(names, entries, strict=True):
        kind = {0o100644: "file", 0o040755: "folder"}.get(attrs["mode"] or 0, "other")
        assert (found.name, found.is_link) == (name, attrs["mode"] == 0o120777)
        assert (found.stat.size, found.stat.kind) == (attrs["size"] or 0, kind)
        assert found.stat.mtime_ns == (attrs["mtime"] or 0) * 10**9
    for cut in range(len(body)):
        with pytest.raises(MalformedPacket):
            Answer(sftp_packets.NAME, body[:cut]).names()


@given(st.binary(max_size=60))
def test_no_answer_takes_more_than_it_has(body: bytes) -> None:
    for take in (Answer.names, Answer.attributes, Answer.string, Answer.large_number, Answer.status):
        try:
            take(Answer(1, body))
        except MalformedPacket:
            continue


def test_a_status_may_lack_its_words() -> None:
    assert Answer(sftp_packets.STATUS, struct.pack(">I", 4)).status().message == ""


# A host that does not keep to the protocol: a script in the place of ssh.

NONSENSE = """
import os, struct, sys
stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
def string(value):
    return struct.pack(">I", len(value)) + value
def answer(kind, number, body):
    stdout.write(struct.pack(">IBI", len(body) + 5, kind, number) + body)
    stdout.flush()
attrs = struct.pack(">IQ", 1, 1000)
while True:
    head = stdin.read(9)
    if len(head) < 9:
        break
    length, kind, number = struct.unpack(">IBI", head)
    payload = stdin.read(length - 5)
    if kind == 1:
        answer(2, 3, b"")
    elif kind == 3:
        answer(102, number, string(b"h"))
    elif kind in (8, 17):
        answer(105, number, attrs)
    elif kind == 5:
        READ
    else:
        answer(101, number, struct.pack(">I", 0))
"""
ANSWERS = {
    "more_than_was_asked_for": "answer(103, number, string(b'x' * 2000))",
    "nothing": "answer(103, number, string(b''))",
    "a_false_length": "answer(103, number, struct.pack('>I', 5) + b'x' * 900)",
    "another_number": "answer(103, number + 1, string(b'x' * 1000))",
    "another_kind": "answer(102, number, string(b'h'))",
    "a_huge_packet": "stdout.write(struct.pack('>IBI', 2**32 - 1, 103, number) + b'x' * 100); stdout.flush()",
    "half_an_answer": "stdout.write(struct.pack('>IBI', 1009, 103, number) + b'xxxx'); stdout.flush(); os._exit(0)",
    "an_odd_status": "answer(101, number, struct.pack('>I', 77))",
    "success_without_data": "answer(101, number, struct.pack('>I', 0))",
}


@pytest.mark.parametrize("code", ANSWERS.values(), ids=ANSWERS)
def test_a_host_that_does_not_keep_to_the_protocol_gets_a_clear_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    monkeypatch.setattr("dflash_core.checkpoints.host_errors.RECONNECT_WAITS_S", (0.01,))
    (tmp_path / "host.py").write_text(NONSENSE.replace("READ\n", f"{code}\n"))
    (tmp_path / "ssh").write_text(f"#!/bin/sh\nexec {sys.executable} -S -E {tmp_path}/host.py\n")
    (tmp_path / "ssh").chmod(0o755)
    (tmp_path / "known_hosts").write_text("")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    settings = HostSettings(
        url="ssh://box", known_hosts=str(tmp_path / "known_hosts"), timeout_s=5, transport="openssh"
    )
    got: list[bytes] = []
    with open_source("ssh://box", {"box": settings}) as source, source.open("/file") as file:
        with pytest.raises(
            DFlashEvalError, match=r"lost box:22 while reading '/file'|failed to read '/file'"
        ) as raised:
            got.append(file.read_at(0, 1000))
        assert str(raised.value).isprintable()
    assert got == []
