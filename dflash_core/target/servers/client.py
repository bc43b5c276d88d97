"""HTTP to a server: one deadline per attempt, retries with growing waits, answers as JSON.

What is retried: no connection, a connection that breaks, a body that is cut off or is not JSON, and the
statuses that say "later" (408, 425, 429, 500, 502, 503, 504). An answer that never comes is waited for
twice. Everything else is final. The key is sent, and never said.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import httpx

from dflash_core.errors import ServerError

_LATER = frozenset({408, 425, 429, 500, 502, 503, 504})
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_MAX_MESSAGE = 200
QUICK_S = 30.0
"""Seconds that an answer may take which needs no completion; a server that hangs is told apart sooner."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Patience:
    """How long a server that fails is asked again."""

    attempts: int = 5
    """Of one request, the first included."""
    timeouts: int = 2
    """Attempts of one request that may run into its deadline."""
    first_wait_s: float = 0.5
    """Doubled after each attempt, and shortened at random so that requests do not come back together."""
    longest_wait_s: float = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """An answer that came back whole."""

    status: int
    data: Any
    """Parsed JSON; None of a refusal."""

    @property
    def is_refusal(self) -> bool:
        """Tell whether the server will not do it."""
        return self.status >= 300


class Client:
    """A connection pool to one server; an asynchronous context manager."""

    def __init__(self, base_url: str, *, key: str | None, timeout_s: float, patience: Patience) -> None:
        self._key = key
        self._timeout_s = timeout_s
        self._patience = patience
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._http = httpx.AsyncClient(
            base_url=base_url,
            headers=headers,
            # The deadline of an attempt covers the whole exchange, a body that trickles in included.
            timeout=None,
            limits=httpx.Limits(max_connections=None),
            # Without encryption there is no certificate, and reading those of the system takes a while.
            verify=base_url.startswith("https:"),
            # A proxy of the environment cannot reach this machine's own addresses.
            trust_env=httpx.URL(base_url).host not in _LOOPBACK,
        )

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def get(self, path: str, *, may_refuse: bool = False) -> Reply:
        """Ask for a path, quickly (see `post`)."""
        return await self._ask("GET", path, None, may_refuse=may_refuse, is_quick=True)

    async def post(
        self, path: str, body: Mapping[str, Any], *, may_refuse: bool = False, is_quick: bool = False
    ) -> Reply:
        """Send JSON to a path and return the answer.

        Args:
            path: below the base URL.
            body: what is sent.
            may_refuse: return a refusal instead of raising it.
            is_quick: nothing is completed, so that the answer comes within `QUICK_S`.

        Raises:
            ServerError: the server cannot be reached, is too slow, refuses, or its answer is not whole.
        """
        return await self._ask("POST", path, body, may_refuse=may_refuse, is_quick=is_quick)

    async def _ask(
        self, method: str, path: str, body: Mapping[str, Any] | None, *, may_refuse: bool, is_quick: bool
    ) -> Reply:
        deadline_s = min(self._timeout_s, QUICK_S) if is_quick else self._timeout_s
        attempt = num_timeouts = 0
        while True:
            attempt += 1
            problem: str | Reply
            wait_s: float | None = None
            try:
                async with asyncio.timeout(deadline_s):
                    response = await self._http.request(method, path, json=body)
                problem = self._read(response, path, may_refuse=may_refuse)
                wait_s = _asked_wait(response)
            except TimeoutError:
                num_timeouts += 1
                setting = "completions.timeout_s = " if deadline_s == self._timeout_s else ""
                problem = f"gave no answer within {setting}{deadline_s:g} s"
            except (httpx.TransportError, httpx.DecodingError) as error:
                problem = _say(error)
            if isinstance(problem, Reply):
                return problem
            if attempt >= self._patience.attempts or num_timeouts >= self._patience.timeouts:
                tries = f"{path}, {attempt} attempt{'s' if attempt > 1 else ''}"
                raise ServerError(f"{problem} ({tries}); check that it runs, and completions.base_url")
            await asyncio.sleep(self._wait_s(attempt, wait_s))

    def _read(self, response: httpx.Response, path: str, *, may_refuse: bool) -> Reply | str:
        """Return the reply, or what is wrong with it where asking again may help."""
        status = response.status_code
        if status in _LATER:
            return f"answered with status {status}{self._message(response)}"
        if status < 300:
            try:
                return Reply(status=status, data=response.json())
            except (ValueError, RecursionError):
                return "gave an answer that is cut off or not JSON"
        if may_refuse and status not in (401, 403):
            return Reply(status=status, data=None)
        if status in (401, 403):
            hint = "name the environment variable that holds its key in completions.api_key_env"
        else:
            hint = "check completions.base_url, completions.api and the server's log"
        raise ServerError(f"refused {path} with status {status}{self._message(response)}; {hint}")

    def _message(self, response: httpx.Response) -> str:
        """Return what the server says about a failure, without the key that it may repeat."""
        text = " ".join(response.text.split())
        if self._key is not None:
            text = text.replace(self._key, "***")
        return f": {text[:_MAX_MESSAGE]}" if text else ""

    def _wait_s(self, attempt: int, asked_s: float | None) -> float:
        grown = self._patience.first_wait_s * 2 ** (attempt - 1)
        wait_s = max(grown * random.uniform(0.5, 1.0), asked_s or 0.0)
        return min(wait_s, self._patience.longest_wait_s)


def _asked_wait(response: httpx.Response) -> float | None:
    """Return the seconds that the server asks to wait, where it gives a number."""
    try:
        return float(response.headers["Retry-After"])
    except (KeyError, ValueError):
        return None


def _say(error: httpx.HTTPError) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    verb = "does not answer" if isinstance(error, httpx.ConnectError) else "broke off"
    return f"{verb}: {text[:_MAX_MESSAGE]}"
