"""Do one box's part of the work in a process of its own, with its own home folder, without Prefect.

    python -m tests.support.box_worker CONFIG prepare LAYERS
    python -m tests.support.box_worker CONFIG evaluate CHECKPOINT

Prints one JSON object.
"""

from __future__ import annotations

import json
import sys

import torch

from dflash_core import stages
from dflash_core.config import load_config
from dflash_core.store_opening import close_connections
from dflash_core.target import runtime
from tests.support.direct import evaluate_directly


def main() -> None:
    """Run a part."""
    config_path, part, argument = sys.argv[1:]
    torch.set_num_threads(1)
    config = load_config(config_path)
    if part == "prepare":
        transcripts = stages.write_transcripts(config)
        states = stages.extract_hidden_states(config, tuple(json.loads(argument)))
        said = {"built": {"transcripts": transcripts["was_built"], "hidden_states": states["was_built"]}}
    else:
        evaluated = evaluate_directly(config, argument)
        said = {"built": {name: one["was_built"] for name, one in evaluated.manifests.items()}}
        said |= {"walks": evaluated.walks()}
    close_connections()
    print(json.dumps(said | {"passes": runtime.num_forward_passes}))


if __name__ == "__main__":
    main()
