"""The short form of the soak: every fate of a checkpoint and every kind of fault once; see `python -m tests.soak`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.soak import run_soak
from tests.support.soak_plan import SHARES, make_plan
from tests.support.soak_systems import Direct
from tests.support.soak_table import problems, table

SEED = 7
SETTLE_S = 300.0
"""A bound for a machine that is very busy; a free one needs ten seconds."""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks for processes in /proc")
def test_nothing_is_lost_doubled_or_wrong_whatever_breaks(tmp_path: Path) -> None:
    plan = make_plan(SEED, num_checkpoints=12, seconds=30.0, fault_kinds=Direct.kinds, num_faults=len(Direct.kinds))
    outcome = run_soak(tmp_path, plan, settle_s=SETTLE_S)
    print(table(outcome))
    assert problems(outcome) == []
    assert set(outcome.faults) == set(Direct.kinds)
    assert outcome.verdict.counts["sound"] >= 4
    assert outcome.verdict.counts["evaluations"] >= outcome.verdict.counts["sound"]


def test_one_seed_decides_everything() -> None:
    first, again, other = (
        make_plan(seed, num_checkpoints=200, seconds=600.0, fault_kinds=Direct.kinds, num_faults=60)
        for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other
    assert {one.fate for one in first.checkpoints} == set(SHARES)
    assert {fault.kind for fault in first.faults} == set(Direct.kinds)
    assert len({one.step for one in first.checkpoints}) == 200
    assert [one.step for one in first.checkpoints] != sorted(one.step for one in first.checkpoints)
