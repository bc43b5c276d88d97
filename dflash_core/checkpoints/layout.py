"""Which files make up a checkpoint: found from the names in its folder, without reading any.

A checkpoint is a file (`checkpoint-9500.pt`) or a folder (`step_100/` with `checkpoint.pt`, with
`model.safetensors`, or with shards and their index). Optimizer, scheduler and random state are
never taken for weights. What cannot be read is refused by the name of its format.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Sequence
from dataclasses import dataclass

from dflash_core.checkpoints.names import shortened
from dflash_core.checkpoints.source_base import DirEntry, FileStat, Source
from dflash_core.checkpoints.values import Layout
from dflash_core.errors import CheckpointNotFound, UnsupportedCheckpoint

SHARD_INDEX = "model.safetensors.index.json"
TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
WEIGHT_SUFFIXES = (*TORCH_SUFFIXES, ".safetensors")
# In this order where a folder has several; both SpecForge's and the usual names.
TORCH_NAMES = ("checkpoint.pt", "training_state.pt", "model.pt", "pytorch_model.bin", "model.pth", "checkpoint.pth")
_NEVER_WEIGHTS = re.compile(
    r"^(optim.*|sched.*|scaler.*|rng.*|random_states.*|training_args\.bin|training_state_rank.*|training_state\.rank.*"
    r"|trainer_state\.pt|modelopt_state\.pth|dflash_meta\.pt|.*optimizer.*|.*scheduler.*|lr_.*)$",
    re.IGNORECASE,
)
_UNFINISHED = re.compile(r"^\..*|.*\.(tmp|part|partial|incomplete)$|.*\.tmp[\w-]*$|^\.reserving-.*", re.IGNORECASE)
_STEP_PATTERNS = (
    re.compile(r"(?:global_?)?step[_-]?(\d+)", re.IGNORECASE),
    re.compile(r"(?:checkpoint|ckpt)[_-](\d+)", re.IGNORECASE),
    re.compile(r"iter(?:ation)?[_-]?(\d+)", re.IGNORECASE),
    re.compile(r"^(\d+)$"),
)
_SHARD = re.compile(r"-\d+-of-\d+\.")
_NATURAL = re.compile(r"(\d+)")
INCOMPLETE_MARKER = ".incomplete"


@dataclass(frozen=True, kw_only=True, slots=True)
class Located:
    """The files of one checkpoint."""

    path: str
    """As asked for: the file or the folder."""
    folder: str
    """Where its weights lie."""
    layout: Layout
    weights: tuple[str, ...]
    """Paths of the weight files; for shards, of the index alone."""
    beside: dict[str, DirEntry]
    """The files of the folder by name, those of other checkpoints included."""
    is_folder: bool

    @property
    def name(self) -> str:
        """The name that tells it from the others of its run."""
        return posixpath.basename(self.path)

    @property
    def files(self) -> tuple[DirEntry, ...]:
        """All files that belong to it: of a folder all, of a file that file."""
        if self.is_folder:
            return tuple(self.beside.values())
        return tuple(entry for entry in self.beside.values() if entry.path == self.path)

    @property
    def incomplete_marker(self) -> str | None:
        """Name of a file that says it is not complete, or None."""
        name = INCOMPLETE_MARKER if self.is_folder else f"{self.name}{INCOMPLETE_MARKER}"
        return name if name in self.beside else None


def locate(source: Source, path: str) -> Located:
    """Find the files of the checkpoint at a path.

    Raises:
        CheckpointNotFound: nothing is there, the folder holds no checkpoint, or more than one.
        UnsupportedCheckpoint: it is of a kind that is not read.
    """
    stat = source.stat(path)
    if stat.kind != "folder":
        return _locate_file(source, path, stat)
    entries = source.list_dir(path)
    located = locate_in_folder(path, entries)
    if located is None:
        raise _nothing_in(source.url_of(path), entries)
    weights_name = posixpath.basename(located.weights[0])
    if step_in_name(located.name) is None and step_in_name(weights_name) is not None:
        # A run's folder that holds one step so far, as a file.
        return _locate_file(source, located.weights[0], source.stat(located.weights[0]))
    return located


def locate_in_folder(path: str, entries: Sequence[DirEntry]) -> Located | None:
    """Return the checkpoint that a folder is, or None where it is none.

    Raises:
        UnsupportedCheckpoint: it is one of a kind that is not read.
    """
    files = {entry.name: entry for entry in entries if is_file(entry)}
    names = [name for name in files if not _UNFINISHED.match(name)]
    if any(name == ".metadata" or name.endswith(".distcp") for name in files):
        raise UnsupportedCheckpoint(
            f"{path} is a distributed checkpoint (DCP), which is not read yet; save its state_dict"
        )
    if "pytorch_model.bin.index.json" in files:
        raise UnsupportedCheckpoint(f"{path} holds torch shards, which are not read; save them as safetensors")
    layout: Layout
    safetensors = [name for name in names if name.endswith(".safetensors")]
    if SHARD_INDEX in names:
        layout, chosen = "safetensors_sharded", SHARD_INDEX
    elif "model.safetensors" in names or len(safetensors) == 1:
        layout, chosen = "safetensors", "model.safetensors" if "model.safetensors" in names else safetensors[0]
    else:
        torch_files = [name for name in names if is_weight_name(name) and name.endswith(TORCH_SUFFIXES)]
        known = [name for name in TORCH_NAMES if name in torch_files]
        if not known and len(torch_files) != 1:
            return None
        layout, chosen = "torch_zip", known[0] if known else torch_files[0]
    weights = (posixpath.join(path, chosen),)
    return Located(path=path, folder=path, layout=layout, weights=weights, beside=files, is_folder=True)


def is_file(entry: DirEntry) -> bool:
    """Tell whether an entry is a file, links followed."""
    return entry.stat is not None and entry.stat.kind == "file"


def without_suffix(name: str) -> str:
    """Return a file's name without the ending of a weights file."""
    return next((name.removesuffix(suffix) for suffix in WEIGHT_SUFFIXES if name.endswith(suffix)), name)


