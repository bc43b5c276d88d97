"""What tests of the watch share: a clock that passes by itself, and scoring without Prefect."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import duckdb

from dflash_core.config import Config, load_config
from dflash_core.results import database
from flows.watch_values import WatchEvent
from flows.watching import Watch
from tests.support.direct import evaluate_directly
from tests.support.scene import Setup

ROTATED = "rotated away"


@dataclass
class Clock:
    """Stands in for the module `time`: a pause passes at once, and what is due meanwhile happens."""

    now: float = 1000.0
    pauses: list[float] = field(default_factory=list)
    due: dict[float, Callable[[], Any]] = field(default_factory=dict)
    """Seconds since the beginning to what happens then."""

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds
        assert self.passed < 20_000, "what the test waits for never happens"
        for at in sorted(at for at in self.due if at <= self.passed):
            self.due.pop(at)()

    @property
    def passed(self) -> float:
        return self.now - 1000.0


def make_watch(
    setup: Setup,
    events: list[WatchEvent],
    evaluate: Callable[[str], dict[str, Any]] | None = None,
    **settings: Any,
) -> Watch:
    """Return a watch over a set-up's run that scores without Prefect."""
    config = load_config(str(setup.config))
    return Watch(
        **{"run_url": str(setup.run), "config": config} | settings,
        evaluate=evaluate or chain(config),
        tell=lambda event: events.append(event),
    )


def clean(setup: Setup, steps: tuple[int, ...]) -> None:
    """Give a set-up a run of these steps and no database; what the target did stays in the store."""
    for folder in (setup.run, setup.folder / ROTATED):
        shutil.rmtree(folder, ignore_errors=True)
    (setup.folder / ROTATED).mkdir()
    setup.run.mkdir(parents=True)
    setup.results.unlink(missing_ok=True)
    for step in steps:
        setup.add_step(step)


def chain(config: Config) -> Callable[[str], dict[str, Any]]:
    """Return what scores a checkpoint and stores the rows."""

    def evaluate(checkpoint: str) -> dict[str, Any]:
        record = evaluate_directly(config, checkpoint).record
        database.write_evaluation(config.results, record)
        result = database.read_evaluation(config.results, record.evaluation_id)
        assert result is not None
        return result

    return evaluate


def rotating(setup: Setup, name: str, evaluate: Callable[[str], dict[str, Any]]) -> Callable[[str], dict[str, Any]]:
    """Return the chain of a run that moves one checkpoint away just before it is read."""

    def rotate_and_evaluate(checkpoint: str) -> dict[str, Any]:
        if (setup.run / name).exists():
            (setup.run / name).rename(setup.folder / ROTATED / name)
        return evaluate(checkpoint)

    return rotate_and_evaluate


def rows(setup: Setup, results: Path | None = None) -> list[tuple[Any, ...]]:
    with duckdb.connect(str(results or setup.results), read_only=True) as connection:
        statement = "SELECT step, status FROM evaluations JOIN checkpoints USING (checkpoint_id) ORDER BY ALL"
        return connection.execute(statement).fetchall()


def kinds(events: list[WatchEvent]) -> list[tuple[str, str]]:
    return [(event.kind, event.name) for event in events]
