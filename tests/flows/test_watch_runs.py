"""Evaluations started as runs of a deployment, on a real Prefect server; a test plays the worker."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from dflash_core import evaluation
from dflash_core.config import Config, load_config
from dflash_core.errors import InputError
from flows import watching
from flows.watch_choice import Choice
from flows.watch_values import RunsUsedUp, WatchEvent
from flows.watching import MAX_ATTEMPTS, MAX_HOST_ATTEMPTS, Watch
from tests.support.direct import evaluate_directly
from tests.support.scene import Setup, make_setup
from tests.support.watching import Clock, chain, clean, kinds, make_watch, rows

pytestmark = pytest.mark.usefixtures("prefect_api")
NAME = "score-one/for-tests"


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    setup = make_setup(tmp_path_factory.mktemp("runs") / "s")
    evaluate_directly(load_config(str(setup.config)), setup.run / "step_1")
    return setup


@pytest.fixture
def setup(scene: Setup, tmp_path: Path) -> Setup:
    """A run of two steps; a configuration and a database of their own give the runs keys of their own."""
    clean(scene, (1, 2))
    own = dataclasses.replace(scene, config=tmp_path / "dflash.yaml")
    own.config.write_text(scene.config.read_text())
    own.change_config(results=str(tmp_path / "results.duckdb"))
    return own


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(watching, "time", clock)
    return clock


class Pool:
    """A deployment without a worker: the test ends its runs."""

    def __init__(self) -> None:
        from prefect.client.orchestration import get_client

        with get_client(sync_client=True) as client:
            flow_id = client.create_flow_from_name("score-one")
            self.id = client.create_deployment(flow_id, name="for-tests", enforce_parameter_schema=False)

    def runs(self, setup: Setup) -> list[Any]:
        """Return the runs for a set-up, in the order in which they were made."""
        from prefect.client.orchestration import get_client

        with get_client(sync_client=True) as client:
            runs = [run for run in client.read_flow_runs() if run.deployment_id == self.id]
        config = str(setup.config)
        return sorted((run for run in runs if run.parameters["config"] == config), key=lambda run: run.created)

    def end(self, run: Any, kind: str, message: str = "") -> None:
        from prefect import states
        from prefect.client.orchestration import get_client

        with get_client(sync_client=True) as client:
            state = getattr(states, kind)(message=message) if message else getattr(states, kind)()
            client.set_flow_run_state(UUID(str(run.id)), state, force=True)

    def score(self, setup: Setup) -> None:
        """Do what a worker would: score what is scheduled and end its run."""
        config = load_config(str(setup.config))
        for run in self.runs(setup):
            if run.state.is_scheduled():
                chain(config)(run.parameters["checkpoint"])
                self.end(run, "Completed")


@pytest.fixture(scope="module")
def pool(prefect_api: str) -> Pool:
    return Pool()


def deployed(setup: Setup, name: str = NAME) -> Any:
    from flows.watch_runs import DeployedRuns

    config = load_config(str(setup.config))
    return DeployedRuns(name, config=config, parameters={"config": str(setup.config), "device": None})


def results_rows(setup: Setup) -> list[tuple[Any, ...]]:
    config: Config = load_config(str(setup.config))
    return rows(setup, Path(config.results))


def watch_pool(setup: Setup, events: list[WatchEvent], **settings: Any) -> Watch:
    def never(checkpoint: str) -> dict[str, Any]:
        raise AssertionError(checkpoint)

    return make_watch(setup, events, never, runs=deployed(setup), **settings)


def test_each_checkpoint_gets_one_run_which_scores_it(setup: Setup, pool: Pool, clock: Clock) -> None:
    events: list[WatchEvent] = []
    watch = watch_pool(setup, events)
    clock.due[30.0] = lambda: pool.score(setup)
    watch.run(once=True, every_s=10)
    assert kinds(events)[:2] == [("started", "step_1"), ("started", "step_2")]
    # Runs begin together; which of them ends first is the pool's business.
    assert sorted(kinds(events)[2:]) == [("scored", "step_1"), ("scored", "step_2")]
    assert sorted(result["step"] for result in watch.results) == [1, 2]
    assert results_rows(setup) == [(1, "done"), (2, "done")]
    runs = sorted(pool.runs(setup), key=lambda run: run.name)
    assert [{"run:a", f"step:{step}"} <= set(run.tags) for run, step in zip(runs, (1, 2), strict=True)] == [True, True]
    assert [run.name for run in runs] == ["evaluate a/step_1", "evaluate a/step_2"], "found before they begin, too"
    # Another watch, or this one after a restart: answered by the database.
    again = watch_pool(setup, events := [])
    again.run(once=True, every_s=10)
    assert kinds(events) == [("known", "step_1"), ("known", "step_2")]
    assert len(pool.runs(setup)) == 2


def test_a_box_that_cannot_tell_what_is_known_has_the_run_tell(
    setup: Setup, pool: Pool, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A watch needs neither the target nor the GPU of the boxes that score, and gives nothing up for that."""
    clock.due[30.0] = lambda: pool.score(setup)
    watch_pool(setup, []).run(once=True, every_s=10)

    def cannot(*_arguments: Any) -> None:
        raise InputError("device = 'cuda', but torch sees no CUDA device; set device: auto or cpu")

    monkeypatch.setattr(watching, "known_result", cannot)
    again = watch_pool(setup, [])
    again.run(once=True, every_s=10)
    assert again.failures == {}
    assert len(again.scored_elsewhere) == 2
    assert len(pool.runs(setup)) == 2, "the completed ones were given back"


