"""The demo as a person runs it: everything real, end to end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_demo_shows_a_rise_on_what_was_trained_on_and_reads_a_tenth(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "flows.cli", "demo", "--folder", str(tmp_path / "demo"), "--json"],
        cwd=Path(__file__).parents[2],
        env={name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")},
        capture_output=True,
        text=True,
        timeout=1400,
    )
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    curve = {result["step"]: result for result in shown["checkpoints"]}
    assert sorted(curve) == [0, 60, 120, 180, 240, 300, 360]
    taus = {step: result["groups"]["trained on"]["tau_pooled"] for step, result in curve.items()}
    assert taus[0] == pytest.approx(1.0, abs=0.1)
    assert taus[360] > 5.0
    assert taus[60] < taus[180] < taus[300]
    assert all(result["groups"]["never seen"]["tau_pooled"] < 1.5 for result in curve.values())
    assert set(curve[360]["datasets"]) == {"all", "chat", "code", "math", "languages"}
    for result in curve.values():
        wanted = result["bytes_wanted"]
        assert result["bytes_read"] <= wanted + max(wanted // 100, 1_000_000)
        assert result["bytes_total"] > 10 * wanted
    page = Path(shown["report"]).read_text()
    assert "stand-in" in page
    assert "plotly" in page
    assert '<ol class="drafts">' in page, "the drafts of its best and worst prompts"
