"""The target's part handed to another box: who gets it, who shares it, and what is said where it does not come."""

from __future__ import annotations

import contextvars
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun, State
from prefect.states import Cancelling, Completed, Failed, Pending, Running

from dflash_core import stages
from dflash_core.config import load_config
from dflash_core.errors import ConfigError, InputError, PreparationFailed, TargetError
from dflash_core.refreshing import Refresh
from dflash_core.store import MANIFEST_NAME
from dflash_core.target import runtime
from flows import preparing
from flows.preparing import Patience, Preparation, hand_over, is_served
from flows.target_part import TargetPart, choose, ensure_prepared, facts_of
from tests.support.scene import Setup, make_setup

LAYERS = (4, 1, 2)
WAIT_S = 60.0


class Box:
    """A deployment of a pool of its own on the session's server, and what a worker of that pool would do."""

    def __init__(self, name: str) -> None:
        self.pool = name
        self.deployment = f"prepare-target/{name}"

    def make(self) -> None:
        from prefect.client.schemas.actions import WorkPoolCreate

        with get_client(sync_client=True) as client:
            client.create_work_pool(WorkPoolCreate(name=self.pool, type="process"))
            flow_id = client.create_flow_from_name("prepare-target")
            client.create_deployment(flow_id, self.pool, work_pool_name=self.pool, entrypoint="x.py:x")

    def beat(self) -> None:
        """Be seen as a worker that is up."""
        with get_client(sync_client=True) as client:
            client.send_worker_heartbeat(self.pool, "worker", heartbeat_interval_seconds=30)

    def runs(self) -> list[FlowRun]:
        with get_client(sync_client=True) as client:
            found = client.read_deployment_by_name(self.deployment)
            return [run for run in client.read_flow_runs() if run.deployment_id == found.id]

    def end_next(self, *states: State[Any]) -> FlowRun:
        """Wait for a run that nobody took and lead it through states."""
        end = time.monotonic() + WAIT_S
        while True:
            waiting = [run for run in self.runs() if run.state is not None and run.state.is_scheduled()]
            if waiting:
                break
            assert time.monotonic() < end, "no run came"
            time.sleep(0.05)
        with get_client(sync_client=True) as client:
            for state in states:
                client.set_flow_run_state(waiting[0].id, state, force=True)
        return waiting[0]


@pytest.fixture
def box(prefect_api: str) -> Iterator[Box]:
    made = Box(f"test-{uuid.uuid4().hex[:8]}")
    made.make()
    yield made
    with get_client(sync_client=True) as client:
        client.delete_work_pool(made.pool)


Background = Callable[[Callable[[], Any]], "Future[Any]"]


@pytest.fixture
def background() -> Iterator[Background]:
    """Run something in a thread, with this thread's settings: the address of the server is one of them."""
    with ThreadPoolExecutor(3) as executor:
        yield lambda work: executor.submit(contextvars.copy_context().run, work)


def wanted(**changes: Any) -> Preparation:
    values: dict[str, Any] = {"config": "~/dflash.yaml", "facts": {"target_identity": "t"}, "layers": LAYERS}
    return Preparation(**values | changes)


def patience(**changes: Any) -> Patience:
    return Patience(**{"no_worker_s": WAIT_S, "poll_s": 0.05, "longest_poll_s": 0.1, "tell_s": 0.2} | changes)


class Said(list[str]):
    def __call__(self, text: str) -> None:
        self.append(text)


