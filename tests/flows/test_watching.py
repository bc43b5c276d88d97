"""The watch's own decisions, over real folders and a real results database; the chain runs without Prefect."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from dflash_core.config import load_config
from dflash_core.errors import CheckpointNotFound, CheckpointVanished
from flows import watching
from flows.scoring import score_checkpoint
from flows.watch_values import WatchEvent
from flows.watching import MAX_ATTEMPTS
from tests.support.direct import evaluate_directly
from tests.support.scene import Setup, make_setup
from tests.support.watching import ROTATED, chain, clean, kinds, make_watch, rotating, rows


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    """A set-up whose target is prepared, so that a checkpoint takes a moment."""
    setup = make_setup(tmp_path_factory.mktemp("watch") / "s")
    evaluate_directly(load_config(str(setup.config)), setup.run / "step_1")
    return setup


@pytest.fixture
def setup(scene: Setup) -> Setup:
    """The same with a run of two steps and a new database."""
    clean(scene, (1, 2))
    return scene


@pytest.fixture
def events() -> list[WatchEvent]:
    return []


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Count the pauses instead of waiting."""
    waited: list[float] = []
    monkeypatch.setattr(watching.time, "sleep", waited.append)
    return waited


def test_a_checkpoint_gone_between_two_looks_is_a_row_and_no_failure(setup: Setup, events: list[WatchEvent]) -> None:
    config = load_config(str(setup.config))
    watch = make_watch(setup, events, rotating(setup, "step_1", chain(config)))
    watch.run(once=True, every_s=1)
    assert kinds(events) == [("vanished", "step_1"), ("scored", "step_2")]
    assert "step_1 vanished before it was read whole" in events[0].message
    assert watch.failures == {}
    assert list(watch.vanished.values()) == [events[0].message]
    assert rows(setup) == [(1, "vanished"), (2, "done")]


def test_a_checkpoint_that_comes_back_is_scored_after_two_more_looks(setup: Setup, events: list[WatchEvent]) -> None:
    config = load_config(str(setup.config))
    watch = make_watch(setup, events, rotating(setup, "step_1", chain(config)))
    watch.run(once=True, every_s=1)
    (setup.folder / ROTATED / "step_1").rename(setup.run / "step_1")
    watch.evaluate = chain(config)
    assert watch.look() == [], "it may be half there"
    watch.run(once=True, every_s=1)
    assert kinds(events)[2:] == [("scored", "step_1")]
    assert watch.vanished == {}
    assert rows(setup) == [(1, "done"), (1, "vanished"), (2, "done")]


def test_a_checkpoint_gone_before_its_index_was_read_is_told_and_no_row(setup: Setup, events: list[WatchEvent]) -> None:
    watch = make_watch(setup, events)
    watch.look()
    first, second = watch.look()
    shutil.rmtree(setup.run / "step_1")
    watch.score(first)
    watch.score(second)
    assert kinds(events) == [("vanished", "step_1"), ("scored", "step_2")]
    assert watch.failures == {}
    assert rows(setup) == [(2, "done")]


def test_a_listing_that_keeps_naming_what_is_gone_does_not_hold_up_the_watch(
    setup: Setup, events: list[WatchEvent]
) -> None:
    """The checkpoint reappears each time under the same name with the same bytes, and goes again."""
    shutil.rmtree(setup.run / "step_2")
    config = load_config(str(setup.config))

    def flicker(checkpoint: str) -> dict[str, Any]:
        try:
            return rotating(setup, "step_1", chain(config))(checkpoint)
        finally:
            (setup.folder / ROTATED / "step_1").rename(setup.run / "step_1")

    watch = make_watch(setup, events, flicker)
    looks = iter(range(20))
    watch.run(once=False, every_s=1, stop=lambda: next(looks) == 19)
    assert kinds(events) == [("vanished", "step_1")] * MAX_ATTEMPTS
    assert watch.failures == {}


def test_one_look_at_a_folder_that_does_not_exist_is_an_error_and_a_watch_waits_for_it(
    setup: Setup, events: list[WatchEvent], pauses: list[float]
) -> None:
    run = setup.run.rename(setup.folder / "later")
    try:
        with pytest.raises(CheckpointNotFound, match="nothing lies at"):
            make_watch(setup, events).run(once=True, every_s=1)
        assert events == []
        watch = make_watch(setup, events)

        def training_begins() -> bool:
            if not setup.run.exists():
                run.rename(setup.run)
            return len(watch.results) == 2

        watch.run(once=False, every_s=1, stop=training_begins)
    finally:
        if run.exists():
            run.rename(setup.run)
    assert kinds(events) == [("waiting", str(setup.run)), ("scored", "step_1"), ("scored", "step_2")]
    assert pauses


def test_a_known_checkpoint_is_answered_and_nothing_runs(setup: Setup) -> None:
    config = load_config(str(setup.config))
    address = str(setup.run / "step_1")
    first = score_checkpoint(config, address, chain(config))

    def never(checkpoint: str) -> dict[str, Any]:
        raise AssertionError(checkpoint)

    again = score_checkpoint(config, address, never)
    assert (first.is_known, again.is_known) == (False, True)
    assert again.result["datasets"] == first.result["datasets"]
    # The weights are gone from the store: it must be read again, and is gone.
    shutil.rmtree(Path(config.store) / "drafter")
    with pytest.raises(CheckpointVanished):
        score_checkpoint(config, address, rotating(setup, "step_1", chain(config)))
    assert rows(setup) == [(1, "done"), (1, "vanished")]


def test_one_that_goes_between_two_looks_is_not_passed_over_in_silence(setup: Setup) -> None:
    """It was seen once, so nobody knew yet whether it was whole; what was scored may go without a word."""
    events: list[WatchEvent] = []
    watch = make_watch(setup, events)
    assert watch.look() == [], "the first look"
    shutil.rmtree(setup.run / "step_1")
    watch.look()
    watch.look()
    assert kinds(events) == [("waiting", "step_1")]
    assert "went away before it was scored" in events[0].message
    events.clear()
    (found,) = watch.look()
    watch.score(found)
    shutil.rmtree(setup.run / "step_2")
    watch.look()
    assert kinds(events) == [("scored", "step_2")]
