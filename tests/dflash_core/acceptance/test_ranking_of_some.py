"""Asking about some drafters gives what asking about all of them says of those."""

from __future__ import annotations

import numpy as np

from dflash_core.acceptance.ranking import told_from_best


def test_some_places_are_judged_against_all() -> None:
    generator = np.random.default_rng(3)
    steps_MN = generator.integers(20, 60, size=(6, 30))
    emitted_MN = steps_MN * 2 + generator.integers(0, 30, size=(6, 30)) + 8 * np.arange(6)[:, None]
    of_all = told_from_best(emitted_MN, steps_MN)
    assert set(of_all) == {True, False}, "the example tells something"
    assert told_from_best(emitted_MN, steps_MN, places=[5, 0, 2]) == [of_all[5], of_all[0], of_all[2]]
    assert told_from_best(emitted_MN[:1], steps_MN[:1], places=[0]) == [False]
