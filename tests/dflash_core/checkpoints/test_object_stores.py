"""What only stores behind fsspec can do wrong: answer late, twice, in part, or not at all."""

from __future__ import annotations

import errno
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from s3fs import S3FileSystem

from dflash_core.checkpoints import fsspec_source as fsspec_source_module
from dflash_core.checkpoints import inspect_checkpoint, open_source, stream_checkpoint
from dflash_core.checkpoints.fsspec_source import MAX_REQUESTS, FsspecSource
from dflash_core.checkpoints.source_base import BLOCK_BYTES, ByteRange, RateLimit
from dflash_core.errors import (
    CheckpointChanged,
    CheckpointError,
    CheckpointNotFound,
    CheckpointVanished,
    HostUnreachable,
    InputError,
)
from tests.dflash_core.checkpoints.checkpoint_files import save_mixed
from tests.support.object_store import ACCESS_KEY, SECRET_KEY, ObjectStore, StoreFaults, StoreRequest

DATA = os.urandom(100_000)


@pytest.fixture(scope="module")
def running_store() -> Iterator[ObjectStore]:
    with ObjectStore() as running:
        yield running


@pytest.fixture
def store(running_store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    """The store with an object `run/file`; libraries give up at the first failure, so that our own tries are seen."""
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr(S3FileSystem, "retries", 1)
    monkeypatch.setitem(fsspec.config.conf, "s3", running_store.fsspec_settings)
    monkeypatch.setattr(fsspec_source_module, "RETRY_WAITS_S", (0.01, 0.02))
    running_store.faults = StoreFaults()
    running_store.put("run/file", DATA)
    running_store.forget()
    yield running_store
    assert running_store.written == []
    running_store.delete("run")


def opened(store: ObjectStore, **options: Any) -> FsspecSource:
    return FsspecSource(store.url("run"), RateLimit(None), **options)


def read(store: ObjectStore, offset: int = 10, size: int = 50_000, **options: Any) -> bytes:
    source = opened(store, **options)
    return source.read_at(source.path_of(store.url("run/file")), offset, size)


class TestFailuresThatPass:
    @pytest.mark.parametrize("fault", ["drops_left", "errors_left", "cuts_left"])
    def test_a_read_that_fails_twice_is_asked_for_again(self, store: ObjectStore, fault: str) -> None:
        setattr(store.faults, fault, 2)
        assert read(store) == DATA[10:50_010]
        assert getattr(store.faults, fault) == 0
        assert sum(request.method == "GET" for request in store.requests) == 3

    @pytest.mark.parametrize("fault", ["drops_left", "errors_left", "cuts_left"])
    def test_a_read_that_always_fails_ends_as_an_unreachable_host(self, store: ObjectStore, fault: str) -> None:
        setattr(store.faults, fault, 10_000)
        with pytest.raises(HostUnreachable, match=r"the store of 's3://.*/run/file'"):
            read(store)

    def test_a_silent_store_is_waited_for_as_long_as_was_said(self, store: ObjectStore) -> None:
        store.faults.silent = threading.Event()
        began = time.monotonic()
        with pytest.raises(HostUnreachable, match="took too long"):
            read(store, timeout_s=0.3)
        assert time.monotonic() - began < 5
        store.faults.silent.set()

    def test_a_file_system_that_gives_up_at_once_is_asked_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        failures = iter([ConnectionResetError("reset"), OSError(errno.EBUSY, "busy")])

        class Moody(MemoryFileSystem):
            protocol = "moody"

            def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
                if (failure := next(failures, None)) is not None:
                    raise failure
                return DATA[start:end]

            def info(self, path: str, **options: Any) -> dict[str, Any]:
                return {"name": path, "size": len(DATA), "type": "file"}

        monkeypatch.setattr(fsspec_source_module, "RETRY_WAITS_S", (0.0, 0.0))
        fsspec.register_implementation("moody", Moody, clobber=True)
        with open_source("moody://x", {}) as source:
            assert source.read_at("/x", 5, 20) == DATA[5:25]
            assert source.bytes_read == 20
            with pytest.raises(CheckpointError):
                source.read_at("/x", 5, 200_000)
            assert source.read_at("/x", 0, 1) == DATA[:1]


class TestWrongAnswers:
    def test_a_store_that_ignores_ranges_is_refused(self, store: ObjectStore) -> None:
        store.faults.ignore_ranges = True
        with pytest.raises(CheckpointError, match="100000 bytes came where 50000 were asked for"):
            read(store)

    def test_an_object_that_shrank_is_said_to_have_changed(self, store: ObjectStore) -> None:
        source = opened(store)
        with source.open(source.path_of(store.url("run/file"))) as file:
            store.put("run/file", DATA[:100])
            for offset in (50, 5_000):
                with pytest.raises(CheckpointChanged, match="100000 bytes .* became 100 bytes"):
                    file.read_at(offset, 100)
            store.delete("run/file")
            with pytest.raises(CheckpointVanished):
                file.read_at(0, 100)

    @pytest.mark.parametrize(
        ("error", "kind", "message"),
        [
            (("403 Forbidden", "AccessDenied"), CheckpointError, "who may read it"),
            (("403 Forbidden", "InvalidAccessKeyId"), HostUnreachable, "refuses the login"),
            (("403 Forbidden", "SignatureDoesNotMatch"), HostUnreachable, "refuses the login"),
            (("400 Bad Request", "ExpiredToken"), HostUnreachable, "refuses the login"),
            (("500 Internal Server Error", "InternalError"), HostUnreachable, "try again later"),
            (("418 Teapot", "Odd"), CheckpointError, "cannot read"),
        ],
    )
    def test_each_refusal_is_told_for_what_it_is(
        self, store: ObjectStore, error: tuple[str, str], kind: type[Exception], message: str
    ) -> None:
        store.faults.error, store.faults.errors_left = error, 100
        with pytest.raises(kind, match=message) as caught:
            read(store)
        assert "\n" not in str(caught.value)
        assert not any(secret in str(caught.value) for secret in (ACCESS_KEY, SECRET_KEY))

    def test_a_missing_bucket_and_an_impossible_one_are_told(self, store: ObjectStore) -> None:
        with pytest.raises(CheckpointNotFound, match="nothing lies at 's3://no-such-bucket/run'"):
            inspect_checkpoint("s3://no-such-bucket/run")
        with pytest.raises(CheckpointError, match="cannot read .*Invalid bucket name") as caught:
            inspect_checkpoint("s3://not a bucket/run")
        assert "\n" not in str(caught.value)

    def test_an_endpoint_where_nobody_listens_is_an_unreachable_host(
        self, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            endpoint = f"http://127.0.0.1:{unused.getsockname()[1]}"
            monkeypatch.setitem(fsspec.config.conf, "s3", store.fsspec_settings | {"endpoint_url": endpoint})
            with pytest.raises(HostUnreachable, match="gives no answer: Could not connect to the endpoint"):
                inspect_checkpoint(store.url("run"))

    def test_missing_credentials_are_a_refused_login(
        self, store: ObjectStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
            monkeypatch.delenv(name, raising=False)
        for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
            monkeypatch.setenv(name, str(tmp_path / "none"))
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        monkeypatch.setitem(fsspec.config.conf, "s3", {"endpoint_url": store.endpoint})
        with pytest.raises(HostUnreachable, match="refuses the login: Unable to locate credentials"):
            inspect_checkpoint(store.url("run"))


class TestReading:
    def test_a_few_requests_are_under_way_at_once_and_never_more_than_the_memory_allows(
        self, store: ObjectStore
    ) -> None:
        delivered, ahead, lock = 0, [], threading.Lock()

        def note(_request: StoreRequest) -> None:
            with lock:
                asked = sum(request.method == "GET" for request in store.requests)
                ahead.append(asked - delivered)
            time.sleep(0.02)

        def take(offset: int, data: bytes) -> None:
            nonlocal delivered
            assert data == DATA[offset : offset + 100]
            time.sleep(0.01)
            delivered += 1

        store.faults.before_read = note
        source = opened(store)
        with source.open(source.path_of(store.url("run/file"))) as file:
            file.read_ranges([ByteRange(offset=1000 * i, size=100) for i in range(60)], take)
        assert delivered == 60
        # The block that is being taken counts as delivered only afterwards.
        assert MAX_REQUESTS // 2 < max(ahead) <= MAX_REQUESTS + 1
        assert MAX_REQUESTS * BLOCK_BYTES <= 64 << 20

    def test_a_receiver_that_fails_ends_the_read(self, store: ObjectStore) -> None:
        def fail(_offset: int, _data: bytes) -> None:
            raise KeyError("mine")

        source = opened(store)
        with source.open(source.path_of(store.url("run/file"))) as file:
            with pytest.raises(KeyError, match="mine"):
                file.read_ranges([ByteRange(offset=i, size=10) for i in range(50)], fail)
            assert file.read_at(0, 10) == DATA[:10]

    def test_an_object_whose_key_ends_in_a_slash_is_its_folder(self, store: ObjectStore) -> None:
        store.put("run/step_1/", b"")
        store.put("run/step_2/", b"")
        store.put("run/step_2/model.pt", b"x")
        source = opened(store)
        path = source.path_of(store.url("run"))
        entries = source.list_dir(path)
        assert [(entry.name, entry.stat.kind) for entry in entries if entry.stat] == [
            ("file", "file"),
            ("step_1", "folder"),
            ("step_2", "folder"),
        ]
        assert source.list_dir(f"{path}/step_1") == []
        assert [entry.name for entry in source.list_dir(f"{path}/step_2")] == ["model.pt"]
        assert source.stat(f"{path}/step_1").kind == "folder"

    def test_an_index_takes_a_handful_of_requests(self, store: ObjectStore, tmp_path: Path) -> None:
        save_mixed(tmp_path / "c.pt", hidden=128)
        store.put("run/step_1/checkpoint.pt", (tmp_path / "c.pt").read_bytes())
        found = inspect_checkpoint(store.url("run/step_1"))
        assert store.bytes_sent == found.bytes_read < 150_000 < found.bytes_wanted
        assert len(store.requests) <= 12
        store.forget()
        result = stream_checkpoint(store.url("run/step_1"), tmp_path / "out.safetensors")
        assert store.bytes_sent == result.bytes_read
        assert {request.method for request in store.requests} == {"GET", "HEAD"}


class TestUrls:
    @pytest.mark.parametrize(
        ("url", "message"),
        [
            ("odd://x/y", r"no store is known by the scheme 'odd'; use a path, ssh://, s3://"),
            ("://x", "must begin with a scheme"),
            ("simplecache::s3://bucket/x", "chains stores"),
            ("zip://x.pt::s3://me:hush@bucket/x.zip", "chains stores"),
            ("ftp://me:hush@host/x", "a password or key in a ftp:// URL"),
            ("s3://key:hush@bucket/x", "a password or key in a s3:// URL"),
            ("https://host/x.pt?a=1&X-Amz-Signature=hush", "a password or key in a https:// URL"),
            ("zip://x.pt", "cannot read 'zip://'"),
        ],
    )
    def test_a_url_that_cannot_be_read_is_refused_in_one_line_without_its_secrets(self, url: str, message: str) -> None:
        with pytest.raises(InputError, match=message) as caught:
            open_source(url, {})
        assert "hush" not in str(caught.value)
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize("scheme", ["ssh", "sftp", "local"])
    def test_some_schemes_never_go_through_fsspec(self, scheme: str) -> None:
        with pytest.raises(InputError, match="is not read through fsspec"):
            FsspecSource(f"{scheme}://host/x", RateLimit(None))

    def test_a_missing_package_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        loaded = sys.modules["fsspec.registry"]._registry
        monkeypatch.delitem(loaded, "s3", raising=False)
        monkeypatch.setitem(sys.modules, "s3fs", None)
        with pytest.raises(InputError, match=r"^s3:// needs .* not installed: pip install 'dflash-eval\[s3\]'$"):
            open_source("s3://bucket/x", {})
        monkeypatch.delitem(loaded, "gs", raising=False)
        monkeypatch.setitem(sys.modules, "gcsfs", None)
        with pytest.raises(InputError, match=r"^gs:// needs .* not installed: .*gcsfs.*$"):
            open_source("gs://bucket/x", {})

    @pytest.mark.parametrize(
        ("url", "path"),
        [
            ("s3://bucket/a/b", "bucket/a/b"),
            ("memory://a/b", "/a/b"),
            ("memory:///a/b/", "/a/b"),
            ("ftp://me@host:2121/a/b/", "/a/b"),
            ("hdfs://name/a", "/a"),
            ("https://host/a/b.pt", "https://host/a/b.pt"),
        ],
    )
    def test_a_path_gets_back_the_scheme_and_the_host_of_its_url(self, url: str, path: str) -> None:
        assert fsspec_source_module._prefix(url, path) + path == url.rstrip("/")
