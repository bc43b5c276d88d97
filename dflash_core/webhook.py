"""Posting JSON to a web address that somebody else runs: bounded in time, and silent about the address.

Whoever knows a webhook's address may post to it, so neither it nor a header ever stands in a message: an
error says what happened and the host at most. Redirects are not followed: they could carry the headers to
another host.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dflash_core.errors import NotDelivered

PAUSES_S = (1.0, 5.0)
"""Before the second and third try."""
LONGEST_PAUSE_S = 30.0
"""The most that an answer's Retry-After is followed."""
_PASSING = frozenset({408, 425, 429})


@dataclass(frozen=True, kw_only=True, slots=True)
class Hook:
    """Where to post, and how long to wait."""

    url: str = field(repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    timeout_s: float = 10.0
    """For one answer, in seconds."""


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_details: Any) -> None:
        """Leave the answer as it is: an error with its status."""


def post(
    hook: Hook,
    payload: Mapping[str, Any],
    *,
    pauses_s: tuple[float, ...] = PAUSES_S,
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Post once with success, or give up: a try more than there are pauses.

    Args:
        hook: where to.
        payload: plain data.
        pauses_s: seconds before each further try, made where the next one may succeed; none: one try.
        pause: waits.

    Raises:
        NotDelivered: with the last try's reason; the address is not in it.
    """
    body = json.dumps(payload, allow_nan=False).encode()
    for number, pause_s in enumerate([*pauses_s, None], start=1):
        outcome = _try(hook, body)
        if outcome.problem is None:
            return
        if pause_s is None or not outcome.may_pass:
            tries = "1 try" if number == 1 else f"{number} tries"
            # Neither as cause nor as context: a traceback would show the address.
            raise NotDelivered(f"the notification was not delivered in {tries}: {outcome.problem}; see `notify`")
        pause(min(LONGEST_PAUSE_S, max(pause_s, outcome.wait_s)))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Outcome:
    problem: str | None = None
    may_pass: bool = False
    wait_s: float = 0.0


def _try(hook: Hook, body: bytes) -> _Outcome:
    try:
        request = urllib.request.Request(
            hook.url,
            data=body,
            headers={"Content-Type": "application/json", "User-Agent": "dflash-eval", **hook.headers},
            method="POST",
        )
        opener = urllib.request.build_opener(_NoRedirects)
        with opener.open(request, timeout=hook.timeout_s) as answer:
            status, headers = answer.status, answer.headers
    except urllib.error.HTTPError as error:
        status, headers = error.code, error.headers
        error.close()
    except (OSError, http.client.HTTPException) as error:
        return _Outcome(problem=_reason(error, hook.timeout_s), may_pass=True)
    except (ValueError, UnicodeError) as error:  # an address or header that cannot be sent
        return _Outcome(problem=f"the address or a header is malformed ({type(error).__name__})")
    if 200 <= status < 300:
        return _Outcome()
    return _Outcome(
        problem=f"the server answered with status {status}",
        may_pass=status >= 500 or status in _PASSING,
        wait_s=_seconds(headers.get("Retry-After")),
    )


def _reason(error: Exception, timeout_s: float) -> str:
    """Return why there was no answer, in our own words: a library's may hold the address."""
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(cause, TimeoutError):
        return f"no answer within {timeout_s:g} s"
    if isinstance(cause, ConnectionRefusedError):
        return "the server refused the connection"
    return f"no answer ({type(cause).__name__})"


def _seconds(text: str | None) -> float:
    try:
        return max(0.0, float(text or 0))
    except ValueError:  # a date; our own pause will do
        return 0.0
