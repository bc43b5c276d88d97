"""The results of a long run, 24 million blocks: ingest, size, questions; and a crowd at one database.

The peer is what one would do without a database: a Parquet file per evaluation, and polars.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars
import pytest

from dflash_core.results.compare import compare
from dflash_core.results.database import write_evaluation
from dflash_core.results.query import run_query
from dflash_core.results.report import write_report
from tests.benchmarks.measuring import FOLDER, PROJECT, Seconds, load_average, show, spread, timed
from tests.benchmarks.results_data import make_prompts, make_record

NUM_CHECKPOINTS = 100
NUM_PROMPTS = 350
NUM_TOKENS = 700
ROUNDS = 3
NUM_WRITERS = 8
NUM_READERS = 2
EVALUATIONS_PER_WRITER = 50

TAUS = "SELECT evaluation_id, tau_pooled, tau_prompt_mean FROM leaderboard ORDER BY evaluation_id"
PAIR = "SELECT prompt_id, tau_a, tau_b FROM paired WHERE step_a = {a} AND step_b = {b} ORDER BY prompt_id"
SURVIVAL = (
    "SELECT draft_position, num_survived FROM survival WHERE evaluation_id = '{one}' AND slice = 'all' ORDER BY 1"
)


@pytest.fixture(scope="module")
def database() -> Path:
    """The database, made once through the real writer and kept; what each write took lies beside it."""
    folder = FOLDER / "results"
    path, taken = folder / "acceptance.duckdb", folder / "ingest.json"
    if not taken.exists():
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.iterdir():
            old.unlink()
        seconds: dict[str, list[float]] = {"DuckDB": [], "DuckDB, CPU": [], "Parquet": []}
        begin_load = load_average()
        prompts = make_prompts(NUM_PROMPTS, NUM_TOKENS)
        for number in range(NUM_CHECKPOINTS):
            record = make_record(number, prompts, NUM_CHECKPOINTS)
            assert record.blocks is not None
            file, blocks = folder / f"{number:03}.parquet", record.blocks
            _, ours = timed(lambda record=record: write_evaluation(path, record))
            _, theirs = timed(lambda blocks=blocks, file=file: blocks.write_parquet(file, compression="zstd"))
            for name, value in zip(seconds, (ours.wall, ours.cpu, theirs.wall), strict=True):
                seconds[name].append(value)
        taken.write_text(json.dumps({"seconds": seconds, "load": begin_load}))
    return path


def test_ingest_and_size(database: Path) -> None:
    kept = json.loads((database.parent / "ingest.json").read_text())
    seconds, half = kept["seconds"], len(kept["seconds"]["DuckDB"]) // 2
    num_blocks = run_query(database, "SELECT count(*) AS n FROM blocks").item()
    assert num_blocks == NUM_CHECKPOINTS * NUM_PROMPTS * (NUM_TOKENS - 1)
    parquet_bytes = sum(file.stat().st_size for file in database.parent.glob("*.parquet"))
    rows = [
        {
            "what": "DuckDB, checked, with aggregates, prompts and intervals",
            "seconds per evaluation": spread(seconds["DuckDB"]),
            "the last half of them": spread(seconds["DuckDB"][half:]),
            "MB": database.stat().st_size / 1e6,
            "bytes per block": database.stat().st_size / num_blocks,
        },
        {
            "what": "Parquet, zstd, blocks alone",
            "seconds per evaluation": spread(seconds["Parquet"]),
            "the last half of them": spread(seconds["Parquet"][half:]),
            "MB": parquet_bytes / 1e6,
            "bytes per block": parquet_bytes / num_blocks,
        },
    ]
    show(
        f"Ingest: {NUM_CHECKPOINTS} checkpoints, {NUM_PROMPTS} prompts, {NUM_TOKENS} tokens, {num_blocks:,} blocks",
        rows,
        f"CPU seconds of one DuckDB ingest: {spread(seconds['DuckDB, CPU'])}",
        f"load average at the start {kept['load']:.1f}",
    )


def test_questions_against_parquet_and_polars(database: Path) -> None:
    first, last = 1000, 1000 * NUM_CHECKPOINTS
    one = run_query(database, f"SELECT evaluation_id FROM leaderboard WHERE step = {last}").item()
    folder = database.parent
    whole = run_query(database, TAUS)
    theirs = _polars_taus(folder)
    by_step = run_query(database, "SELECT step, tau_pooled, tau_prompt_mean FROM leaderboard ORDER BY step")
    for ours, other in zip(by_step.rows(), theirs.rows(), strict=True):
        assert ours[1:] == pytest.approx(other[1:], rel=1e-12)
    assert whole.height == NUM_CHECKPOINTS
    pair = run_query(database, PAIR.format(a=first, b=last))
    assert pair.rows() == _polars_pair(folder, 0, NUM_CHECKPOINTS - 1).rows()
    survival = run_query(database, SURVIVAL.format(one=one))
    assert survival["num_survived"].to_list() == _polars_survival(folder, NUM_CHECKPOINTS - 1)
    report = folder / "report.html"
    questions: list[tuple[str, Callable[[], Any], Callable[[], Any] | None]] = [
        ("taus of all: FROM leaderboard", lambda: run_query(database, TAUS), lambda: _polars_taus(folder)),
        (
            "two, prompt by prompt: FROM paired",
            lambda: run_query(database, PAIR.format(a=first, b=last)),
            lambda: _polars_pair(folder, 0, NUM_CHECKPOINTS - 1),
        ),
        (
            "survival of one",
            lambda: run_query(database, SURVIVAL.format(one=one)),
            lambda: _polars_survival(folder, NUM_CHECKPOINTS - 1),
        ),
        (
            "every block: mean accepted by anchor",
            lambda: run_query(database, "SELECT anchor_index, avg(num_accepted_drafts) FROM blocks GROUP BY ALL"),
            lambda: (
                polars.scan_parquet(folder / "*.parquet")
                .group_by("anchor_index")
                .agg(polars.col("num_accepted_drafts").mean())
                .collect()
            ),
        ),
        ("learning curve: FROM learning_curve", lambda: run_query(database, "FROM learning_curve"), None),
        (
            "all pairs: 3.5 million rows of paired, counted",
            lambda: run_query(database, "SELECT count(*) FROM paired"),
            None,
        ),
        ("compare of two", lambda: compare(database, [str(first), str(last)]), None),
        ("compare of all against a baseline", lambda: compare(database, [], str(first)), None),
        ("compare of all, step by step", lambda: compare(database), None),
        ("report", lambda: write_report(database, report), None),
    ]
    begin_load = load_average()
    rows = []
    for name, ours, peer in questions:
        taken, others = _rounds(ours), [] if peer is None else _rounds(peer)
        rows.append(
            {
                "question": name,
                "seconds": spread([one.wall for one in taken]),
                "CPU": spread([one.cpu for one in taken]),
                "Parquet + polars": spread([one.wall for one in others]) if others else "",
            }
        )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    show(
        "Questions",
        rows,
        f"median (least-most) of {ROUNDS} rounds after one to warm up; peak memory of the process {peak:.0f} MB; "
        f"report {report.stat().st_size / 1e6:.2f} MB; load average at the start {begin_load:.1f}",
    )


def test_a_crowd_at_one_database(tmp_path: Path) -> None:
    path = tmp_path / "acceptance.duckdb"
    begin_load, start = load_average(), time.time() + 8
    crowd = [_start("write", path, f"w{place}", EVALUATIONS_PER_WRITER, start) for place in range(NUM_WRITERS)]
    readers = [_start("read", path, f"r{place}", 3, start) for place in range(NUM_READERS)]
    found = [_answer(process) for process in crowd]
    total = time.time() - start
    Path(f"{path}.done").touch()
    found += [_answer(process) for process in readers]
    ids = run_query(path, "SELECT evaluation_id FROM evaluations")["evaluation_id"].to_list()
    expected = {f"w{w}-{place}" for w in range(NUM_WRITERS) for place in range(EVALUATIONS_PER_WRITER)}
    assert sorted(ids) == sorted(expected), "nothing lost, nothing doubled"
    rows = [
        {
            "role": role,
            "processes": len(of_role),
            "calls": sum(one["number"] for one in of_role),
            "mean seconds": sum(one["mean"] * one["number"] for one in of_role) / sum(one["number"] for one in of_role),
            "longest": max(one["longest"] for one in of_role),
        }
        for role in ("write", "read")
        for of_role in [[one for one in found if one["role"] == role]]
    ]
    show("A crowd", rows, f"{total:.1f} s in all; load average at the start {begin_load:.1f}")


def _rounds(call: Callable[[], Any]) -> list[Seconds]:
    call()
    return [timed(call)[1] for _ in range(ROUNDS)]


def _walk(folder: Path, number: int | None = None) -> polars.LazyFrame:
    name = "*.parquet" if number is None else f"{number:03}.parquet"
    return polars.scan_parquet(folder / name, include_file_paths="file").filter("is_on_walk")


def _polars_taus(folder: Path) -> polars.DataFrame:
    emitted, steps = polars.col("num_emitted_tokens").sum(), polars.len().alias("num_steps")
    per_prompt = _walk(folder).group_by("file", "prompt_id").agg(emitted, steps)
    return (
        per_prompt.group_by("file")
        .agg(
            (polars.col("num_emitted_tokens").sum() / polars.col("num_steps").sum()).alias("tau_pooled"),
            (polars.col("num_emitted_tokens") / polars.col("num_steps")).mean().alias("tau_prompt_mean"),
        )
        .sort("file")
        .collect()
    )


def _polars_pair(folder: Path, a: int, b: int) -> polars.DataFrame:
    tau = polars.col("num_emitted_tokens").sum() / polars.len()
    of_a = _walk(folder, a).group_by("prompt_id").agg(tau.alias("tau_a"))
    of_b = _walk(folder, b).group_by("prompt_id").agg(tau.alias("tau_b"))
    return of_a.join(of_b, on="prompt_id").sort("prompt_id").collect()


def _polars_survival(folder: Path, number: int) -> list[int]:
    accepted = polars.col("num_accepted_drafts")
    positions = [(accepted >= place).sum().alias(str(place)) for place in range(1, 16)]
    return list(_walk(folder, number).select(positions).collect().row(0))


def _start(role: str, path: Path, name: str, number: int, start: float) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.benchmarks.crowd", role, str(path), name, str(number), str(start)],
        cwd=PROJECT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "POLARS_MAX_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, errors = process.communicate()
    assert process.returncode == 0, errors
    answer: dict[str, Any] = json.loads(out)
    return answer
