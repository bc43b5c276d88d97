"""`dflash-eval show --probabilities` of a drafter with a confidence head, to people and to programs."""

from __future__ import annotations

import re

import pytest
import torch

from dflash_core.config import load_config
from dflash_core.target.loading import read_target_folder
from tests.support import official as scenes
from tests.support import scene as setups
from tests.support import tiny
from tests.support.direct import evaluate_directly
from tests.support.scene import Setup

DSPARK = {
    "projector_type": "dspark",
    "markov_rank": 6,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    """Write and score a DFlash (step 1) and a DSpark (step 2)."""
    made = setups.make_setup(tmp_path_factory.mktemp("confidence"), steps=(1,))
    target = read_target_folder(made.folder / "target", name="tiny")
    config = scenes.z_lab_config(target, nested=DSPARK)
    weights = scenes.random_tensors(config, target)
    generator = torch.Generator().manual_seed(5)
    weights["confidence_head.proj.weight"] = 0.1 * torch.randn(1, 64 + 6, generator=generator)
    weights["confidence_head.proj.bias"] = torch.randn(1, generator=generator)
    tiny.write_drafter(made.run / "step_2", config, weights)
    for step in (1, 2):
        evaluate_directly(load_config(made.config), made.run / f"step_{step}")
    return made


def spark(setup: Setup) -> str:
    return str(setup.run / "step_2")


def lines_of(text: str) -> str:
    """Return what was printed as one line: long ones are folded."""
    return " ".join(text.split())


def test_people_see_it_in_brackets_behind_each_probability_and_what_it_means(setup: Setup) -> None:
    blocks = setup.json("show", spark(setup), "p1")["blocks"]
    done = setup.cli("show", spark(setup), "p1", "--probabilities")
    assert done.returncode == 0, done.stderr
    expected = [
        (f"{chance:.0%}", f"{confidence:.0%}")
        for block in blocks
        for chance, confidence in zip(block["odds"]["probabilities"], block["confidences"], strict=True)
    ]
    assert re.findall(r"' (\d+%) \((\d+%)\)", done.stdout) == expected
    assert len({confidence for _, confidence in expected}) > 5
    text = lines_of(done.stdout)
    assert "in brackets: what the confidence head says" in text
    promised = []
    for block in blocks:
        alive = 1.0
        promised.append(1.0)
        for confidence in block["confidences"]:
            alive *= confidence
            promised[-1] += alive
    mean = sum(promised) / len(promised)
    assert f"its confidence head expects {mean:.2f} at temperature 1" in text


def test_it_is_shown_on_demand_alone(setup: Setup) -> None:
    text = setup.cli("show", spark(setup), "p1").stdout
    assert "%" not in text
    assert "confidence" not in text


def test_a_drafter_without_the_head_says_nothing_of_it(setup: Setup) -> None:
    text = lines_of(setup.cli("show", str(setup.run / "step_1"), "p1", "--probabilities").stdout)
    assert "after each draft: the drafter's probability" in text
    assert "confidence" not in text
    assert "%" in text
    assert "%)" not in text


def test_side_by_side_each_has_its_own(setup: Setup) -> None:
    done = setup.cli("show", str(setup.run / "step_1"), "p1", "--against", spark(setup), "--probabilities")
    rows = [line for line in done.stdout.splitlines() if re.match(r"\s*\d+ [AB] ", line)]
    assert {line.split()[1] for line in rows} == {"A", "B"}
    for line in rows:
        assert ("%)" in line) == (line.split()[1] == "B")
    assert "A: " in done.stdout
    assert "expects" not in next(line for line in done.stdout.splitlines() if line.startswith("A: "))
    assert setup.json("show", str(setup.run / "step_1"), "p1", "--against", spark(setup))["against"]["blocks"][0][
        "confidences"
    ]


def test_the_help_says_what_the_numbers_mean(setup: Setup) -> None:
    text = lines_of(setup.cli("show", "--help").stdout)
    for words in ("softmax, at temperature 1", "Markov head's bias included", "over its candidates", "confidence head"):
        assert words in text


def test_json_holds_every_number(setup: Setup) -> None:
    for block in setup.json("show", spark(setup))["blocks"]:
        count = len(block["accepted"]) + len(block["rejected"])
        assert len(block["confidences"]) == len(block["odds"]["probabilities"]) == count
        assert all(0 < number < 1 for number in block["confidences"])