class TestHandingOver:
    def test_only_what_exists_and_has_a_worker_is_served(self, box: Box) -> None:
        assert not is_served("prepare-target/nothing")
        assert not is_served(box.deployment)
        box.beat()
        assert is_served(box.deployment)

    def test_two_that_want_the_same_share_one_run(self, box: Box, background: Background) -> None:
        box.beat()
        said = Said()
        start = threading.Barrier(2)

        def ask(layers: tuple[int, ...]) -> str:
            start.wait(WAIT_S)
            return hand_over(wanted(layers=layers), box.deployment, say=said, patience=patience())

        answers = [background(partial(ask, layers)) for layers in (LAYERS, (1, 2, 4))]
        run = box.end_next(Running(), Completed())
        assert {answer.result(WAIT_S) for answer in answers} == {f"the run 'prepare target, layers 1, 2, 4' ({run.id})"}
        assert len(box.runs()) == 1
        assert run.parameters == {
            "config": "~/dflash.yaml",
            "layers": [1, 2, 4],
            "expected": {"target_identity": "t"},
        }
        assert any("waiting for it" in text for text in said)

    @pytest.mark.parametrize(
        "other",
        [{"layers": (1, 2)}, {"facts": {"target_identity": "other"}}, {"refresh": ("transcripts",), "asked_by": "me"}],
        ids=["layers", "target", "refresh"],
    )
    def test_what_is_not_the_same_is_not_shared(self, other: dict[str, Any]) -> None:
        assert wanted(**other).tag != wanted().tag

    def test_a_refresh_is_each_evaluations_own(self) -> None:
        tags = {wanted(refresh=("transcripts",), asked_by=name).tag for name in ("a", "b")}
        assert len(tags) == 2
        assert wanted(asked_by="a").tag == wanted(asked_by="b").tag

    def test_a_failed_run_is_named_with_its_error_and_the_next_one_starts_anew(
        self, box: Box, background: Background
    ) -> None:
        box.beat()
        ask = lambda: hand_over(wanted(), box.deployment, say=Said(), patience=patience())  # noqa: E731
        answer = background(ask)
        run = box.end_next(Running(), Failed(message="Flow run encountered\nan exception: DoesNotFit: 52 GB"))
        with pytest.raises(PreparationFailed) as caught:
            answer.result(WAIT_S)
        assert str(caught.value) == (
            f"the run 'prepare target, layers 1, 2, 4' ({run.id}) of {box.deployment} ended as Failed: Flow run "
            f"encountered an exception: DoesNotFit: 52 GB; see `prefect flow-run logs {run.id}`"
        )
        for _ in range(2):  # and what was completed and has vanished since is made by a new one, too
            answer = background(ask)
            later = box.end_next(Running(), Completed())
            assert str(later.id) in answer.result(WAIT_S)
        assert len(box.runs()) == 3

    def test_an_unknown_deployment_is_refused(self, prefect_api: str) -> None:
        with pytest.raises(InputError, match=r"prepare = 'a/b': the Prefect server has no such deployment"):
            hand_over(wanted(), "a/b", say=Said())