def test_two_watches_share_the_runs_of_one_folder(setup: Setup, pool: Pool, clock: Clock) -> None:
    first_events: list[WatchEvent] = []
    second_events: list[WatchEvent] = []
    first, second = watch_pool(setup, first_events), watch_pool(setup, second_events)
    first.look(), second.look()
    for watch in (first, second):
        for found in watch.look():
            watch.score(found)
    assert len(pool.runs(setup)) == 2
    pool.score(setup)
    for watch in (first, second):
        watch.run(once=False, every_s=10, stop=lambda watch=watch: len(watch.results) == 2)
    assert results_rows(setup) == [(1, "done"), (2, "done")]


def test_a_failed_run_is_followed_by_the_next_attempt_and_at_last_given_up(
    setup: Setup, pool: Pool, clock: Clock
) -> None:
    events: list[WatchEvent] = []
    watch = watch_pool(setup, events, choice=Choice(match=("step_1",)))

    def fail() -> None:
        for run in pool.runs(setup):
            if run.state.is_scheduled():
                pool.end(run, "Crashed", "the worker was killed")

    for at in (50.0, 200.0, 500.0):
        clock.due[at] = fail
    watch.run(once=False, every_s=10, stop=lambda: bool(watch.failures))
    assert len(pool.runs(setup)) == 3
    (text,) = watch.failures.values()
    assert "Crashed: the worker was killed" in text
    # After a restart the used-up attempts are not used again.
    again = watch_pool(setup, [], choice=Choice(match=("step_1",)))
    again.run(once=True, every_s=10)
    assert len(pool.runs(setup)) == 3
    assert "prefect flow-run logs" in next(iter(again.failures.values()))


def test_a_run_that_a_person_cancelled_is_not_started_again(setup: Setup, pool: Pool, clock: Clock) -> None:
    watch = watch_pool(setup, [], choice=Choice(match=("step_1",)))
    clock.due[30.0] = lambda: pool.end(pool.runs(setup)[0], "Cancelled")
    watch.run(once=False, every_s=10, stop=lambda: bool(watch.failures))
    assert len(pool.runs(setup)) == 1
    inspection = evaluation.inspect(str(setup.run / "step_1"), load_config(str(setup.config)))
    with pytest.raises(RunsUsedUp, match="Cancelled"):
        deployed(setup).start(inspection)


