"""What the names of files and folders tell: weights or not, finished or not, which training step."""

from __future__ import annotations

import re

from dflash_core.checkpoints.source_base import DirEntry

TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
WEIGHT_SUFFIXES = (*TORCH_SUFFIXES, ".safetensors")
# In this order where a folder has several; both SpecForge's and the usual names.
TORCH_NAMES = ("checkpoint.pt", "training_state.pt", "model.pt", "pytorch_model.bin", "model.pth", "checkpoint.pth")
INCOMPLETE_MARKER = ".incomplete"
_NEVER_WEIGHTS = re.compile(
    r"^(optim.*|sched.*|scaler.*|rng.*|random_states.*|training_args\.bin|training_state_rank.*|training_state\.rank.*"
    r"|trainer_state\.pt|modelopt_state\.pth|dflash_meta\.pt|.*optimizer.*|.*scheduler.*|lr_.*|mask_embedding\.pt)$",
    re.IGNORECASE,
)
_UNFINISHED = re.compile(r"^\..*|.*\.(tmp|part|partial|incomplete)$|.*\.tmp[\w-]*$|^\.reserving-.*", re.IGNORECASE)
_STEP_PATTERNS = (
    re.compile(r"(?:global_?)?step[_-]?(\d+)", re.IGNORECASE),
    re.compile(r"(?:checkpoint|ckpt)[_-](\d+)", re.IGNORECASE),
    re.compile(r"iter(?:ation)?[_-]?(\d+)", re.IGNORECASE),
    re.compile(r"^(\d+)$"),
)
_SHARD = re.compile(r"-(\d+)-of-(\d+)\.")
_NATURAL = re.compile(r"(\d+)")


def is_file(entry: DirEntry) -> bool:
    """Tell whether an entry is a file, links followed."""
    return entry.stat is not None and entry.stat.kind == "file"


def without_suffix(name: str) -> str:
    """Return a file's name without the ending of a weights file."""
    return next((name.removesuffix(suffix) for suffix in WEIGHT_SUFFIXES if name.endswith(suffix)), name)


def is_weight_name(name: str) -> bool:
    """Tell whether a file of this name may hold all of a drafter's weights."""
    if not name.endswith(WEIGHT_SUFFIXES) or is_shard_name(name):
        return False
    return not _NEVER_WEIGHTS.match(name) and not _UNFINISHED.match(name)


def is_shard_name(name: str) -> bool:
    """Tell whether a name is that of one of several shards: `model-00001-of-00002.safetensors`."""
    return _SHARD.search(name) is not None


def shard_numbers(name: str) -> tuple[int, int] | None:
    """Return which shard of how many a name says it is, or None."""
    found = _SHARD.search(name)
    return (int(found[1]), int(found[2])) if found else None


def is_unfinished_name(name: str) -> bool:
    """Tell whether a name is that of something still being written, or hidden."""
    return bool(_UNFINISHED.match(name))


def step_in_name(name: str) -> int | None:
    """Return the training step in a file's or folder's name: 100 for `step_100` and `checkpoint-100.pt`."""
    stem = without_suffix(name)
    for pattern in _STEP_PATTERNS:
        if found := pattern.findall(stem):
            return int(found[-1])
    return None


def natural_key(name: str) -> tuple[tuple[int, str], ...]:
    """Return a key that sorts `step_9` before `step_10`."""
    return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in _NATURAL.split(name))
