"""News on their way to a webhook: each is delivered once, and what could not be delivered is tried again later.

That a news was delivered stands in the store, as an artifact of its key: so it is not sent again after a
restart, nor by another process or box that shares the store. The one that sends holds the artifact's lock. A kill
between the server's answer and the rename leaves a news that is sent again; its `id` tells the receiver.

    <store>/news/<key>/             delivered
    <store>/unsent/<key>.json       of this machine: not delivered; tried again with the next news, for a day
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from dflash_core.config import NotifySettings
from dflash_core.errors import ConfigError, HostError, NotDelivered
from dflash_core.results.news import News
from dflash_core.store import Store
from dflash_core.webhook import PAUSES_S, Hook, post

KIND = "news"
KEPT_S = 86400.0
"""What could not be delivered for so long is dropped."""
_MOST_AT_ONCE = 20
_PAYLOAD_NAME = "payload.json"


def hook_of(settings: NotifySettings, environment: Mapping[str, str] = os.environ) -> Hook | None:
    """Return the configured webhook; None where none is.

    Raises:
        ConfigError: an environment variable is not set, or holds no address.
    """
    url = settings.url
    if settings.url_env is not None:
        url = _variable("url_env", settings.url_env, environment)
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"notify.url_env: the variable {settings.url_env} holds no http:// or https:// address")
    if url is None:
        return None
    headers = {
        name: _variable(f"headers_env.{name}", variable, environment) for name, variable in settings.headers_env.items()
    }
    return Hook(url=url, headers=headers, timeout_s=settings.timeout_s)


def _variable(key: str, name: str, environment: Mapping[str, str]) -> str:
    value = environment.get(name, "").strip()
    if not value:
        raise ConfigError(f"notify.{key} names the environment variable {name}, which is not set here; export it")
    return value


def deliver(store: Store, hook: Hook, news: News, *, pause: Callable[[float], None] = time.sleep) -> bool:
    """Deliver a news unless it was delivered before; True where it was sent now.

    Raises:
        NotDelivered: the server did not take it; it is kept, for `deliver_unsent`.
    """
    try:
        return _deliver(store, hook, news.key, news.payload, pauses_s=PAUSES_S, pause=pause)
    except NotDelivered:
        _keep(store, news)
        raise


def deliver_unsent(store: Store, hook: Hook) -> int:
    """Try once more what could not be delivered, the oldest first and up to the first that fails again.

    Returns:
        How many were delivered, or found to be. What is too old is dropped.

    Raises:
        NotDelivered: the server takes nothing yet.
    """
    num_delivered = 0
    for path, payload in list(_unsent(store))[:_MOST_AT_ONCE]:
        _deliver(store, hook, path.stem, payload, pauses_s=(), pause=time.sleep)
        path.unlink(missing_ok=True)
        num_delivered += 1
    return num_delivered


def _deliver(
    store: Store,
    hook: Hook,
    key: str,
    payload: Mapping[str, Any],
    *,
    pauses_s: tuple[float, ...],
    pause: Callable[[float], None],
) -> bool:
    def send(folder: Path) -> dict[str, Any]:
        post(hook, payload, pauses_s=pauses_s, pause=pause)
        (folder / _PAYLOAD_NAME).write_text(json.dumps(payload, indent=1), encoding="utf-8")
        return {"event": payload["event"], "run": payload["run"], "step": payload["step"]}

    try:
        return store.build(KIND, key, send).was_built
    except HostError:
        # A shared store is away: what is delivered is remembered here, and goes up when it is back.
        return Store(store.root).build(KIND, key, send).was_built


def _keep(store: Store, news: News) -> None:
    path = store.root / "unsent" / f"{news.key}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{news.key}.{uuid.uuid4().hex[:8]}.tmp")
    temporary.write_text(json.dumps(news.payload), encoding="utf-8")
    temporary.replace(path)


def _unsent(store: Store) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield what waits, the oldest first."""
    folder = store.root / "unsent"
    found = []
    for path in folder.glob("[!.]*.json"):
        with suppress(OSError):  # another process delivered it meanwhile
            found.append((path.stat().st_mtime, path))
    for changed_at, path in sorted(found):
        if time.time() - changed_at > KEPT_S:
            path.unlink(missing_ok=True)
            continue
        with suppress(OSError, ValueError):
            yield path, json.loads(path.read_text(encoding="utf-8"))
