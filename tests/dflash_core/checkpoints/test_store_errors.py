from __future__ import annotations

import errno
import os
import socket

import aiohttp
import pytest
import yarl
from botocore import exceptions as botocore
from fsspec.exceptions import FSTimeoutError
from multidict import CIMultiDict, CIMultiDictProxy

from dflash_core.checkpoints.store_errors import is_passing, translated
from dflash_core.errors import CheckpointChanged, CheckpointError, CheckpointNotFound, HostUnreachable

URL = "s3://bucket/run"


def with_cause(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


def client_error(code: str, status: int = 400) -> botocore.ClientError:
    return botocore.ClientError(
        {"Error": {"Code": code, "Message": "m"}, "ResponseMetadata": {"HTTPStatusCode": status}}, "GetObject"
    )


def http_error(status: int) -> aiohttp.ClientResponseError:
    asked = aiohttp.RequestInfo(yarl.URL("https://host/x"), "GET", CIMultiDictProxy(CIMultiDict()))
    return aiohttp.ClientResponseError(asked, (), status=status, message="m")


@pytest.mark.parametrize(
    ("error", "kind", "passes"),
    [
        (FileNotFoundError(URL), CheckpointNotFound, False),
        (NotADirectoryError(errno.ENOTDIR, "not a folder"), CheckpointNotFound, False),
        (OSError(errno.ESTALE, "stale"), CheckpointNotFound, False),
        (client_error("NoSuchKey", 404), CheckpointNotFound, False),
        (http_error(404), CheckpointNotFound, False),
        (PermissionError(errno.EACCES, "denied"), CheckpointError, False),
        (with_cause(PermissionError("denied"), client_error("AccessDenied", 403)), CheckpointError, False),
        (with_cause(PermissionError("denied"), client_error("ExpiredToken", 400)), HostUnreachable, False),
        (http_error(401), HostUnreachable, False),
        (http_error(403), CheckpointError, False),
        (botocore.NoCredentialsError(), HostUnreachable, False),
        (botocore.ProfileNotFound(profile="p"), HostUnreachable, False),
        (botocore.EndpointConnectionError(endpoint_url="http://x"), HostUnreachable, True),
        (botocore.ReadTimeoutError(endpoint_url="http://x"), HostUnreachable, True),
        (botocore.ConnectTimeoutError(endpoint_url="http://x"), HostUnreachable, True),
        (botocore.SSLError(endpoint_url="http://x", error="e"), HostUnreachable, True),
        (aiohttp.ServerDisconnectedError(), HostUnreachable, True),
        (aiohttp.ClientPayloadError("cut"), HostUnreachable, True),
        (socket.gaierror(-2, "Name or service not known"), HostUnreachable, True),
        (ConnectionRefusedError(errno.ECONNREFUSED, "refused"), HostUnreachable, True),
        (BrokenPipeError(), HostUnreachable, True),
        (TimeoutError(), HostUnreachable, True),
        (FSTimeoutError(), HostUnreachable, True),
        (OSError(errno.ENOTCONN, "Transport endpoint is not connected"), HostUnreachable, True),
        (OSError(errno.EBUSY, "SlowDown"), HostUnreachable, True),
        (with_cause(OSError(errno.EREMOTEIO, "m"), client_error("InternalError", 500)), HostUnreachable, True),
        (http_error(429), HostUnreachable, True),
        (http_error(503), HostUnreachable, True),
        (OSError(errno.EIO, "Input/output error"), CheckpointError, False),
        (OSError(errno.EINVAL, "The requested range is not satisfiable"), CheckpointError, False),
        (botocore.ParamValidationError(report="Invalid bucket\nname"), CheckpointError, False),
        (ValueError("embedded null byte"), CheckpointError, False),
        (RuntimeError(), CheckpointError, False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_each_foreign_error_becomes_one_of_ours(error: Exception, kind: type[Exception], passes: bool) -> None:
    ours = translated(error, URL)
    assert type(ours) is kind
    assert URL in str(ours)
    assert "\n" not in str(ours)
    assert is_passing(error) == passes


def test_an_error_of_ours_stays_itself() -> None:
    error = CheckpointChanged("changed")
    assert translated(error, URL) is error


def test_an_error_without_words_is_named() -> None:
    assert "RuntimeError" in str(translated(RuntimeError(), URL))
    assert os.strerror(errno.EIO) in str(translated(OSError(errno.EIO, os.strerror(errno.EIO)), URL))
