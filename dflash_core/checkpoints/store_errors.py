"""What the errors of disks and object stores mean, told once for every library that raises them.

The libraries are optional, so theirs are known by the names of their classes, by HTTP status and by
the code that a store gives.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from typing import Any, Literal

from dflash_core.errors import CheckpointError, CheckpointNotFound, DFlashEvalError, HostUnreachable, one_line

Meaning = Literal["gone", "denied", "login", "unreachable", "busy", "other"]

_UNREACHABLE_ERRNOS = {
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.ENETDOWN,
    errno.ENETUNREACH,
    errno.ENETRESET,
    errno.ENOTCONN,  # a mounted remote folder whose connection is gone
    errno.ETIMEDOUT,
}
_BUSY_ERRNOS = {errno.EAGAIN, errno.EBUSY, errno.EREMOTEIO}
_GONE_ERRNOS = {errno.ENOENT, errno.ENOTDIR, errno.ESTALE}
# Classes of botocore, requests, aiohttp, httpx, google-auth and azure-core.
_UNREACHABLE_NAMES = {
    "ConnectionError",
    "HTTPClientError",
    "ClientConnectionError",
    "ClientPayloadError",
    "TransportError",
    "ServiceRequestError",
    "ServiceResponseError",
    "gaierror",
}
_LOGIN_NAMES = {
    "NoCredentialsError",
    "PartialCredentialsError",
    "CredentialRetrievalError",
    "ProfileNotFound",
    "SSOError",
    "TokenRetrievalError",
    "GoogleAuthError",
    "ClientAuthenticationError",
}
_LOGIN_CODES = {
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
    "ExpiredToken",
    "InvalidToken",
    "TokenRefreshRequired",
    "RequestTimeTooSkewed",
}


def is_passing(error: BaseException) -> bool:
    """Tell whether the same request may well succeed a little later."""
    return _meaning(error) in ("unreachable", "busy")


def translated(error: BaseException, where: str) -> DFlashEvalError:
    """Return the error of this project for one of a library; one of this project stays itself.

    Args:
        error: as raised.
        where: the path or URL that was asked for.
    """
    if isinstance(error, DFlashEvalError):
        return error
    reason = _reason(error)
    match _meaning(error):
        case "gone":
            return CheckpointNotFound(f"nothing lies at {where!r}; check the path")
        case "denied":
            return CheckpointError(f"cannot read {where!r}: {reason}; check who may read it")
        case "login":
            return HostUnreachable(f"the store of {where!r} refuses the login: {reason}; check the credentials")
        case "unreachable":
            return HostUnreachable(f"the store of {where!r} gives no answer: {reason}; check that it can be reached")
        case "busy":
            return HostUnreachable(f"the store of {where!r} cannot answer now: {reason}; try again later")
        case "other":
            return CheckpointError(f"cannot read {where!r}: {reason}; check the path and what keeps it")


def _meaning(error: BaseException) -> Meaning:
    for one in _with_causes(error):
        found = _own_meaning(one)
        if found != "other":
            return found
    return "other"


def _own_meaning(error: BaseException) -> Meaning:
    names = {cls.__name__ for cls in type(error).__mro__}
    code = error.errno if isinstance(error, OSError) else None
    status = _http_status(error)
    if names & _LOGIN_NAMES or _store_code(error) in _LOGIN_CODES or status == 401:
        return "login"
    if isinstance(error, FileNotFoundError | NotADirectoryError) or code in _GONE_ERRNOS or status in (404, 410):
        return "gone"
    if isinstance(error, PermissionError):
        # Its cause may know better: a refused login comes as a missing permission too.
        return "login" if any(_store_code(one) in _LOGIN_CODES for one in _with_causes(error)) else "denied"
    if status == 403:
        return "denied"
    if isinstance(error, ConnectionError | TimeoutError) or code in _UNREACHABLE_ERRNOS or names & _UNREACHABLE_NAMES:
        return "unreachable"
    if code in _BUSY_ERRNOS or status in (408, 429) or (status or 0) >= 500:
        return "busy"
    return "other"


def _with_causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and what it was raised from, a few steps back."""
    for _ in range(5):
        if error is None:
            return
        yield error
        error = error.__cause__


def _store_code(error: BaseException) -> str | None:
    """Return the code in an answer of S3, as botocore keeps it."""
    response: Any = getattr(error, "response", None)
    details = response.get("Error") if isinstance(response, dict) else None
    return str(details.get("Code")) if isinstance(details, dict) else None


def _http_status(error: BaseException) -> int | None:
    """Return the HTTP status that an error carries: of aiohttp, gcsfs, azure-core, or botocore."""
    response: Any = getattr(error, "response", None)
    about = response.get("ResponseMetadata") if isinstance(response, dict) else None
    if isinstance(about, dict):
        return about.get("HTTPStatusCode")
    # One after the other: aiohttp warns of whoever asks for `code`.
    found = (getattr(error, name, None) for name in ("status", "status_code", "code"))
    return next((one for one in found if isinstance(one, int)), None)


def _reason(error: BaseException) -> str:
    if isinstance(error, TimeoutError) and not str(error):
        return "it took too long"
    if isinstance(error, OSError) and error.strerror:
        return one_line(Exception(error.strerror))
    return one_line(error)
