"""Threads come from the host: its CPUs, or what a container leaves of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from dflash_core.target.cpu import host_threads
from dflash_core.target.runtime import using_threads


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        ("max 100000", 8),
        ("200000 100000", 2),
        ("150000 100000", 2),
        ("50000 100000", 1),
        ("9900000 100000", 8),
        ("", 8),
    ],
)
def test_a_containers_limit_counts(limit: str, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    (tmp_path / "cpu.max").write_text(limit)
    assert host_threads(tmp_path) == expected


def test_without_a_container_it_is_the_cpus_that_the_process_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 3, 5})
    assert host_threads(tmp_path) == 3
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert host_threads(tmp_path) == 6


def test_threads_are_given_back() -> None:
    before = torch.get_num_threads()
    seen: list[int] = []

    def fail() -> None:
        with using_threads(before + 2):
            seen.append(torch.get_num_threads())
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert (seen, torch.get_num_threads()) == ([before + 2], before)
