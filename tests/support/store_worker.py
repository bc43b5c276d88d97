"""Use a store in a process of its own, as another machine would.

    python -m tests.support.store_worker URL HOSTS MIRROR build|find KEY [--text TEXT] [--size BYTES]
        [--kill-after BYTES] [--wait-for FILE] [--slow S]

Prints one JSON object: what was found, whether it was built, and the digest of its file.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from dflash_core import progress
from dflash_core.config import HostSettings
from dflash_core.errors import DFlashEvalError
from dflash_core.store import file_sha256
from dflash_core.store_opening import close_connections, open_store


def main() -> int:
    """Run one call of a store."""
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("hosts", type=json.loads)
    parser.add_argument("mirror")
    parser.add_argument("action", choices=("build", "find"))
    parser.add_argument("key")
    parser.add_argument("--text", default="x")
    parser.add_argument("--size", type=int, default=1000)
    parser.add_argument("--kill-after", type=int)
    parser.add_argument("--wait-for", type=Path)
    parser.add_argument("--slow", type=float, default=0.0)
    args = parser.parse_args()
    hosts = {name: HostSettings(**host) for name, host in args.hosts.items()}
    store = open_store(args.url, hosts, mirror=args.mirror)

    def write(folder: Path) -> dict[str, Any]:
        time.sleep(args.slow)
        (folder / "a.bin").write_bytes((args.text.encode() * args.size)[: args.size])
        (folder / "b.bin").write_bytes((args.text.encode() * args.size)[: args.size])
        return {"text": args.text}

    def listen(_stage: str, done: float, _total: float) -> None:
        if args.kill_after is not None and done > args.kill_after:
            os.kill(os.getpid(), signal.SIGKILL)

    print("ready", flush=True)
    while args.wait_for is not None and not args.wait_for.exists():
        time.sleep(0.002)
    try:
        with progress.listening(listen):
            artifact = store.build("kind", args.key, write) if args.action == "build" else store.find("kind", args.key)
    except DFlashEvalError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_status
    finally:
        close_connections()
    answer: dict[str, Any] = {"found": artifact is not None}
    if artifact is not None:
        digests = [file_sha256(artifact.file(name)) for name in ("a.bin", "b.bin")]
        answer |= {"was_built": artifact.was_built, "meta": dict(artifact.meta), "digests": digests}
    print(json.dumps(answer), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