def is_weight_name(name: str) -> bool:
    """Tell whether a file of this name may hold all of a drafter's weights."""
    if not name.endswith(WEIGHT_SUFFIXES) or _SHARD.search(name):
        return False
    return not _NEVER_WEIGHTS.match(name) and not _UNFINISHED.match(name)


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


def step_and_run(located: Located) -> tuple[int | None, str]:
    """Return the step that the names tell, and the name of the folder that holds the steps."""
    step, parent = step_in_name(located.name), posixpath.dirname(located.path)
    if not located.is_folder:
        parent_step = step_in_name(posixpath.basename(parent))
        if parent_step is not None and step in (None, parent_step):
            # step_100/checkpoint.pt, given by its file
            step, parent = parent_step, posixpath.dirname(parent)
        elif step is None and located.name in (*TORCH_NAMES, "model.safetensors"):
            parent = posixpath.dirname(parent)
    return step, posixpath.basename(parent) or "run"


def _locate_file(source: Source, path: str, stat: FileStat) -> Located:
    folder, name = posixpath.split(path)
    if name == SHARD_INDEX:
        return locate(source, folder)
    entries = {entry.name: entry for entry in source.list_dir(folder or ".") if is_file(entry)}
    entries.setdefault(name, DirEntry(name=name, path=path, stat=stat))
    layout: Layout
    if name.endswith(".safetensors"):
        layout = "safetensors"
    elif name.endswith(TORCH_SUFFIXES):
        layout = "torch_zip"
    else:
        raise UnsupportedCheckpoint(
            f"{source.url_of(path)} is no checkpoint by its name, expected {', '.join(WEIGHT_SUFFIXES)}"
        )
    return Located(path=path, folder=folder, layout=layout, weights=(path,), beside=entries, is_folder=False)


def _nothing_in(url: str, entries: Sequence[DirEntry]) -> CheckpointNotFound:
    checkpoints = [entry.name for entry in entries if is_file(entry) and is_weight_name(entry.name)]
    if len(checkpoints) > 1:
        return CheckpointNotFound(f"{url} holds {len(checkpoints)} checkpoints, name one: {shortened(checkpoints)}")
    held = shortened(entry.name for entry in entries) or "nothing"
    return CheckpointNotFound(
        f"{url} is no checkpoint: it holds {held}, expected checkpoint.pt, model.safetensors or another weights file"
    )
