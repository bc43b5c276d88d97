"""After an evaluation: what is news about it goes to the configured webhook, once.

Nothing here ever fails an evaluation or a watch, and nothing is sent where no webhook is configured. A failure
is told by whoever tries last: by the watch where one is in charge, else by the flow.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

from dflash_core import evaluation
from dflash_core.checkpoints import CheckpointInspection, FoundCheckpoint
from dflash_core.config import Config
from dflash_core.errors import DFlashEvalError, InputError, NotDelivered, one_line
from dflash_core.notices import KEPT_S, deliver, deliver_unsent, hook_of
from dflash_core.results.news import News, failure, news_of
from dflash_core.results.standing import Standing, read_standing
from dflash_core.store import digest
from dflash_core.store_opening import store_of
from dflash_core.webhook import post

WATCHED_TAG = "watched"
"""On flow runs that a watch started: it tells of their failure when it does not try again."""

Say = Callable[[str], None]
_is_watched: ContextVar[bool] = ContextVar("is_watched", default=False)


@contextmanager
def watched() -> Iterator[None]:
    """Leave it to the caller to tell that what runs in the block failed: it may try again."""
    token = _is_watched.set(True)
    try:
        yield
    finally:
        _is_watched.reset(token)


def is_watched() -> bool:
    """Tell whether a failure is told by whoever runs this."""
    return _is_watched.get()


def tell_done(config: Config, standing: Standing, *, say: Say | None = None) -> None:
    """Send what is news about an evaluation that is done, and not so old that it is none.

    Args:
        config: names the webhook, the store and the news that are wanted.
        standing: where it stands among the others.
        say: is told in one line what could not be sent.
    """
    if _is_fresh(standing.started_at.replace(tzinfo=UTC)):
        _send(config, news_of(standing), label=standing.label, say=say)


def tell_known(config: Config, result: Mapping[str, Any], *, say: Say | None = None) -> None:
    """Send what is news about an evaluation that was found done: whoever made it may have been killed before.

    Args:
        config: as for `tell_done`.
        result: what `evaluate` answers.
        say: is told in one line what could not be sent.
    """
    if not _is_configured(config) or not _is_fresh(datetime.fromisoformat(result["started_at"])):
        return
    try:
        standing = read_standing(config.results, result["evaluation_id"], config.baseline)
    except DFlashEvalError as error:
        (say or _warn)(f"{_label(result['run'], result['step'])}: {one_line(error)}")
    else:
        tell_done(config, standing, say=say)


def tell_failed(config: Config, inspection: CheckpointInspection, error: Exception, *, say: Say | None = None) -> None:
    """Send that a checkpoint came to no number and is not tried again."""
    record = evaluation.checkpoint_record(inspection, None)
    news = failure(
        run=record.run,
        step=record.step,
        checkpoint=record.url,
        checkpoint_id=record.checkpoint_id,
        error=_error_text(error),
    )
    _send(config, [news], label=_label(record.run, record.step), say=say)


def tell_given_up(config: Config, found: FoundCheckpoint, error: str, *, say: Say | None = None) -> None:
    """Send that a watch has given a checkpoint up."""
    if not _is_configured(config) or "failed" not in config.notify.events:
        return
    try:
        inspection = evaluation.inspect(found.url, config)
        checkpoint_id = evaluation.checkpoint_record(inspection, None).checkpoint_id
    except (DFlashEvalError, OSError):  # what cannot be read is known by its name and what the folder lists
        checkpoint_id = digest("listed", found.run, found.step, found.url, found.signature)
    news = failure(run=found.run, step=found.step, checkpoint=found.url, checkpoint_id=checkpoint_id, error=error)
    _send(config, [news], label=_label(found.run, found.step), say=say)


def send_test(config: Config) -> None:
    """Send a notification of no checkpoint, to see whether it arrives.

    Raises:
        InputError: no webhook is configured.
        ConfigError: an environment variable that it names is not set.
        NotDelivered: the server did not take it.
    """
    hook = hook_of(config.notify)
    if hook is None:
        raise InputError("no webhook is configured; set notify.url_env or notify.url in the config")
    now = evaluation.now().isoformat(timespec="seconds")
    post(hook, {"event": "test", "text": f"test: dflash-eval can send notifications ({now})"})


def _send(config: Config, news: list[News], *, label: str, say: Say | None) -> None:
    if not _is_configured(config):
        return
    say = say or _warn
    try:
        hook = hook_of(config.notify)
        if hook is None:
            return
        store = store_of(config)
        with suppress(DFlashEvalError):  # told when it was tried first; what is new is tried all the same
            deliver_unsent(store, hook)
        for one in news:
            if one.event in config.notify.events:
                try:
                    deliver(store, hook, one)
                except NotDelivered as error:  # each is kept for later
                    say(f"{label}: {one_line(error)}")
    except DFlashEvalError as error:
        say(f"{label}: {one_line(error)}")
    except Exception as error:
        # Only the kind of it: what a library says may hold the address.
        say(f"{label}: the notification could not be sent ({type(error).__name__})")


def _warn(text: str) -> None:
    logging.getLogger(__name__).warning("%s", text)


def _is_fresh(started_at: datetime) -> bool:
    return (evaluation.now() - started_at).total_seconds() < KEPT_S


def _is_configured(config: Config) -> bool:
    return config.notify.url is not None or config.notify.url_env is not None


def _error_text(error: Exception) -> str:
    text = one_line(error)
    return text if isinstance(error, DFlashEvalError) else f"{type(error).__name__}: {text}"


def _label(run: str, step: int | None) -> str:
    return run if step is None else f"{run}:{step}"
