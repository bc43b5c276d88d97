"""What a configuration's extras come to for a drafter, and what is left out and said."""

from __future__ import annotations

from typing import Any

import pytest

from dflash_core.config import Config, parse_config
from dflash_core.drafter.extra_choice import EXTRAS_VERSION, choose_extras, read_settings
from dflash_core.drafter.extra_metrics import ExtraSettings
from dflash_core.errors import ConfigError


def chosen(rule: str = "argmax", block_size: int = 16, **drafter: Any) -> dict[str, Any]:
    config: Config = parse_config({"drafter": drafter}, where="test")
    return choose_extras(config.drafter, block_size=block_size, proposal_rule=rule)


def test_nothing_is_wanted_unless_asked_for() -> None:
    assert chosen() == {}
    assert chosen(tree_budgets=[3], temperatures=[0.5]) == {}, "settings alone ask for nothing"
    assert not read_settings({})


def test_all_kinds_with_their_defaults() -> None:
    extras = chosen(extras=["trees", "sweep", "sampled", "recall"])
    assert extras == {
        "version": EXTRAS_VERSION,
        "sweep_block_sizes": [2, 4, 8],
        "recall_ks": [1, 2, 4, 8, 16],
        "tree_budgets": [4, 8, 16, 32, 64],
        "temperatures": [1.0],
    }
    assert read_settings(extras) == ExtraSettings(
        sweep_block_sizes=(2, 4, 8),
        recall_ks=(1, 2, 4, 8, 16),
        tree_budgets=(4, 8, 16, 32, 64),
        temperatures=(1.0,),
    )


def test_order_and_repetition_decide_nothing() -> None:
    one = chosen(extras=["trees", "sampled", "trees"], tree_budgets=[8, 2, 8], temperatures=[1.5, 0.5])
    other = chosen(extras=["sampled", "trees"], tree_budgets=[2, 8], temperatures=[0.5, 1.5, 0.5])
    assert one == other


def test_a_block_size_that_is_no_shorter_is_left_out_and_said() -> None:
    extras = chosen(extras=["sweep"], sweep_block_sizes=[4, 16, 20])
    assert extras["sweep_block_sizes"] == [4]
    assert extras["left_out"] == ["extras: no sweep over block sizes [16, 20]: blocks of 16 slots are scored already"]


@pytest.mark.parametrize("rule", ["dflash2", "dspark"])
def test_rules_that_look_at_the_token_before_have_no_trees_and_say_so(rule: str) -> None:
    extras = chosen(rule, extras=["trees", "recall"])
    assert "tree_budgets" not in extras
    assert rule in extras["left_out"][0]
    only = chosen(rule, extras=["trees"])
    assert set(only) == {"version", "left_out"}
    assert not read_settings(only)


@pytest.mark.parametrize(
    ("drafter", "words"),
    [
        ({"extras": ["recal"]}, "extras"),
        ({"tree_budgets": []}, "tree_budgets"),
        ({"tree_budgets": [0]}, "tree_budgets"),
        ({"temperatures": [0.0]}, "temperatures"),
        ({"temperatures": []}, "temperatures"),
        ({"sweep_block_sizes": [1]}, "sweep_block_sizes"),
        ({"tree_budget": [4]}, "did you mean 'tree_budgets'"),
    ],
    ids=str,
)
def test_impossible_settings_are_refused_by_name(drafter: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_config({"drafter": drafter}, where="test")
