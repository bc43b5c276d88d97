"""Answers from the database that need a look at the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dflash_core import evaluation
from dflash_core.config import load_config
from dflash_core.errors import DoesNotFit
from flows.scoring import known_result
from tests.support.scene import make_setup


def test_a_gpu_that_another_drafter_fills_is_no_failure_of_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The flow waits for its turn on the device; this look comes before."""
    setup = make_setup(tmp_path / "s")
    config = load_config(setup.config)
    inspection = evaluation.inspect(str(setup.run / "step_1"), config)

    def full(*_: Any) -> None:
        raise DoesNotFit("the drafter does not fit: 7.4 GiB needed, 1.0 GiB free")

    monkeypatch.setattr(evaluation, "known_evaluation", full)
    assert known_result(config, inspection, 0.0) is None
