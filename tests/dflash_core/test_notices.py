"""News go out once, whatever is restarted; what could not be delivered goes out later, for a day."""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_core.config import NotifySettings
from dflash_core.errors import ConfigError, HostUnreachable, NotDelivered
from dflash_core.notices import KEPT_S, KIND, deliver, deliver_unsent, hook_of
from dflash_core.results.news import News, failure
from dflash_core.store import Artifact, Store
from dflash_core.store_listing import list_store
from dflash_core.webhook import Hook
from tests.support.hook_server import TOKEN, HookServer, free_port, hook_server


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture
def server() -> Iterator[HookServer]:
    with hook_server() as state:
        yield state


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def news(step: int = 3) -> News:
    return failure(run="a", step=step, checkpoint=f"/runs/a/step_{step}", checkpoint_id=f"c{step}", error="cut off")


def no_pause(_seconds: float) -> None:
    """Wait for nothing."""


def _deliver_in_process(root: str, url: str) -> None:
    os.environ["no_proxy"] = "127.0.0.1"
    deliver(Store(root), Hook(url=url), news())


class TestOnce:
    def test_a_second_delivery_sends_nothing(self, store: Store, server: HookServer) -> None:
        hook = Hook(url=server.url)
        assert deliver(store, hook, news())
        assert not deliver(Store(store.root), hook, news()), "as after a restart"
        assert deliver(store, hook, news(4))
        assert server.events == [("failed", 3), ("failed", 4)]

    def test_many_at_once_send_one(self, store: Store, server: HookServer) -> None:
        context = multiprocessing.get_context("fork")
        processes = [context.Process(target=_deliver_in_process, args=(str(store.root), server.url)) for _ in range(4)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(timeout=60)
            assert process.exitcode == 0
        assert server.events == [("failed", 3)]

    def test_the_ids_of_two_events_differ_and_that_of_one_never_changes(self) -> None:
        assert news().key == news().key == news().payload["id"]
        assert news(3).key != news(4).key

    def test_a_shared_store_that_is_away_still_lets_news_out_once(
        self, store: Store, server: HookServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Away(Store):
            def find(self, kind: str, key: str) -> Artifact | None:
                raise HostUnreachable("the store is away")

        hook = Hook(url=server.url)
        assert deliver(Away(store.root), hook, news())
        assert not deliver(Away(store.root), hook, news())
        assert not deliver(store, hook, news())
        assert server.events == [("failed", 3)]


class TestUndelivered:
    def test_a_server_that_was_down_gets_it_with_the_next_news(self, store: Store) -> None:
        port = free_port()
        hook = Hook(url=f"http://127.0.0.1:{port}/{TOKEN}")
        with pytest.raises(NotDelivered):
            deliver(store, hook, news(3), pause=no_pause)
        with pytest.raises(NotDelivered):
            deliver_unsent(store, hook)
        with hook_server(port) as server:
            assert deliver_unsent(store, hook) == 1
            assert deliver_unsent(store, hook) == 0
            assert not deliver(store, hook, news(3)), "it counts as delivered"
            assert server.events == [("failed", 3)]

    def test_the_oldest_goes_first_and_the_first_that_fails_ends_it(self, store: Store, server: HookServer) -> None:
        hook = Hook(url=server.url)
        for step, age_s in ((1, 100), (2, 300), (3, 200)):
            server.answers = [404]
            with pytest.raises(NotDelivered):
                deliver(store, hook, news(step))
            then = time.time() - age_s
            os.utime(store.root / "unsent" / f"{news(step).key}.json", (then, then))
        server.answers = [200, 500]
        with pytest.raises(NotDelivered):
            deliver_unsent(store, hook)
        assert server.events == [("failed", 2)]
        assert deliver_unsent(store, hook) == 2
        assert server.events == [("failed", 2), ("failed", 3), ("failed", 1)]

    def test_what_is_a_day_old_is_dropped(self, store: Store, server: HookServer) -> None:
        hook = Hook(url=server.url)
        server.answers = [404]
        with pytest.raises(NotDelivered):
            deliver(store, hook, news())
        (path,) = (store.root / "unsent").glob("*.json")
        then = time.time() - KEPT_S - 1
        os.utime(path, (then, then))
        assert deliver_unsent(store, hook) == 0
        assert not path.exists()
        assert server.received == []

    def test_two_that_go_through_what_waits_send_it_once(self, store: Store, server: HookServer) -> None:
        hook = Hook(url=server.url)
        server.answers = [404, 404]
        for step in (1, 2):
            with pytest.raises(NotDelivered):
                deliver(store, hook, news(step))
        threads = [threading.Thread(target=deliver_unsent, args=(store, hook)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        assert sorted(server.events) == [("failed", 1), ("failed", 2)]

    def test_the_store_shows_what_was_delivered_and_nowhere_the_address(self, store: Store, server: HookServer) -> None:
        hook = Hook(url=server.url, headers={"Authorization": TOKEN})
        server.answers = [404]
        with pytest.raises(NotDelivered):
            deliver(store, hook, news(4))
        deliver(store, hook, news(3))
        assert [(one.kind, one.is_damaged) for one in list_store(store).artifacts] == [(KIND, False)]
        written = [path.read_text() for path in store.root.rglob("*") if path.is_file()]
        assert any("cut off" in text for text in written)
        assert not any(TOKEN in text for text in written)


class TestHook:
    def test_none_is_configured(self) -> None:
        assert hook_of(NotifySettings(), {}) is None

    def test_address_and_headers_come_from_the_environment(self) -> None:
        settings = NotifySettings(url_env="HOOK", headers_env={"Authorization": "AUTH"}, timeout_s=3)
        hook = hook_of(settings, {"HOOK": " https://h/x\n", "AUTH": "Bearer y"})
        assert hook == Hook(url="https://h/x", headers={"Authorization": "Bearer y"}, timeout_s=3)

    @pytest.mark.parametrize(
        ("environment", "message"),
        [
            ({}, "notify.url_env names the environment variable HOOK, which is not set here"),
            ({"HOOK": ""}, "HOOK, which is not set here"),
            ({"HOOK": f"h/{TOKEN}"}, "the variable HOOK holds no http"),
        ],
    )
    def test_a_variable_that_holds_no_address_is_named_and_not_shown(
        self, environment: dict[str, str], message: str
    ) -> None:
        with pytest.raises(ConfigError, match=message) as caught:
            hook_of(NotifySettings(url_env="HOOK"), environment)
        assert TOKEN not in str(caught.value)


def test_a_query_of_the_checkpoints_address_and_mentions_stay_out_of_the_payload() -> None:
    one = failure(
        run="<!channel>",
        step=1,
        checkpoint="s3://b/step_1?sig=SECRET",
        checkpoint_id="c",
        error="cut <https://x|y> &\noff",
    )
    assert "SECRET" not in json.dumps(one.payload)
    assert one.text == "failed: &lt;!channel&gt;:1: cut &lt;https://x|y&gt; &amp; off"
