"""Zip files that torch.save never wrote: each is read without harm or refused."""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
import struct
import subprocess
import sys
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_core.checkpoints.local_source import LocalSource
from dflash_core.checkpoints.source_base import RateLimit
from dflash_core.checkpoints.torch_zip import TorchZip
from dflash_core.checkpoints.values import CheckpointCutOff
from dflash_core.errors import CheckpointCorrupt, UnsupportedCheckpoint
from tests.dflash_core.checkpoints.checkpoint_files import drafter_tensors

FULL = 0xFFFF_FFFF


@dataclasses.dataclass(kw_only=True)
class Record:
    """One record as it is written; what the index says of it may differ."""

    name: str
    data: bytes
    size: int | None = None
    offset: int | None = None
    crc: int | None = None
    method: int = 0
    flags: int = 0
    is_listed: bool = True


def write_zip(
    path: Path,
    records: list[Record],
    *,
    count: int | None = None,
    index_offset: int | None = None,
    index_size: int | None = None,
    before_end: bytes = b"",
    comment: bytes = b"",
) -> Path:
    """Write a zip file, or what looks like one."""
    out, index, num_listed = io.BytesIO(), b"", 0
    for record in records:
        name = record.name.encode()
        at = out.tell()
        crc = zlib.crc32(record.data) if record.crc is None else record.crc
        head = struct.pack("<HHHHHIII", 20, record.flags, record.method, 0, 0, crc, len(record.data), len(record.data))
        out.write(b"PK\x03\x04" + head + struct.pack("<HH", len(name), 0) + name + record.data)
        if not record.is_listed:
            continue
        num_listed += 1
        size = len(record.data) if record.size is None else record.size
        offset = at if record.offset is None else record.offset
        wide = struct.pack("<HHQQQ", 1, 24, size, size, offset) if max(size, offset) >= FULL else b""
        fields = (FULL, FULL) if wide else (size, size)
        index += b"PK\x01\x02" + struct.pack("<HHHHHHI", 20, 20, record.flags, record.method, 0, 0, crc)
        index += struct.pack("<IIHHHHHII", *fields, len(name), len(wide), 0, 0, 0, 0, FULL if wide else offset)
        index += name + wide
    start = out.tell()
    out.write(index + before_end)
    listed = num_listed if count is None else count
    size, at = len(index) if index_size is None else index_size, start if index_offset is None else index_offset
    out.write(struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, listed, listed, size, at, len(comment)) + comment)
    path.write_bytes(out.getvalue())
    return path


@contextmanager
def opened(path: Path) -> Iterator[TorchZip]:
    with LocalSource(RateLimit(None)) as source, source.open(str(path)) as file:
        yield TorchZip(file)


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    """The tensors of the file that is tampered with."""
    return drafter_tensors(num_layers=1)


@pytest.fixture
def records(tensors: dict[str, torch.Tensor]) -> list[Record]:
    """The records of a whole file."""
    content = io.BytesIO()
    torch.save(tensors, content)
    with zipfile.ZipFile(content) as archive:
        return [Record(name=name, data=archive.read(name)) for name in archive.namelist()]


def named(records: list[Record], end: str) -> Record:
    (record,) = (record for record in records if record.name.endswith(end))
    return record


def test_a_file_written_anew_by_these_tests_is_read(
    tmp_path: Path, records: list[Record], tensors: dict[str, torch.Tensor]
) -> None:
    with opened(write_zip(tmp_path / "c.pt", records)) as container:
        assert container.tensors.keys() == tensors.keys()


def test_a_zip_bomb_is_refused_before_it_is_unpacked(tmp_path: Path, records: list[Record]) -> None:
    bomb = zlib.compressobj(9, zlib.DEFLATED, -15)
    named(records, "/data/0").data = bomb.compress(bytes(64 << 20)) + bomb.flush()
    named(records, "/data/0").method = 8
    with pytest.raises(UnsupportedCheckpoint, match="compressed"), opened(write_zip(tmp_path / "c.pt", records)):
        pass
    pickle_record = named(records, "data.pkl")
    packed = tmp_path / "real.pt"
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(pickle_record.name, pickle_record.data + bytes(64 << 20))
    with pytest.raises(UnsupportedCheckpoint, match="compressed"), opened(packed):
        pass


def test_an_encrypted_record_is_refused(tmp_path: Path, records: list[Record]) -> None:
    named(records, "/data/0").flags = 1
    with pytest.raises(UnsupportedCheckpoint, match="encrypted"), opened(write_zip(tmp_path / "c.pt", records)):
        pass


