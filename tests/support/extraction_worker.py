"""Extract hidden states in a process of its own: one that ends itself at a given place, or that is not alone.

    python -m tests.support.extraction_worker TARGET STORE LAYERS [--kill-at TEXT] [--wait-for FILE] [--pause-s S]

Prints one JSON object: how often the target read a transcript, which layers ran, and whether anything was made.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from pathlib import Path

import torch

from dflash_core import progress
from dflash_core.store import Store
from dflash_core.target import runtime
from dflash_core.target.hidden_states import KIND, extract_hidden_states
from dflash_core.target.loading import read_target_folder
from dflash_core.target.transcripts import Transcript


def make_transcripts(*lengths: tuple[int, int]) -> list[Transcript]:
    """Return random transcripts, always the same ones, given prompt and response tokens of each."""
    generator = torch.Generator().manual_seed(3)
    return [
        Transcript(
            id=f"p{number}",
            prompt_ids=tuple(torch.randint(8, 150, (num_prompt,), generator=generator).tolist()),
            response_ids=tuple(torch.randint(8, 150, (num_response,), generator=generator).tolist()),
            stop_reason="length",
        )
        for number, (num_prompt, num_response) in enumerate(lengths)
    ]


TRANSCRIPTS = make_transcripts((5, 12), (1, 3), (9, 12), (5, 12))
"""One of a single prompt token, two of one length."""


def main() -> None:
    """Run the extraction."""
    parser = argparse.ArgumentParser()
    parser.add_argument("target", type=Path)
    parser.add_argument("store")
    parser.add_argument("layers", type=json.loads)
    parser.add_argument("--kill-at")
    parser.add_argument("--wait-for", type=Path)
    parser.add_argument("--pause-s", type=float, default=0.0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    steps: list[str] = []

    def listen(_stage: str, _done: float, _total: float) -> None:
        detail = progress.detail(KIND)
        steps.append(detail.partition(",")[0])
        time.sleep(args.pause_s)
        if args.kill_at is not None and detail == args.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    target = read_target_folder(args.target, name="tiny")
    print("ready", flush=True)
    while args.wait_for is not None and not args.wait_for.exists():
        time.sleep(0.005)
    with progress.listening(listen):
        states = extract_hidden_states(
            Store(args.store), target, TRANSCRIPTS, args.layers, compute_dtype="float32", store_dtype="float32"
        )
    done = {"passes": runtime.num_forward_passes, "steps": list(dict.fromkeys(steps)), "was_built": states.was_built}
    print(json.dumps(done), flush=True)


if __name__ == "__main__":
    main()
