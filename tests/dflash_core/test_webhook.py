"""Posting to a webhook that is down, slow, wrong, or wants to be left alone; its address is never told."""

from __future__ import annotations

import traceback
from collections.abc import Iterator

import pytest

from dflash_core.errors import NotDelivered
from dflash_core.webhook import LONGEST_PAUSE_S, PAUSES_S, Hook, post
from tests.support.hook_server import TOKEN, HookServer, free_port, hook_server

PAYLOAD = {"event": "best", "text": "new best", "step": 3}


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture
def server() -> Iterator[HookServer]:
    with hook_server() as state:
        yield state


class Pauses:
    """Waits for nothing, and remembers for how long it should have."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)


def test_what_is_posted_arrives_as_json_with_the_headers(server: HookServer) -> None:
    post(Hook(url=server.url, headers={"Authorization": "Bearer x"}), PAYLOAD)
    assert server.received == [PAYLOAD]
    assert server.headers[0]["Authorization"] == "Bearer x"
    assert server.headers[0]["Content-Type"] == "application/json"


@pytest.mark.parametrize("answer", [500, 503, 429, 408, "hang up"])
def test_what_may_pass_is_tried_again_after_a_pause(server: HookServer, answer: int | str) -> None:
    server.answers = [answer, answer]
    pauses = Pauses()
    post(Hook(url=server.url), PAYLOAD, pause=pauses)
    assert server.received == [PAYLOAD]
    assert pauses.seconds == list(PAUSES_S)


def test_tries_are_bounded(server: HookServer) -> None:
    server.answers = [500] * 9
    with pytest.raises(NotDelivered, match="not delivered in 3 tries: the server answered with status 500"):
        post(Hook(url=server.url), PAYLOAD, pause=Pauses())
    assert server.num_requests == len(PAUSES_S) + 1


@pytest.mark.parametrize("answer", [400, 403, 404, 410])
def test_what_will_not_pass_is_not_tried_again(server: HookServer, answer: int) -> None:
    server.answers = [answer]
    with pytest.raises(NotDelivered, match=f"in 1 try: the server answered with status {answer}"):
        post(Hook(url=server.url), PAYLOAD, pause=Pauses())
    assert server.num_requests == 1


@pytest.mark.parametrize("answer", [301, 302, 307, 308])
def test_a_redirect_is_not_followed(server: HookServer, answer: int) -> None:
    server.answers = [answer]
    with pytest.raises(NotDelivered, match=f"status {answer}"):
        post(Hook(url=server.url, headers={"Authorization": "secret"}), PAYLOAD, pause=Pauses())
    assert server.num_requests == 1


@pytest.mark.parametrize(("asked", "followed"), [("7", 7.0), ("99999", LONGEST_PAUSE_S), ("soon", PAUSES_S[0])])
def test_a_server_may_ask_for_a_pause_up_to_a_bound(server: HookServer, asked: str, followed: float) -> None:
    server.answers, server.retry_after = [429], asked
    pauses = Pauses()
    post(Hook(url=server.url), PAYLOAD, pause=pauses)
    assert pauses.seconds == [followed]


def test_a_slow_server_is_given_up_after_the_time_limit(server: HookServer) -> None:
    server.answers = ["hang"] * 3
    with pytest.raises(NotDelivered, match=r"no answer within 0\.2 s"):
        post(Hook(url=server.url, timeout_s=0.2), PAYLOAD, pause=Pauses())
    assert server.num_requests == 3


def test_nobody_there_is_tried_again() -> None:
    pauses = Pauses()
    with pytest.raises(NotDelivered, match="refused the connection"):
        post(Hook(url=f"http://127.0.0.1:{free_port()}/{TOKEN}"), PAYLOAD, pause=pauses)
    assert pauses.seconds == list(PAUSES_S)


@pytest.mark.parametrize(
    "url",
    [
        f"http://127.0.0.1:{TOKEN}/x",
        f"http://127.0.0.1/with a blank/{TOKEN}",
        f"http://127.0.0.1/\n{TOKEN}",
        f"http://[::bad/{TOKEN}",
        f"http://me:{TOKEN}@127.0.0.1:1/x",
    ],
)
def test_an_impossible_address_is_told_without_the_address(url: str) -> None:
    with pytest.raises(NotDelivered) as caught:
        post(Hook(url=url, timeout_s=2), PAYLOAD, pause=Pauses())
    assert TOKEN not in "".join(traceback.format_exception(caught.value))


def test_neither_a_traceback_nor_the_hook_itself_shows_the_address_or_a_header(server: HookServer) -> None:
    server.answers = [500, "hang up", "hang"]
    hook = Hook(url=server.url, headers={"Authorization": TOKEN, "X-Bad": f"{TOKEN}\nX: y"}, timeout_s=0.2)
    for one in (hook, Hook(url=server.url, timeout_s=0.2)):
        with pytest.raises(NotDelivered) as caught:
            post(one, PAYLOAD, pause=Pauses())
        assert TOKEN not in "".join(traceback.format_exception(caught.value))
        assert TOKEN not in repr(one)