class TestPatience:
    def test_a_pool_without_a_worker_is_told_and_given_up(self, box: Box) -> None:
        said = Said()
        with pytest.raises(PreparationFailed) as caught:
            hand_over(wanted(), box.deployment, say=said, patience=patience(no_worker_s=1.0, tell_s=0.1))
        text = str(caught.value)
        assert f"no worker of the pool '{box.pool}' is up" in text
        assert f"prefect worker start --pool {box.pool}" in text
        assert "\n" not in text
        assert any(text.startswith("waiting for the run") and "no worker" in text for text in said[1:])

    def test_a_run_that_was_taken_and_does_not_begin_is_called_off_so_that_the_next_one_starts_anew(
        self, box: Box, background: Background
    ) -> None:
        box.beat()
        answer = background(lambda: hand_over(wanted(), box.deployment, say=Said(), patience=patience(no_worker_s=0.5)))
        run = box.end_next(Pending())
        with pytest.raises(PreparationFailed, match=r"did not begin within .* counts as crashed now"):
            answer.result(WAIT_S)
        (called_off,) = box.runs()
        assert called_off.state is not None
        assert called_off.state.is_crashed()
        answer = background(lambda: hand_over(wanted(), box.deployment, say=Said(), patience=patience()))
        later = box.end_next(Running(), Completed())
        assert later.id != run.id
        assert str(later.id) in answer.result(WAIT_S)

    def test_a_run_that_is_being_cancelled_is_not_waited_for(self, box: Box, background: Background) -> None:
        """The worker that should cancel it may be gone."""
        box.beat()
        ask = lambda: hand_over(wanted(), box.deployment, say=Said(), patience=patience())  # noqa: E731
        answer = background(ask)
        run = box.end_next(Running(), Cancelling())
        with pytest.raises(PreparationFailed, match="ended as Cancelling"):
            answer.result(WAIT_S)
        answer = background(ask)
        assert box.end_next(Running(), Completed()).id != run.id
        answer.result(WAIT_S)

    def test_a_long_queue_is_given_up_at_last(self, box: Box) -> None:
        box.beat()
        with pytest.raises(PreparationFailed, match=r"was not begun within .* is up; give the pool .* more workers"):
            hand_over(wanted(), box.deployment, say=Said(), patience=patience(queue_s=0.5))

    def test_a_server_that_is_away_for_a_while_is_waited_for(
        self, box: Box, background: Background, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        box.beat()
        original, is_away, asked = preparing.get_client, threading.Event(), threading.Event()

        def client(*arguments: Any, **options: Any) -> Any:
            if is_away.is_set():
                asked.set()
                raise httpx.ConnectError("refused")
            return original(*arguments, **options)

        monkeypatch.setattr(preparing, "get_client", client)
        said = Said()
        answer = background(lambda: hand_over(wanted(), box.deployment, say=said, patience=patience(tell_s=0)))
        run = box.end_next(Running())
        is_away.set()
        assert asked.wait(WAIT_S)
        is_away.clear()
        with get_client(sync_client=True) as server:
            server.set_flow_run_state(run.id, Completed(), force=True)
        assert str(run.id) in answer.result(WAIT_S)
        assert any("the Prefect server does not answer (ConnectError)" in text for text in said)


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    return make_setup(tmp_path / "s")


def part_of(setup: Setup, change: Callable[[stages.TargetPlan], stages.TargetPlan] = lambda plan: plan) -> TargetPart:
    config = load_config(setup.config)
    plan = change(stages.plan_target(config))
    return TargetPart(config=config, config_path=str(setup.config), plan=plan, layers=(1, 2, 4), reports=[])


class TestChoosing:
    def test_a_local_store_and_a_target_that_fits_need_nobody_else(
        self, setup: Setup, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(preparing, "is_served", lambda: pytest.fail("the server was asked"))
        assert choose(part_of(setup), None) is None

    @pytest.mark.parametrize(("served", "answer"), [(True, preparing.DEPLOYMENT), (False, None)])
    def test_a_shared_store_hands_over_where_somebody_is_there(
        self, setup: Setup, monkeypatch: pytest.MonkeyPatch, served: bool, answer: str | None
    ) -> None:
        setup.change_config(store="memory://choosing", store_mirror=str(setup.folder / "mirror"))
        monkeypatch.setattr(preparing, "is_served", lambda: served)
        assert choose(part_of(setup), None) == answer
        assert choose(part_of(setup), "here") is None
        assert choose(part_of(setup), "a/b") == "a/b"

    def test_a_box_with_too_little_of_the_target_says_what_is_missing(
        self, setup: Setup, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        kept = stages.keep_target_tables(load_config(setup.config))
        setup.change_config(target={"model": f"store:{kept['key']}", "compute_dtype": "float32"})
        part = part_of(setup)
        assert not part.plan.target.is_whole
        monkeypatch.setattr(preparing, "is_served", lambda: False)
        passes = runtime.num_forward_passes
        with pytest.raises(TargetError, match=r"no more of the target than a drafter needs.*prepare-target"):
            ensure_prepared(part, None, Refresh(()), Said())
        with pytest.raises(TargetError, match="no more of the target"):
            ensure_prepared(part, "here", Refresh(()), Said())
        monkeypatch.setattr(preparing, "is_served", lambda: True)
        assert choose(part, None) == preparing.DEPLOYMENT
        assert runtime.num_forward_passes == passes

    def test_a_target_that_the_store_does_not_keep_is_refused(self, setup: Setup) -> None:
        setup.change_config(target={"model": "store:0123456789abcdef0123456789abcdef"})
        with pytest.raises(TargetError, match="keeps nothing of a target under this key; run `dflash-eval prepare`"):
            part_of(setup)

    def test_what_was_kept_of_a_target_makes_the_same_keys(self, setup: Setup) -> None:
        whole = stages.plan_target(load_config(setup.config))
        kept = stages.keep_target_tables(load_config(setup.config))
        assert kept["meta"]["target_identity"] == whole.target.identity
        setup.change_config(target={"model": f"store:{kept['key']}", "compute_dtype": "float32"})
        plan = stages.plan_target(load_config(setup.config))
        assert facts_of(plan) == facts_of(whole)
        assert plan.target.name == whole.target.name
        assert plan.rendering == whole.rendering

    def test_of_a_converted_target_the_stores_own_manifest_is_not_kept(self, setup: Setup) -> None:
        """It lies in the folder of a GGUF file's conversion; copied, it would belie the manifest of the copy."""
        folder = stages.plan_target(load_config(setup.config)).target.folder
        converted = setup.folder / "converted"
        shutil.copytree(folder, converted)
        (converted / MANIFEST_NAME).write_text('{"kind": "target"}')
        setup.change_config(target={"model": str(converted), "compute_dtype": "float32"})
        kept = stages.keep_target_tables(load_config(setup.config))
        assert not stages.keep_target_tables(load_config(setup.config))["was_built"]
        setup.change_config(target={"model": f"store:{kept['key']}", "compute_dtype": "float32"})
        assert not part_of(setup).plan.target.is_whole

    def test_an_edited_chat_template_is_kept_under_another_key_and_the_old_key_still_means_the_old_one(
        self, setup: Setup
    ) -> None:
        config = load_config(setup.config)
        before, old_plan = stages.keep_target_tables(config), stages.plan_target(config)
        folder = old_plan.target.folder
        copy = setup.folder / "edited"
        shutil.copytree(folder, copy)
        template = copy / "chat_template.jinja"
        template.write_text(f"{template.read_text() if template.exists() else ''} {{{{ messages[0]['content'] }}}}")
        setup.change_config(target={"model": str(copy), "compute_dtype": "float32"})
        config = load_config(setup.config)
        after, new_plan = stages.keep_target_tables(config), stages.plan_target(config)
        assert new_plan.target.identity == old_plan.target.identity, "the template is no part of it"
        assert new_plan.transcripts_key != old_plan.transcripts_key
        for kept, plan in ((before, old_plan), (after, new_plan)):
            setup.change_config(target={"model": f"store:{kept['key']}", "compute_dtype": "float32"})
            assert facts_of(stages.plan_target(load_config(setup.config))) == facts_of(plan)

    def test_a_run_that_made_something_else_is_told(self, setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(preparing, "hand_over", lambda *_arguments, **_options: "the run 'x' (1)")
        with pytest.raises(PreparationFailed, match=r"the run 'x' \(1\) of a/b was completed, and the store .* lacks"):
            ensure_prepared(part_of(setup), "a/b", Refresh(()), Said())


@pytest.mark.usefixtures("prefect_api")
class TestPrepareTarget:
    def test_a_box_that_would_make_something_else_refuses_before_the_target_runs(self, setup: Setup) -> None:
        from flows.prepare_target import prepare_target

        expected = facts_of(stages.plan_target(load_config(setup.config)))
        passes = runtime.num_forward_passes
        with pytest.raises(ConfigError, match=r"compute_dtype is 'float32' here and 'bfloat16' there.*`auto`"):
            prepare_target(str(setup.config), [1], expected=expected | {"compute_dtype": "bfloat16"})
        assert runtime.num_forward_passes == passes
        assert prepare_target(str(setup.config), [1], expected=expected)["hidden_states"]["layers"] == [1]
        assert runtime.num_forward_passes > passes
