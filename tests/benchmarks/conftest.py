"""Benchmarks are files `bench_*.py`; they print tables and fail only where results differ, never for a time."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.demo_run import DemoRun, make_demo_run
from tests.benchmarks.measuring import FOLDER, num_threads


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    # A file named on the command line is collected in any case.
    if file_path.match("bench_*.py") and not parent.session.isinitpath(file_path):
        return pytest.Module.from_parent(parent, path=file_path)
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.timeout(0))


@pytest.fixture(autouse=True)
def _threads(_one_thread: None) -> None:
    import torch

    torch.set_num_threads(num_threads())


@pytest.fixture(scope="session")
def demo_run() -> DemoRun:
    """The demo's target with a weak and a strong drafter; made once and kept between sessions."""
    return make_demo_run(FOLDER / "demo")