@pytest.mark.parametrize("shift", [0, 1, 30, 64])
def test_records_that_overlap_are_corrupt(tmp_path: Path, records: list[Record], shift: int) -> None:
    path = write_zip(tmp_path / "whole.pt", records)
    with zipfile.ZipFile(path) as archive:
        first = archive.getinfo(named(records, "/data/0").name).header_offset
    named(records, "/data/1").offset = first + shift
    with pytest.raises(CheckpointCorrupt, match="overlaps"), opened(write_zip(tmp_path / "c.pt", records)):
        pass


def test_many_records_over_one_another_are_corrupt(tmp_path: Path, records: list[Record]) -> None:
    # Each quotes the next one's header as its data: a bomb without a compressor's loops.
    for record in records[1:]:
        record.size = 1 << 20
    with pytest.raises(CheckpointCorrupt, match="overlaps"), opened(write_zip(tmp_path / "c.pt", records)):
        pass


@pytest.mark.parametrize("name", ["../../evil", "/etc/evil", "c.pt/../../evil", "C:\\evil", "", "archive/data/../0"])
def test_names_that_lead_out_of_the_folder_lead_nowhere(
    tmp_path: Path, records: list[Record], tensors: dict[str, torch.Tensor], name: str
) -> None:
    folder = tmp_path / "inner"
    folder.mkdir()
    before = sorted(os.listdir(tmp_path))
    path = write_zip(folder / "c.pt", [*records, Record(name=name, data=b"evil")])
    with opened(path) as container:
        assert container.tensors.keys() == tensors.keys()
        places = {key: at << 20 for at, key in enumerate(tensors)}
        assert all(
            piece.data.end <= path.stat().st_size for read in container.plan(places).reads for piece in read.pieces
        )
    assert sorted(os.listdir(tmp_path)) == before
    assert os.listdir(folder) == ["c.pt"]


def test_a_storage_that_is_named_out_of_the_folder_is_corrupt(tmp_path: Path, records: list[Record]) -> None:
    pickled = named(records, "data.pkl")
    pickled.data = pickled.data.replace(b"X\x01\x00\x00\x000", b"X\x0b\x00\x00\x00/etc/passwd")
    with pytest.raises(CheckpointCorrupt, match="found none"), opened(write_zip(tmp_path / "c.pt", records)):
        pass


@pytest.mark.parametrize("end", ["data.pkl", "/data/0"])
def test_a_name_that_is_listed_twice_is_corrupt(tmp_path: Path, records: list[Record], end: str) -> None:
    twice = dataclasses.replace(named(records, end), data=b"another")
    for both in ([*records, twice], [twice, *records]):
        with pytest.raises(CheckpointCorrupt), opened(write_zip(tmp_path / "c.pt", both)):
            pass


def test_a_name_that_differs_in_its_folder_alone_is_corrupt(tmp_path: Path, records: list[Record]) -> None:
    other = Record(name="data.pkl", data=named(records, "data.pkl").data)
    with pytest.raises(CheckpointCorrupt), opened(write_zip(tmp_path / "c.pt", [*records, other])):
        pass


@pytest.mark.parametrize("size", [FULL, FULL + 1, 1 << 60, (1 << 64) - 1])
@pytest.mark.parametrize("end", ["data.pkl", "/data/0", "byteorder"])
def test_a_record_larger_than_its_file_is_corrupt(tmp_path: Path, records: list[Record], end: str, size: int) -> None:
    named(records, end).size = size
    with pytest.raises(CheckpointCorrupt, match="overlaps"), opened(write_zip(tmp_path / "c.pt", records)):
        pass


@pytest.mark.parametrize("offset", [1 << 20, FULL - 1, 1 << 60, (1 << 64) - 1])
def test_a_record_that_begins_outside_its_file_is_corrupt(tmp_path: Path, records: list[Record], offset: int) -> None:
    named(records, "/data/0").offset = offset
    with pytest.raises(CheckpointCorrupt), opened(write_zip(tmp_path / "c.pt", records)):
        pass


@pytest.mark.parametrize(
    "claims",
    [
        {"index_offset": 1 << 31},
        {"index_offset": 0},
        {"index_size": 0},
        {"index_size": 1 << 31},
        {"index_size": FULL},
        {"count": 0xFFFF},
        {"index_offset": FULL, "index_size": FULL},
    ],
)
def test_an_index_that_is_not_where_the_end_record_says_is_corrupt(
    tmp_path: Path, records: list[Record], claims: dict[str, Any]
) -> None:
    with pytest.raises(CheckpointCorrupt), opened(write_zip(tmp_path / "c.pt", records, **claims)):
        pass


