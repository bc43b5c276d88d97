"""The long form of the soak: what the README's figures come from.

python -m tests.soak --checkpoints 200 --minutes 10 --seed 1
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

from tests.support.soak import KINDS, run_soak
from tests.support.soak_plan import make_plan
from tests.support.soak_table import problems, table


def main() -> int:
    """Run it, and print a table of figures; the exit status tells whether all was well."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__.splitlines()[0])
    parser.add_argument("--kind", choices=list(KINDS), default="direct")
    parser.add_argument("--checkpoints", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long checkpoints appear and faults come")
    parser.add_argument("--faults", type=int, default=60)
    parser.add_argument("--settle-minutes", type=float, default=10.0, help="how long after that all must be well")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 31))
    parser.add_argument("--folder", type=Path, help="an empty folder that is kept; default: one that is removed")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    plan = make_plan(
        options.seed,
        num_checkpoints=options.checkpoints,
        seconds=60 * options.minutes,
        fault_kinds=KINDS[options.kind],
        num_faults=options.faults,
    )

    def say(text: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)

    with tempfile.TemporaryDirectory(prefix="dflash-soak-") as temporary:
        folder = options.folder or Path(temporary)
        outcome = run_soak(folder, plan, settle_s=60 * options.settle_minutes, kind=options.kind, say=say)
    print(table(outcome))
    return 1 if problems(outcome) else 0


if __name__ == "__main__":
    sys.exit(main())