def test_a_checkpoint_rotated_away_while_its_run_is_under_way_still_ends(
    setup: Setup, pool: Pool, clock: Clock
) -> None:
    events: list[WatchEvent] = []
    watch = watch_pool(setup, events, choice=Choice(match=("step_1",)))

    def score_and_rotate() -> None:
        pool.score(setup)
        (setup.run / "step_1").rename(setup.folder / "gone")

    clock.due[30.0] = score_and_rotate
    watch.run(once=True, every_s=10)
    (setup.folder / "gone").rename(setup.run / "step_1")
    assert kinds(events) == [("started", "step_1"), ("scored", "step_1")]
    assert [Path(url).name for url in watch.scored_elsewhere] == ["step_1"], "its result cannot be told any more"


def test_a_run_that_a_killed_worker_had_taken_is_called_off_and_started_again(
    setup: Setup, pool: Pool, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between taking it and its beginning: the run is pending, and no heartbeat of it is missed."""
    from flows import watch_runs

    events: list[WatchEvent] = []
    watch = watch_pool(setup, events, choice=Choice(match=("step_1",)))

    def take() -> None:
        pool.end(pool.runs(setup)[0], "Pending")

    clock.due[30.0] = take
    clock.due[100.0] = lambda: monkeypatch.setattr(watch_runs, "BEGIN_LIMIT_S", 0.0)
    clock.due[300.0] = lambda: pool.score(setup)
    watch.run(once=False, every_s=10, stop=lambda: bool(watch.results or watch.failures))
    first, second = pool.runs(setup)
    assert first.state.is_crashed()
    assert "did not begin within" in first.state.message
    assert second.state.is_completed()
    failed = [event.message for event in events if event.kind == "failed"]
    assert len(failed) == 1
    assert "the worker was killed, or hangs; attempt 1 of 3" in failed[0]
    assert results_rows(setup) == [(1, "done")]


def test_a_run_that_failed_for_what_is_wrong_with_the_checkpoint_is_not_made_again(
    setup: Setup, pool: Pool, clock: Clock
) -> None:
    watch = watch_pool(setup, [], choice=Choice(match=("step_1",)))
    message = "Flow run encountered an exception: CheckpointCorrupt: record 'data/0' has another CRC-32"
    clock.due[30.0] = lambda: pool.end(pool.runs(setup)[0], "Failed", message)
    watch.run(once=False, every_s=10, stop=lambda: bool(watch.failures))
    assert clock.passed < 100, "given up at once"
    again = watch_pool(setup, [], choice=Choice(match=("step_1",)))
    again.run(once=True, every_s=10)
    assert "CheckpointCorrupt" in next(iter(again.failures.values()))
    assert len(pool.runs(setup)) == 1


@pytest.mark.parametrize("name", ["CheckpointVanished", "HostUnreachable", "DoesNotFit", "ValueError"])
def test_a_run_that_failed_for_another_reason_is_made_again(setup: Setup, pool: Pool, clock: Clock, name: str) -> None:
    watch = watch_pool(setup, [], choice=Choice(match=("step_1",)))
    message = f"Flow run encountered an exception: {name}: for a test"
    clock.due[30.0] = lambda: pool.end(pool.runs(setup)[0], "Failed", message)
    clock.due[200.0] = lambda: pool.score(setup)
    watch.run(once=False, every_s=10, stop=lambda: bool(watch.failures or watch.results))
    assert len(pool.runs(setup)) == 2
    assert len(watch.results) == 1


def test_a_machine_at_fault_for_half_an_hour_uses_nothing_up(setup: Setup, pool: Pool, clock: Clock) -> None:
    """As with a watch that computes by itself: its disk is full, and every run that is started meanwhile fails."""
    watch = watch_pool(setup, [], choice=Choice(match=("step_1",)))

    def fail() -> None:
        for run in pool.runs(setup):
            if run.state.is_scheduled():
                pool.end(
                    run, "Failed", "Flow run encountered an exception: OSError: [Errno 28] No space left on device"
                )

    for at in range(20, 1800, 20):
        clock.due[float(at)] = fail
    clock.due[1850.0] = clock.due[2200.0] = lambda: pool.score(setup)
    watch.run(once=False, every_s=10, stop=lambda: bool(watch.failures or watch.results))
    assert watch.failures == {}
    assert len(watch.results) == 1
    assert MAX_ATTEMPTS < len(pool.runs(setup)) < MAX_HOST_ATTEMPTS


def test_prefect_tells_the_type_of_what_a_flow_raised() -> None:
    """What `_is_over` reads is Prefect's wording; this fails where a newer one has another."""
    import asyncio

    from prefect.states import exception_to_failed_state

    from dflash_core.errors import CheckpointCorrupt
    from flows.watch_runs import _FAULTS_OF_CHECKPOINTS, _RAISED

    made = exception_to_failed_state(CheckpointCorrupt("cut off"), message="Flow run encountered an exception:")
    state = asyncio.run(made) if asyncio.iscoroutine(made) else made
    found = _RAISED.search(state.message or "")
    assert found is not None
    assert found[1] in _FAULTS_OF_CHECKPOINTS


def test_other_conditions_are_other_runs(setup: Setup) -> None:
    from flows.watch_runs import DeployedRuns

    config = load_config(str(setup.config))
    first, second = (evaluation.inspect(str(setup.run / f"step_{step}"), config) for step in (1, 2))
    runs = deployed(setup)
    short = DeployedRuns(NAME, config=config, parameters={"config": str(setup.config), "block_size": 4})
    keys = {runs.key(first, 1), runs.key(second, 1), runs.key(first, 2), short.key(first, 1)}
    assert len(keys) == 4
    assert runs.key(first, 1) == deployed(setup).key(first, 1)


def test_edited_prompts_and_raised_versions_are_other_runs(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key belongs to one run for ever: a completed one must not stand for what was never scored."""
    from flows import watch_runs

    prompts = setup.folder / "others.jsonl"
    lines = Path(load_config(str(setup.config)).prompts).read_text().splitlines(keepends=True)
    prompts.write_text("".join(lines))
    setup.change_config(prompts=str(prompts))
    inspection = evaluation.inspect(str(setup.run / "step_1"), load_config(str(setup.config)))
    runs = deployed(setup)
    before = runs.key(inspection, 1)
    prompts.write_text("".join(lines[1:]))
    edited = runs.key(inspection, 1)
    monkeypatch.setattr(watch_runs, "_VERSIONS", [*watch_runs._VERSIONS[:-1], "raised"])
    raised = runs.key(inspection, 1)
    prompts.unlink()  # on a box that has no such file, the worker's decides
    assert len({before, edited, raised, runs.key(inspection, 1)}) == 4


def test_a_deployment_that_does_not_exist_is_named(setup: Setup) -> None:
    with pytest.raises(InputError, match="'no/such'"):
        deployed(setup, "no/such").require_deployment()


def test_a_server_that_is_away_is_asked_again_and_nothing_is_given_up(
    setup: Setup, pool: Pool, clock: Clock, prefect_api: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client looks up the server's address each time; for a while it is one where nobody listens."""
    from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

    events: list[WatchEvent] = []
    watch = watch_pool(setup, events)
    away = temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api", PREFECT_CLIENT_MAX_RETRIES: 0})
    away.__enter__()
    clock.due[600.0] = lambda: away.__exit__(None, None, None)
    clock.due[900.0] = lambda: pool.score(setup)
    watch.run(once=False, every_s=10, stop=lambda: len(watch.results) == 2)
    assert watch.failures == {}
    assert len(pool.runs(setup)) == 2
    assert "Prefect server does not answer" in next(event.message for event in events if event.kind == "unreachable")