def test_a_shorter_count_than_the_index_holds_hides_no_storage(tmp_path: Path, records: list[Record]) -> None:
    path = write_zip(tmp_path / "c.pt", records, count=2)
    with pytest.raises(CheckpointCorrupt, match="found none"), opened(path):
        pass


@pytest.mark.parametrize(
    "claims",
    [
        (1 << 60, 100, 100),
        (1, 1 << 60, 100),
        (1, 100, 1 << 60),
        ((1 << 64) - 1, (1 << 64) - 1, (1 << 64) - 1),
        (0, 0, 0),
    ],
)
def test_a_wide_end_record_that_claims_too_much_is_corrupt(
    tmp_path: Path, records: list[Record], claims: tuple[int, int, int]
) -> None:
    whole = write_zip(tmp_path / "whole.pt", records).read_bytes()
    end = whole.rindex(b"PK\x05\x06")
    count, size, offset = claims
    end64 = struct.pack("<4sQHHIIQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, size, offset)
    for end64_offset in (end, 0, (1 << 64) - 1, end + 10):
        locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, end64_offset, 1)
        (tmp_path / "c.pt").write_bytes(whole[:end] + end64 + locator + whole[end:])
        with pytest.raises(CheckpointCorrupt), opened(tmp_path / "c.pt"):
            pass


def test_of_two_end_records_that_at_the_end_counts(
    tmp_path: Path, records: list[Record], tensors: dict[str, torch.Tensor]
) -> None:
    inner = struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, 0, 0, 0, 0, 0)
    with pytest.raises(CheckpointCorrupt), opened(write_zip(tmp_path / "c.pt", records, before_end=inner)):
        pass
    # Two that both fit the end of the file: one in the comment of the other.
    path = write_zip(tmp_path / "c.pt", records, comment=inner)
    with pytest.raises(CheckpointCorrupt), opened(path):
        pass
    with opened(write_zip(tmp_path / "c.pt", records, comment=b"PK\x05\x06 is how it ends" + bytes(40))) as container:
        assert container.tensors.keys() == tensors.keys()


@pytest.mark.parametrize("change", [-4, -1, 1, 4])
def test_a_record_of_another_size_than_its_storage_is_corrupt(
    tmp_path: Path, records: list[Record], change: int
) -> None:
    record = named(records, "/data/0")
    record.data = record.data[:change] if change < 0 else record.data + bytes(change)
    with pytest.raises(CheckpointCorrupt, match="needs a record of"), opened(write_zip(tmp_path / "c.pt", records)):
        pass


def test_a_record_that_is_missing_is_corrupt(tmp_path: Path, records: list[Record]) -> None:
    named(records, "/data/0").is_listed = False
    with pytest.raises(CheckpointCorrupt, match="found none"), opened(write_zip(tmp_path / "c.pt", records)):
        pass


@pytest.mark.parametrize("cut", [1, 21, 22, 23, 60, 5000])
def test_a_file_without_its_end_is_cut_off(tmp_path: Path, records: list[Record], cut: int) -> None:
    path = write_zip(tmp_path / "c.pt", records)
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(CheckpointCutOff), opened(path):
        pass


# Tensors that are not what they say.


class FakeStorage:
    def __init__(self, count: Any, key: str = "0") -> None:
        self.pid = ("storage", torch.FloatStorage, key, "cpu", count)


class FakeTensor:
    def __init__(self, count: Any, offset: Any, shape: tuple[Any, ...], strides: tuple[Any, ...]) -> None:
        self.args: tuple[Any, ...] = (FakeStorage(count), offset, shape, strides, False, OrderedDict())

    def __reduce__(self) -> Any:
        return torch._utils._rebuild_tensor_v2, self.args


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        return value.pid if isinstance(value, FakeStorage) else None


