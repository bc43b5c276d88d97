"""What a person finds on the page of a flow run: tau and its changes as a table, the same with its conditions as text.

The keys are those of the training run, so that an artifact's history in Prefect's UI is the run's timeline. No
artifact is worth an evaluation: one that cannot be written is a line in the log.
"""

from __future__ import annotations

import contextvars
import hashlib
import html
import logging
import math
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from uuid import UUID

from prefect import get_run_logger
from prefect.artifacts import (
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.exceptions import MissingContextError
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from dflash_core import progress
from dflash_core.acceptance.statistics import PairedDifference
from dflash_core.errors import one_line
from dflash_core.results.compare import Tau
from dflash_core.results.news import difference_text
from dflash_core.results.selection import CONDITION_NAMES
from dflash_core.results.standing import Change, Standing
from flows import screen

UPDATE_EVERY_S = 5.0
"""The progress artifact is written so often; work that is done sooner leaves none."""
_LAST_WORD_S = 5.0
MAX_RETRIES = 2
"""Of each request, after 2 and 4 s. Prefect's own 5 take a minute, which an evaluation that is done would wait."""
_DIGEST_CHARACTERS = 12
_COLUMNS = ("dataset", "tau", "95 % interval", "against the step before", "against the baseline", "prompts")

Logger = logging.Logger | logging.LoggerAdapter[logging.Logger]


def run_logger() -> Logger:
    """Return the flow run's logger; outside of a run, or where Prefect's log is off, the module's own."""
    try:
        logger = get_run_logger()
    except MissingContextError:
        return logging.getLogger(__name__)
    return logger if logger.isEnabledFor(logging.WARNING) else logging.getLogger(__name__)


def key_of(kind: str, run: str) -> str:
    """Return the key of a run's artifacts: lower-case letters, digits and dashes, one for each name."""
    slug = re.sub(r"[^a-z0-9]+", "-", run.lower()).strip("-")
    if slug != run:  # other names have the same slug
        slug = f"{slug[:80]}-{hashlib.sha256(run.encode()).hexdigest()[:6]}".lstrip("-")
    return f"{kind}-{slug}"


def leave_result(standing: Standing, result: Mapping[str, Any]) -> None:
    """Leave the table and the text of an evaluation that is done.

    Args:
        standing: where it stands among the others.
        result: what `evaluate` answers: seconds, cached, bytes and warnings.
    """
    text = one_line_of(standing)
    _write(
        standing.label,
        lambda: create_table_artifact(table_rows(standing), key=key_of("tau", standing.run), description=text),
    )
    _write(
        standing.label,
        lambda: create_markdown_artifact(
            result_markdown(standing, result), key=key_of("evaluation", standing.run), description=text
        ),
    )


def one_line_of(standing: Standing) -> str:
    """Return tau and its change against the step before, for a log and a list."""
    change = standing.previous
    changed = "" if change.difference is None else f", {difference_text(change.difference)} against {change.label}"
    return f"{standing.label}: tau {_tau_text(standing.tau)}{changed}"


def leave_failure(run: str, label: str, error: str) -> None:
    """Leave the text of an evaluation that came to no number."""
    markdown = f"# {_cell(label)}\n\nno number: {_cell(error)}\n"
    _write(
        label, lambda: create_markdown_artifact(markdown, key=key_of("evaluation", run), description=f"{label}: failed")
    )


def table_rows(standing: Standing) -> list[dict[str, Any]]:
    """Return a row for all prompts and one for each dataset."""
    rows = [_row("all", standing.tau, standing, None)]
    return rows + [_row(name, tau, standing, name) for name, tau in standing.taus.items()]


def result_markdown(standing: Standing, result: Mapping[str, Any]) -> str:
    """Return the evaluation as a page: numbers, what they hold for, warnings, and what they cost."""
    conditions = standing.conditions._asdict()
    lines = [
        f"# {_cell(standing.label)}: tau {_tau_text(standing.tau)}",
        "",
        "Tokens emitted per verification step, bonus included, pooled over steps, with 95 % intervals; changes are "
        "paired over the same prompts.",
        "",
        *_markdown_table(_COLUMNS, [list(row.values()) for row in table_rows(standing)]),
        "",
        f"Best other checkpoint of the run: {_cell(_change_text(standing.best, standing.best.difference))}",
        *[f"\n**Warning:** {_cell(warning)}" for warning in result.get("warnings", [])],
        "",
        "## Conditions",
        "",
        *[f"- {CONDITION_NAMES[name]}: {_cell(_short(name, value))}" for name, value in conditions.items()],
        f"- device: {_cell(standing.device)}",
        "",
        "## What it took",
        "",
        f"Read {screen.megabytes(result['bytes_read'])} of {screen.megabytes(result['bytes_total'])} from "
        f"{_cell(standing.url)}; {_cached_text(result['cached'])}.",
        "",
        *_markdown_table(
            ("stage", "seconds", "from the store"),
            [
                [name.replace("_", " "), f"{seconds:.1f}", {True: "yes", False: "no"}.get(result["cached"].get(name))]
                for name, seconds in result["seconds"].items()
            ],
        ),
    ]
    return "\n".join(lines) + "\n"


@contextmanager
def live_progress(label: str, *, every_s: float = UPDATE_EVERY_S) -> Iterator[None]:
    """Show on the flow run's page how far the slow stage is, while the block runs.

    A thread of its own writes at a modest rate: the work never waits for Prefect's server.

    Args:
        label: the checkpoint, for people.
        every_s: seconds between two updates.
    """
    reporter = _Reporter(label, every_s)
    context = contextvars.copy_context()  # the flow run's, so that the artifact belongs to it
    thread = threading.Thread(target=context.run, args=(reporter.run,), name="progress artifact", daemon=True)
    thread.start()
    try:
        with progress.listening(reporter.listen):
            yield
        reporter.is_done = True
    finally:
        reporter.stop.set()
        thread.join(timeout=_LAST_WORD_S)


class _Reporter:
    """Keeps one progress artifact of a flow run up to date."""

    def __init__(self, label: str, every_s: float) -> None:
        self.stop = threading.Event()
        self.is_done = False
        self._label = label
        self._every_s = every_s
        self._latest: tuple[str, float, float] | None = None
        self._artifact: UUID | None = None

    def listen(self, stage: str, done: float, total: float) -> None:
        """Note how far a stage is; called by whoever works."""
        self._latest = (stage, done, total)

    def run(self) -> None:
        """Write until told to stop; the first problem is told and ends it."""
        told = None
        try:
            while not self.stop.wait(self._every_s):
                if self._latest is not None and self._latest != told:
                    told = self._latest
                    self._say(*self._text(*told))
            if self._artifact is not None and self.is_done:
                self._say(100.0, f"{self._label}: done")
        except Exception as error:
            run_logger().warning("%s: the progress could not be written: %s", self._label, _reason(error))

    def _text(self, stage: str, done: float, total: float) -> tuple[float, str]:
        percent = min(100.0, max(0.0, 100 * done / total)) if total else 0.0
        detail = progress.detail(stage)
        return percent, f"{self._label}: {stage.replace('_', ' ')}{f', {detail}' if detail else ''}"

    def _say(self, percent: float, text: str) -> None:
        if self._artifact is None:
            # Without a key it stands on the run's page alone.
            self._artifact = create_progress_artifact(percent, description=text)  # type: ignore[assignment]
        else:
            update_progress_artifact(self._artifact, percent, description=text)


def _write(label: str, create: Callable[[], Any]) -> None:
    try:
        with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: MAX_RETRIES}):
            create()
    except Exception as error:  # an artifact is a view of what the database holds
        run_logger().warning("%s: an artifact could not be written: %s", label, _reason(error))


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {one_line(error)}"


