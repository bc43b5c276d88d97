"""`dflash-eval`, whose watch has shorter pauses: what takes minutes in weeks takes seconds in a soak.

    python -m tests.support.soak_watch watch URL ...

The numbers of attempts are those of the real one.
"""

from __future__ import annotations

import sys

from flows import watching
from flows.cli import main

QUICKENED = {"LONGEST_PAUSE_S": 6.0, "FIRST_RETRY_S": 1.5, "REOPEN_S": 15.0, "TELL_EVERY_S": 20.0}
"""20 times as quick, or more; SETTLE_S stays, for modification times have steps of one second."""
BEGIN_LIMIT_S = 45.0
"""Of a flow run, which a worker on two busy cores begins within 10 to 20 s."""

if __name__ == "__main__":
    for name, seconds in QUICKENED.items():
        assert isinstance(getattr(watching, name), float), name
        setattr(watching, name, seconds)
    if "--deployment" in sys.argv:  # without one, Prefect must not be imported before its settings are made
        from flows import watch_runs

        assert isinstance(watch_runs.BEGIN_LIMIT_S, float)
        watch_runs.BEGIN_LIMIT_S = BEGIN_LIMIT_S
    sys.exit(main())
