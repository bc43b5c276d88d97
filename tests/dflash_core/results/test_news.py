"""What is news about a checkpoint: a new best, a regression, and how certain it is; most checkpoints are no news."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest

from dflash_core.acceptance.statistics import PairedDifference, paired_difference
from dflash_core.results.compare import Tau
from dflash_core.results.news import news_of
from dflash_core.results.selection import Conditions
from dflash_core.results.standing import Change, Standing, What

TAU = Tau(
    tau_pooled=3.1, ci_low=3.0, ci_high=3.2, tau_prompt_mean=3.05, num_prompts=40, num_verification_steps=900, word=None
)
SAMPLE = paired_difference([10, 12, 9], [5, 5, 5], [12, 13, 10], [5, 5, 5])


def difference(value: float, low: float, high: float) -> PairedDifference:
    return replace(SAMPLE, difference=value, ci_low=low, ci_high=high, p_value=0.04, num_prompts=40, num_units=40)


def change(what: What, label: str, value: float, low: float, high: float) -> Change:
    found = difference(value, low, high)
    return Change(what=what, label=label, difference=found, datasets={"chat": found})


NO_PREVIOUS = Change(what="previous", why_not="it is the first step of its run")
NO_BEST = Change(what="best", why_not="no other checkpoint under these conditions")
NO_BASELINE = Change(what="baseline", why_not="no baseline is configured")


def standing(**changes: Any) -> Standing:
    values: dict[str, Any] = {
        "evaluation_id": "e3",
        "checkpoint_id": "c3",
        "run": "a",
        "step": 300,
        "label": "a:300",
        "url": "ssh://me@box/runs/a/step_300",
        "started_at": datetime(2026, 3, 1),
        "conditions": Conditions(**dict.fromkeys(Conditions._fields, "x") | {"block_size": 8}),
        "device": "cpu",
        "tau": TAU,
        "taus": {"chat": TAU, "code": replace(TAU, ci_low=math.nan, ci_high=math.nan, word="one prompt")},
        "previous": NO_PREVIOUS,
        "best": NO_BEST,
        "baseline": NO_BASELINE,
        "has_fallen": False,
        "fell_below_baseline": False,
    }
    return Standing(**values | changes)


class TestBest:
    def test_the_first_checkpoint_of_a_run_is_no_news(self) -> None:
        assert news_of(standing()) == []

    def test_a_lead_that_the_interval_confirms_is_certain(self) -> None:
        (news,) = news_of(standing(best=change("best", "a:200", 0.2, 0.1, 0.3)))
        assert (news.event, news.payload["certain"]) == ("best", True)
        assert news.text == "new best: a:300, tau 3.10 [3.00, 3.20], +0.20 [+0.10, +0.30] against the best other, a:200"

    def test_a_lead_that_may_be_luck_says_so(self) -> None:
        (news,) = news_of(standing(best=change("best", "a:200", 0.02, -0.1, 0.14)))
        assert news.payload["certain"] is False
        assert news.text.endswith("a:200, which may be luck: the interval includes 0")

    @pytest.mark.parametrize("value", [0.0, -0.01])
    def test_a_tie_or_less_is_no_news(self, value: float) -> None:
        assert news_of(standing(best=change("best", "a:200", value, -0.1, 0.1))) == []

    def test_the_best_may_all_the_same_be_below_the_baseline(self) -> None:
        found = news_of(
            standing(
                best=change("best", "a:200", 0.2, 0.1, 0.3),
                baseline=change("baseline", "p", -0.2, -0.3, -0.1),
            )
        )
        assert [news.event for news in found] == ["best"], "it was below before: that is no regression"


class TestRegressed:
    @pytest.mark.parametrize(
        ("changes", "worse_than"),
        [
            ({"previous": change("previous", "a:200", -0.2, -0.3, -0.1)}, ["previous"]),
            ({"best": change("best", "a:100", -0.2, -0.3, -0.1), "has_fallen": True}, ["best"]),
            ({"baseline": change("baseline", "p", -0.2, -0.3, -0.1), "fell_below_baseline": True}, ["baseline"]),
            (
                {
                    "previous": change("previous", "a:200", -0.2, -0.3, -0.1),
                    "best": change("best", "a:200", -0.2, -0.3, -0.1),
                    "has_fallen": True,
                },
                ["previous"],
            ),
        ],
        ids=["step before", "best", "baseline", "the step before is the best"],
    )
    def test_it_is_told_against_what(self, changes: dict[str, Any], worse_than: list[str]) -> None:
        (news,) = news_of(standing(**changes))
        assert (news.event, news.payload["worse_than"]) == ("regressed", worse_than)
        assert news.text.startswith("regressed: a:300, tau 3.10 [3.00, 3.20], -0.20 [-0.30, -0.10] against the ")

    def test_a_loss_that_may_be_luck_is_no_news(self) -> None:
        assert news_of(standing(previous=change("previous", "a:200", -0.2, -0.5, 0.1))) == []

    def test_a_lasting_loss_is_no_news_again(self) -> None:
        assert news_of(standing(best=change("best", "a:100", -0.2, -0.3, -0.1))) == []


def test_the_payload_is_json_without_nan_and_holds_numbers_and_conditions() -> None:
    (news,) = news_of(
        standing(best=change("best", "a:200", 0.2, 0.1, 0.3), previous=change("previous", "a:200", 0.2, 0.1, 0.3))
    )
    payload = json.loads(json.dumps(news.payload, allow_nan=False))
    assert payload == news.payload
    own = {name: payload[name] for name in ("event", "run", "step", "checkpoint", "evaluation_id")}
    assert own == {
        "event": "best",
        "run": "a",
        "step": 300,
        "checkpoint": "ssh://me@box/runs/a/step_300",
        "evaluation_id": "e3",
    }
    assert payload["tau"]["ci_low"] == 3.0
    assert payload["changes"]["previous"] == {
        "against": "a:200",
        "difference": 0.2,
        "ci_low": 0.1,
        "ci_high": 0.3,
        "p_value": 0.04,
        "num_prompts": 40,
        "word": None,
    }
    assert payload["changes"]["baseline"] == {"against": None, "why_not": "no baseline is configured"}
    assert payload["datasets"]["chat"]["changes"]["best"]["difference"] == 0.2
    assert payload["datasets"]["code"]["ci_low"] is None
    assert payload["datasets"]["code"]["changes"] == {}
    assert payload["conditions"]["block_size"] == 8
    assert payload["conditions"]["device"] == "cpu"


def test_the_same_event_of_another_evaluation_has_another_id() -> None:
    best = change("best", "a:200", 0.2, 0.1, 0.3)
    (one,), (other,) = news_of(standing(best=best)), news_of(standing(best=best, evaluation_id="e4"))
    (again,) = news_of(standing(best=best))
    assert one.key == again.key == one.payload["id"]
    assert one.key != other.key