def _row(name: str, tau: Tau, standing: Standing, dataset: str | None) -> dict[str, Any]:
    changes = [
        _change_text(change, change.difference if dataset is None else change.datasets.get(dataset))
        for change in (standing.previous, standing.baseline)
    ]
    value = None if math.isnan(tau.tau_pooled) else round(tau.tau_pooled, 4)
    interval = tau.word if math.isnan(tau.ci_low) else f"{tau.ci_low:.2f} to {tau.ci_high:.2f}"
    return dict(zip(_COLUMNS, (name, value, interval, *changes, tau.num_prompts), strict=True))


def _change_text(change: Change, found: PairedDifference | None) -> str:
    if change.difference is None:
        return f"none: {change.why_not}"
    if found is None:
        return f"none: {change.label} has no such prompts"
    word = f" ({found.word})" if found.word is not None else ""
    return f"{difference_text(found)} against {change.label}{word}"


def _tau_text(tau: Tau) -> str:
    low, high = (None if math.isnan(end) else end for end in (tau.ci_low, tau.ci_high))
    return screen.interval_text(None if math.isnan(tau.tau_pooled) else tau.tau_pooled, low, high)


def _short(name: str, value: Any) -> Any:
    return str(value)[:_DIGEST_CHARACTERS] if value is not None and name.endswith(("_digest", "_identity")) else value


def _cached_text(cached: Mapping[str, bool]) -> str:
    return f"{sum(cached.values())} of {len(cached)} stages were answered from the store"


def _markdown_table(columns: tuple[str, ...], rows: list[list[Any]]) -> list[str]:
    lines = [f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
    return lines + [f"| {' | '.join(_cell(value) for value in row)} |" for row in rows]


def _cell(value: Any) -> str:
    """Return a value as Markdown that shows it as it is: names and warnings come from files of others."""
    text = html.escape(" ".join(screen.cell(value).split()), quote=False)
    return re.sub(r"([\\`*_\[\]|#])", r"\\\1", text)