def write_tensor(path: Path, tensor: FakeTensor) -> Path:
    content = io.BytesIO()
    _Pickler(content, protocol=2).dump({"fc.weight": tensor})
    return write_zip(
        path, [Record(name="c/data.pkl", data=content.getvalue()), Record(name="c/data/0", data=bytes(400))]
    )


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (FakeTensor(-1, 0, (4,), (1,)), "in a"),
        (FakeTensor(1 << 60, 0, (4,), (1,)), "needs a record of"),
        (FakeTensor(1 << 80, 0, (4,), (1,)), "in a"),
        (FakeTensor(True, 0, (4,), (1,)), "in a"),
        (FakeTensor(100, -1, (4,), (1,)), "impossible shape"),
        (FakeTensor(100, 0, (-4,), (1,)), "impossible shape"),
        (FakeTensor(100, 3, (4,), (-1,)), "impossible shape"),
        (FakeTensor(100, 0, (4, 4), (1,)), "impossible shape"),
        (FakeTensor(100, 0, (1,) * 17, (1,) * 17), "impossible shape"),
        (FakeTensor(100, 0, (1 << 62, 1 << 62), (0, 0)), "repeats a storage"),
        (FakeTensor(100, 0, (1 << 40,), (0,)), "repeats a storage"),
        (FakeTensor(100, 0, (300_000,), (0,)), "repeats a storage"),
        (FakeTensor(100, 97, (4,), (1,)), "outside its storage"),
        (FakeTensor(100, 0, (2, 2), (1, 99)), "outside its storage"),
        (FakeTensor(100, 1 << 62, (1,), (1,)), "outside its storage"),
    ],
)
def test_a_tensor_that_cannot_be_is_refused(tmp_path: Path, tensor: FakeTensor, reason: str) -> None:
    path = write_tensor(tmp_path / "c.pt", tensor)
    with pytest.raises((CheckpointCorrupt, UnsupportedCheckpoint), match=f"fc.weight.*{reason}"), opened(path):
        pass


def test_a_small_tensor_that_repeats_its_storage_is_read(tmp_path: Path) -> None:
    with opened(write_tensor(tmp_path / "c.pt", FakeTensor(100, 0, (1000,), (0,)))) as container:
        assert container.tensors["fc.weight"].size_bytes == 4000


# Memory: in a process of its own with a limit.

OPEN_IT = """
import resource, sys
from dflash_core.checkpoints.local_source import LocalSource
from dflash_core.checkpoints.source_base import RateLimit
from dflash_core.checkpoints.torch_zip import TorchZip
with open("/proc/self/statm") as file:
    now = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (now + (150 << 20), now + (150 << 20)))
source = LocalSource(RateLimit(None))
try:
    TorchZip(source.open(sys.argv[1]))
    print("read", source.bytes_read)
except Exception as error:
    print(type(error).__name__, source.bytes_read, error)
"""


def write_hole(path: Path, records: list[Record], end: str, *, grows: bool) -> None:
    """Write a zip file with a gigabyte behind the data of one record, as part of it or not; it takes no disk."""
    hole = 1 << 30
    whole = write_zip(path, records).read_bytes()
    record = named(records, end)
    with zipfile.ZipFile(path) as archive:
        offsets = {info.filename: info.header_offset for info in archive.infolist()}
        index_offset = archive.start_dir
    split = offsets[record.name] + 30 + len(record.name) + len(record.data)
    for other in records:
        other.offset = offsets[other.name] + (hole if offsets[other.name] >= split else 0)
    record.size = len(record.data) + (hole if grows else 0)
    tail = write_zip(path, records, index_offset=index_offset + hole).read_bytes()[split:]
    with path.open("wb") as file:
        file.write(whole[:split])
        file.seek(hole, os.SEEK_CUR)
        file.write(tail)


def open_with_little_memory(path: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", OPEN_IT, str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).parents[3],
    )
    assert done.returncode == 0, done.stderr[-1000:]
    return done.stdout


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("end", ["data.pkl", "byteorder"])
def test_a_gigabyte_where_a_few_kilobytes_belong_is_not_read(
    tmp_path: Path, records: list[Record], end: str, is_first: bool
) -> None:
    records.sort(key=lambda record: record.name.endswith(end), reverse=is_first)
    write_hole(tmp_path / "c.pt", records, end, grows=True)
    name, bytes_read, message = open_with_little_memory(tmp_path / "c.pt").split(" ", 2)
    assert name == "UnsupportedCheckpoint"
    assert int(bytes_read) < 1 << 20
    assert "at most 67108864 are read into memory" in message


@pytest.mark.parametrize(("end", "grows"), [("data.pkl", False), ("serialization_id", True), ("/data/0", False)])
def test_a_gigabyte_that_is_not_needed_is_not_read(
    tmp_path: Path, records: list[Record], end: str, grows: bool
) -> None:
    write_hole(tmp_path / "c.pt", records, end, grows=grows)
    name, bytes_read = open_with_little_memory(tmp_path / "c.pt").split()
    assert name == "read"
    assert int(bytes_read) < 1 << 20
