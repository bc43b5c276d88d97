"""One process of a crowd at one results database: a writer or a reader, which prints how long it had to wait.

    python -m tests.benchmarks.crowd write PATH NAME NUMBER START
    python -m tests.benchmarks.crowd read PATH NAME NUMBER START

A writer stores NUMBER evaluations, one of them twice; a reader asks until a file `PATH.done` exists, NUMBER times at
least, and checks each answer. Both begin at START, seconds since 1970, and print one JSON object.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path

from dflash_core.errors import NoResults
from dflash_core.results.database import write_evaluation
from dflash_core.results.query import run_query
from tests.dflash_core.results.builders import make_prompts, make_record

WHOLE = """
    SELECT evaluation_id, count(*) FILTER (is_on_walk) AS found, any_value(num_verification_steps) AS said
    FROM blocks JOIN acceptance USING (evaluation_id) WHERE slice = 'all' GROUP BY ALL
"""
"""Of each evaluation its steps, counted and as stored: a reader must never see one without the other."""
NUM_PROMPTS = 3


def write(path: str, name: str, number: int, start: float) -> dict[str, object]:
    """Store evaluations and return the longest and the mean wait, in seconds."""
    record = make_record("any", prompts=make_prompts(NUM_PROMPTS), seed=len(name))
    time.sleep(max(0.0, start - time.time()))
    waits = []
    for place in (*range(number), 0):
        mine = dataclasses.replace(record, evaluation_id=f"{name}-{place}")
        begin = time.monotonic()
        write_evaluation(path, mine)
        waits.append(time.monotonic() - begin)
    return {"role": "write", "longest": max(waits), "mean": sum(waits) / len(waits), "number": len(waits)}


def read(path: str, _name: str, number: int, start: float) -> dict[str, object]:
    """Ask over and over, check what comes, and return the longest and the mean wait, in seconds."""
    time.sleep(max(0.0, start - time.time()))
    waits: list[float] = []
    seen: set[str] = set()
    while len(waits) < number or not Path(path + ".done").exists():
        begin = time.monotonic()
        try:
            rows = run_query(path, WHOLE).rows()
        except NoResults:
            rows = []
        waits.append(time.monotonic() - begin)
        assert all(found == said for _, found, said in rows), rows
        now = {row[0] for row in rows}
        assert seen <= now, f"lost {sorted(seen - now)}"
        seen = now
        time.sleep(0.02)
    return {"role": "read", "longest": max(waits), "mean": sum(waits) / len(waits), "number": len(waits)}


if __name__ == "__main__":
    _, role, path, name, number, start = sys.argv
    act = {"write": write, "read": read}[role]
    print(json.dumps(act(path, name, int(number), float(start))))
