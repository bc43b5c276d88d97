"""A real S3 server on loopback (moto's) that records what clients ask for and can misbehave on demand.

    with ObjectStore() as store:
        store.put("runs/step_1/model.safetensors", data)
        monkeypatch.setitem(fsspec.config.conf, "s3", store.fsspec_settings)
        inspect_checkpoint(store.url("runs/step_1"))
        assert store.written == []

It has one bucket of its own, lives in threads that end with the `with` block, and needs no network.
What the test itself puts there is not recorded.
"""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import boto3
from botocore.config import Config
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server

_TESTER = "dflash-test-writer"
_BUCKETS = itertools.count()
ACCESS_KEY, SECRET_KEY = "test-access-key", "test-secret-key"


@dataclass(frozen=True, kw_only=True)
class StoreRequest:
    """One request of a client."""

    method: str
    key: str
    """Name of the object, or empty for one about the bucket."""
    byte_range: str | None
    query: str


@dataclass(kw_only=True)
class StoreFaults:
    """What goes wrong; all may be changed while the server runs. Only reads of objects are hit."""

    drops_left: int = 0
    """Close the connection without an answer, this many times."""
    errors_left: int = 0
    """Answer this many times with `error`."""
    error: tuple[str, str] = ("503 Slow Down", "SlowDown")
    """HTTP status line and code of S3."""
    cuts_left: int = 0
    """Close the connection in the middle of the answer, this many times."""
    ignore_ranges: bool = False
    """Answer every request for a part with the whole object, as a careless proxy does."""
    silent: threading.Event | None = None
    """Answer nothing until it is set."""
    before_read: Callable[[StoreRequest], None] | None = None
    """Called before each read is answered, in the server's thread."""


class _QuietHandler(MotoRequestHandler):
    def log(self, *_args: Any, **_options: Any) -> None:
        pass


class ObjectStore:
    """An S3 server on 127.0.0.1, any free port, with one empty bucket, while the `with` block lasts."""

    def __init__(self) -> None:
        self.bucket = f"bucket-{next(_BUCKETS)}"
        self.faults = StoreFaults()
        self.requests: list[StoreRequest] = []
        """Every request of clients so far, in the order of arrival."""
        self.bytes_sent = 0
        """Bytes of object data sent so far."""
        self._moto = DomainDispatcherApplication(create_backend_app)

    @property
    def endpoint(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self._server.port}"

    @property
    def fsspec_settings(self) -> dict[str, str]:
        """What `fsspec.config.conf["s3"]` must hold to reach it."""
        return {"endpoint_url": self.endpoint, "key": ACCESS_KEY, "secret": SECRET_KEY}

    @property
    def environment(self) -> dict[str, str]:
        """The same for the environment of another process."""
        return {
            "FSSPEC_S3_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    @property
    def written(self) -> list[StoreRequest]:
        """Requests that are not reading; there must be none."""
        return [request for request in self.requests if request.method not in ("GET", "HEAD")]

    def url(self, key: str = "") -> str:
        """Return the URL of an object or a prefix."""
        return f"s3://{self.bucket}/{key}".rstrip("/")

    def put(self, key: str, data: bytes) -> None:
        """Store an object; a key that ends in a slash is what some tools leave for a folder."""
        self._client.put_object(Bucket=self.bucket, Key=key, Body=data)

    def delete(self, key: str) -> None:
        """Delete an object, or all of a prefix."""
        keys = [key, *(one["Key"] for one in self._listed(f"{key}/"))]
        for one in keys:
            self._client.delete_object(Bucket=self.bucket, Key=one)

    def forget(self) -> None:
        """Empty the record, so that a test can look at what comes next."""
        self.requests.clear()
        self.bytes_sent = 0

    def __enter__(self) -> ObjectStore:
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True, request_handler=_QuietHandler)
        self._thread = threading.Thread(target=self._server.serve_forever, name="object-store", daemon=True)
        self._thread.start()
        self._client = boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
            region_name="us-east-1",
            config=Config(user_agent_extra=_TESTER),
        )
        self._client.create_bucket(Bucket=self.bucket)
        return self

    def __exit__(self, *_exc: object) -> None:
        if self.faults.silent is not None:
            self.faults.silent.set()
        self._client.close()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=10)
        assert not self._thread.is_alive(), "the object store's thread did not end"

    def _listed(self, prefix: str) -> list[dict[str, Any]]:
        return self._client.list_objects_v2(Bucket=self.bucket, Prefix=prefix).get("Contents", [])

    def _answer(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if _TESTER in environ.get("HTTP_USER_AGENT", ""):
            return self._moto(environ, start_response)
        path = unquote(environ.get("RAW_URI", environ["PATH_INFO"]).partition("?")[0])
        request = StoreRequest(
            method=environ["REQUEST_METHOD"],
            key=path.removeprefix(f"/{self.bucket}").removeprefix("/"),
            byte_range=environ.get("HTTP_RANGE"),
            query=environ.get("QUERY_STRING", ""),
        )
        self.requests.append(request)
        if request.method != "GET" or not request.key:
            return self._moto(environ, start_response)
        return self._answer_read(request, environ, start_response)

    def _answer_read(self, request: StoreRequest, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        faults = self.faults
        if faults.before_read is not None:
            faults.before_read(request)
        if faults.silent is not None:
            faults.silent.wait()
        if faults.drops_left:
            faults.drops_left -= 1
            _hang_up(environ)
        if faults.errors_left:
            faults.errors_left -= 1
            status, code = faults.error
            body = f"<Error><Code>{code}</Code><Message>not now</Message></Error>".encode()
            start_response(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
            return [body]
        if faults.ignore_ranges:
            environ.pop("HTTP_RANGE", None)
        return self._sent(self._moto(environ, start_response), environ)

    def _sent(self, blocks: Iterable[bytes], environ: dict[str, Any]) -> Iterator[bytes]:
        cut = self.faults.cuts_left > 0
        self.faults.cuts_left -= cut
        for block in blocks:
            part = block[: len(block) // 2] if cut else block
            self.bytes_sent += len(part)
            yield part
            if cut:
                _hang_up(environ)


def _hang_up(environ: dict[str, Any]) -> None:
    """Close the connection that a request came on; what is written to it from now on is lost."""
    environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
    raise ConnectionAbortedError("closed on purpose")
