"""A Prefect server on loopback that ends when the process that started it ends.

    python -m flows.local_server PORT PARENT_PID

Prefect's own temporary server outlives a parent that was killed; this one looks at its parent.
"""

from __future__ import annotations

import os
import sys
import threading
import time

LOOK_EVERY_S = 1.0


def _end_with(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(LOOK_EVERY_S)
    os._exit(0)


def main() -> None:
    """Serve until stopped or orphaned."""
    port, parent_pid = int(sys.argv[1]), int(sys.argv[2])
    threading.Thread(target=_end_with, args=(parent_pid,), daemon=True).start()
    import uvicorn
    from prefect.server.api.server import create_app

    uvicorn.run(create_app(), host="127.0.0.1", port=port, log_level="warning", lifespan="on")


if __name__ == "__main__":
    main()
