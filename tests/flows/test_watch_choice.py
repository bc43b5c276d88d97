"""Which checkpoints a watch takes: filters, order and the limit on the backlog, over real folders."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save

from dflash_core.checkpoints import FoundCheckpoint, stream_checkpoint
from dflash_core.config import Config
from dflash_core.errors import InputError
from flows import watching
from flows.watch_choice import Choice
from flows.watch_values import WatchEvent
from flows.watching import Watch
from tests.dflash_core.checkpoints.checkpoint_files import drafter_tensors
from tests.support.watching import Clock


def found(name: str, step: int | None) -> FoundCheckpoint:
    return FoundCheckpoint(url=f"/runs/a/{name}", run="a", name=name, step=step, signature="x")


LISTED = [found(f"step_{step}", step) for step in range(100, 1100, 100)] + [found("final", None)]


@pytest.mark.parametrize(
    ("choice", "taken"),
    [
        pytest.param({}, [*range(100, 1100, 100), None], id="everything"),
        pytest.param({"each": 5}, [500, 1000], id="each fifth"),
        pytest.param({"each": 3, "from_step": 400}, [600, 900], id="each third, counted from a step"),
        pytest.param({"multiple_of": 400}, [400, 800], id="multiples"),
        pytest.param({"from_step": 950}, [1000], id="from a step that does not exist"),
        pytest.param({"match": ("step_?00", "fin*"), "order": "newest"}, [None, *range(900, 0, -100)], id="patterns"),
        pytest.param({"match": ("STEP_*",)}, [], id="patterns mind the case"),
        pytest.param({"each": 20}, [], id="fewer than that"),
    ],
)
def test_filters_and_order(choice: dict[str, Any], taken: list[int | None]) -> None:
    chosen = Choice(**choice)
    seen = {one.step for one in LISTED if one.step is not None and chosen.passes(one)}
    assert [one.step for one in chosen.select(LISTED, seen)] == taken


@pytest.mark.parametrize(
    "settings", [{"each": 0}, {"multiple_of": -1}, {"max_backlog": 0}, {"order": "random"}], ids=str
)
def test_an_impossible_choice_is_refused_by_its_name_and_value(settings: dict[str, Any]) -> None:
    ((name, value),) = settings.items()
    with pytest.raises(InputError, match=f"{name.replace('_', '-')} '?{value}"):
        Choice(**settings)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(watching, "time", clock)
    return clock


class Folder:
    """A run's folder and a watch over it whose scoring fetches the drafter."""

    def __init__(self, folder: Path, clock: Clock, **choice: Any) -> None:
        self.run = folder / "run"
        self.run.mkdir()
        self.clock = clock
        self.events: list[WatchEvent] = []
        self.scored: list[int | None] = []
        self.on_score: dict[int, Any] = {}

        def fetch(url: str) -> dict[str, Any]:
            step = stream_checkpoint(url, folder / "out.safetensors").ref.step
            self.scored.append(step)
            self.on_score.pop(step or 0, lambda: None)()
            return {"checkpoint": url, "step": step}

        config = Config(store=str(folder / "store"), results=str(folder / "results.duckdb"))
        self.watch = Watch(
            run_url=str(self.run), config=config, evaluate=fetch, tell=self.events.append, choice=Choice(**choice)
        )

    def put(self, *steps: int, seed: int = 0) -> None:
        for step in steps:
            (self.run / f"step_{step}").mkdir(exist_ok=True)
            (self.run / f"step_{step}" / "model.safetensors").write_bytes(save(drafter_tensors(seed=seed)))

    def remove(self, *steps: int) -> None:
        for step in steps:
            shutil.rmtree(self.run / f"step_{step}")

    def watch_for(self, seconds: float) -> None:
        """Watch until so much time has passed and nothing is left to do."""
        end = self.clock.now + seconds
        self.watch.run(once=False, every_s=10, stop=lambda: self.clock.now >= end)

    def told(self, kind: str) -> list[str]:
        return [event.name for event in self.events if event.kind == kind]


def test_each_nth_counts_what_was_rotated_away(tmp_path: Path, clock: Clock) -> None:
    """The run keeps three checkpoints; a count over what lies there would never come to five."""
    folder = Folder(tmp_path, clock, each=5)
    for step in range(1, 13):
        folder.put(step)
        if step > 3:
            folder.remove(step - 3)
        folder.watch_for(60)
    assert folder.scored == [5, 10]


def test_newest_first_with_a_limit_keeps_up_and_tells_what_it_skips(tmp_path: Path, clock: Clock) -> None:
    folder = Folder(tmp_path, clock, order="newest", max_backlog=2)
    folder.put(1, 2, 3, 4, 5)
    # While step 5 is scored, two more appear.
    folder.on_score[5] = lambda: folder.put(6, 7)
    folder.watch_for(300)
    assert folder.scored[0] == 5
    assert sorted(folder.scored[1:]) == [4, 6, 7]
    assert sorted(folder.told("skipped")) == ["step_1", "step_2", "step_3"]
    assert [Path(url).name for url in folder.watch.skipped] == folder.told("skipped")
    assert "3 skipped" in folder.watch.status()
    # New contents under a skipped name are a new checkpoint.
    folder.put(2, seed=9)
    folder.watch_for(60)
    assert folder.scored[-1] == 2
    assert len(folder.watch.skipped) == 2


def test_oldest_first_with_a_limit_skips_the_newest(tmp_path: Path, clock: Clock) -> None:
    folder = Folder(tmp_path, clock, max_backlog=3)
    folder.put(*range(1, 6))
    folder.watch_for(100)
    assert folder.scored == [1, 2, 3]
    assert folder.told("skipped") == ["step_4", "step_5"]


def test_late_and_out_of_order_steps_are_scored_once_each(tmp_path: Path, clock: Clock) -> None:
    folder = Folder(tmp_path, clock)
    folder.put(9)
    folder.watch_for(60)
    folder.put(10, 3)
    folder.watch_for(60)
    folder.put(1)
    folder.watch_for(600)
    assert folder.scored == [9, 3, 10, 1]


def test_pauses_grow_while_nothing_changes_and_are_short_again_after_news(tmp_path: Path, clock: Clock) -> None:
    folder = Folder(tmp_path, clock)
    folder.put(1)
    clock.due[3600.0] = lambda: folder.put(2)
    folder.watch_for(4000)
    assert folder.scored == [1, 2]
    before = [pause for pause in clock.pauses[: clock.pauses.index(120.0)] if pause > 10]
    assert before == sorted(before)
    assert max(clock.pauses) == 120.0
    assert clock.pauses[clock.pauses.index(120.0) :].count(10.0) >= 1, "the second checkpoint settles in quick looks"
    assert len(clock.pauses) < 60, "an idle hour is some thirty looks"


def test_a_longer_pause_than_the_idle_one_is_kept(tmp_path: Path, clock: Clock) -> None:
    folder = Folder(tmp_path, clock)
    folder.watch.run(once=False, every_s=500, idle_s=120, stop=lambda: clock.passed > 2000)
    assert set(clock.pauses) == {500}
