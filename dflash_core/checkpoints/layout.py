"""Which files make up a checkpoint: found from the names in its folder, without reading any.

A checkpoint is a file (`checkpoint-9500.pt`) or a folder (`step_100/` with `checkpoint.pt`, with
`model.safetensors`, with shards and their index, or with a distributed checkpoint in it or in its
`model/`). Optimizer, scheduler and random state are never taken for weights. Where a folder holds
several containers, all are named: whether they hold the same is for the reader of their indexes.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dflash_core.checkpoints.names import shortened
from dflash_core.checkpoints.paths import (
    INCOMPLETE_MARKER,
    TORCH_NAMES,
    TORCH_SUFFIXES,
    WEIGHT_SUFFIXES,
    is_file,
    is_shard_name,
    is_unfinished_name,
    is_weight_name,
    step_in_name,
)
from dflash_core.checkpoints.source_base import DirEntry, FileStat, Source
from dflash_core.checkpoints.values import Layout
from dflash_core.errors import CheckpointNotFound, UnsupportedCheckpoint

SAFETENSORS_INDEX = "model.safetensors.index.json"
TORCH_INDEX = "pytorch_model.bin.index.json"
DCP_METADATA = ".metadata"
# Folders inside a step that hold its weights: TorchSpec's and NeMo's, FSDP's of accelerate.
WEIGHT_FOLDERS = ("model", "draft_model", "consolidated", "pytorch_model_fsdp_0")
MAX_NESTED_FOLDERS = 2

Listings = Mapping[str, Sequence[DirEntry]]
"""Path of a folder to its entries."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One container of weights in a checkpoint's folder."""

    layout: Layout
    path: str
    """The file, the index of shards, or for a distributed checkpoint its folder."""

    @property
    def folder(self) -> str:
        """Return the folder that its files lie in."""
        return self.path if self.layout in ("dcp", "dcp_safetensors") else posixpath.dirname(self.path)


@dataclass(frozen=True, kw_only=True, slots=True)
class Located:
    """The files of one checkpoint."""

    path: str
    """As asked for: the file or the folder."""
    candidates: tuple[Candidate, ...]
    """Containers of its weights; the first is the one to read if the others hold the same."""
    listings: Listings
    """The folder of the checkpoint, and those inside it that hold weights."""
    is_folder: bool
    real_path: str | None = None
    """Where a link leads; None where the path is none, or its host cannot tell."""

    @property
    def name(self) -> str:
        """The name that tells it from the others of its run."""
        return posixpath.basename(self.real_path or self.path)

    @property
    def weights_folder(self) -> str:
        """Where its weights lie."""
        return self.candidates[0].folder

    @property
    def files(self) -> tuple[DirEntry, ...]:
        """All files that belong to it: of a folder all, of a file that file."""
        entries = [entry for listing in self.listings.values() for entry in listing if is_file(entry)]
        return tuple(entry for entry in entries if self.is_folder or entry.path == self.path)

    def find(self, name: str) -> DirEntry | None:
        """Return the file of that name beside the weights, else in the checkpoint's folder."""
        for folder in (self.weights_folder, self.path if self.is_folder else posixpath.dirname(self.path)):
            for entry in self.listings.get(folder, ()):
                if entry.name == name and is_file(entry):
                    return entry
        return None

    def holds(self, name: str) -> bool:
        """Tell whether the checkpoint's own folder, or that of its weights, has an entry of that name."""
        folders = (self.weights_folder, self.path if self.is_folder else posixpath.dirname(self.path))
        return any(entry.name == name for folder in folders for entry in self.listings.get(folder, ()))

    @property
    def incomplete_marker(self) -> str | None:
        """Name of a file that says it is not complete, or None."""
        name = INCOMPLETE_MARKER if self.is_folder else f"{posixpath.basename(self.path)}{INCOMPLETE_MARKER}"
        return name if self.holds(name) else None


def locate(source: Source, path: str) -> Located:
    """Find the files of the checkpoint at a path.

    Raises:
        CheckpointNotFound: nothing is there, the folder holds no checkpoint, or more than one.
        UnsupportedCheckpoint: it is a file of a kind that is not read.
    """
    stat = source.stat(path)
    if stat.kind != "folder":
        return _locate_file(source, path, stat)
    listings = {path: source.list_dir(path)}
    listings |= nested_listings(source, listings)
    located = locate_in_folder(path, listings)
    if located is None:
        raise _nothing_in(source.url_of(path), listings[path])
    first = located.candidates[0].path
    if step_in_name(located.name) is None and step_in_name(posixpath.basename(first)) is not None:
        # A run's folder that holds one step so far, as a file.
        return _locate_file(source, first, source.stat(first))
    real_path = source.realpath(path)
    return Located(
        path=path,
        candidates=located.candidates,
        listings=listings,
        is_folder=True,
        real_path=real_path if posixpath.basename(real_path) != posixpath.basename(path) else None,
    )


def nested_listings(source: Source, listings: Listings) -> dict[str, list[DirEntry]]:
    """Return the listings of the folders inside some folders that hold weights, asked for at once."""
    found: dict[str, list[DirEntry]] = {}
    outer: Listings = listings
    for _ in range(MAX_NESTED_FOLDERS):
        wanted = [
            entry.path
            for entries in outer.values()
            for entry in entries
            if entry.name in WEIGHT_FOLDERS and entry.stat is not None and entry.stat.kind == "folder"
        ]
        inner = source.list_dirs(wanted) if wanted else {}
        found |= inner
        outer = inner
    return found


def locate_in_folder(path: str, listings: Listings) -> Located | None:
    """Return the checkpoint that a folder is, or None where it is none.

    Args:
        path: the folder.
        listings: its entries, and those of the folders inside it that hold weights.
    """
    candidates = _candidates_in(path, listings[path])
    nested = [folder for folder in listings if folder.startswith(f"{path.rstrip('/')}/")]
    # A whole model beside its shards was made from them: NeMo's `model/consolidated` and `model/`.
    for folder in sorted(nested, key=len, reverse=True):
        if not any(candidate.folder.startswith(f"{folder}/") for candidate in candidates):
            candidates += _candidates_in(folder, listings[folder])
    if not candidates:
        return None
    own = {folder: entries for folder, entries in listings.items() if folder == path or folder in nested}
    return Located(path=path, candidates=tuple(candidates), listings=own, is_folder=True)


def _candidates_in(folder: str, entries: Sequence[DirEntry]) -> list[Candidate]:
    """Return the containers of weights that lie in one folder, the preferred first."""
    files = [entry.name for entry in entries if is_file(entry)]
    names = [name for name in files if not is_unfinished_name(name)]
    found: list[Candidate] = []

    def add(layout: Layout, name: str) -> None:
        found.append(Candidate(layout=layout, path=posixpath.join(folder, name) if name else folder))

    safetensors = [name for name in names if name.endswith(".safetensors")]
    whole = [name for name in safetensors if not is_shard_name(name)]
    if SAFETENSORS_INDEX in names:
        add("safetensors_sharded", SAFETENSORS_INDEX)
    elif any(name.startswith("shard-") for name in safetensors):
        add("dcp_safetensors", "")
    elif "model.safetensors" in names or len(whole) == 1:
        add("safetensors", "model.safetensors" if "model.safetensors" in names else whole[0])
    elif safetensors and not whole:
        add("safetensors_sharded", safetensors[0])
    if DCP_METADATA in files or any(name.endswith(".distcp") for name in files):
        add("dcp", "")
    if TORCH_INDEX in names:
        add("torch_sharded", TORCH_INDEX)
    torch_files = [name for name in names if is_weight_name(name) and name.endswith(TORCH_SUFFIXES)]
    known = [name for name in TORCH_NAMES if name in torch_files]
    for name in known or (torch_files if len(torch_files) == 1 else []):
        add("torch_zip", name)
    return found


def step_and_run(located: Located) -> tuple[int | None, str]:
    """Return the step that the names tell, and the name of the folder that holds the steps."""
    step, parent = step_in_name(located.name), posixpath.dirname(located.real_path or located.path)
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
    if name in (SAFETENSORS_INDEX, TORCH_INDEX, DCP_METADATA):
        return locate(source, folder)
    entries = source.list_dir(folder or ".")
    if not any(entry.name == name for entry in entries):
        entries.append(DirEntry(name=name, path=path, stat=stat))
    layout: Layout
    if name.endswith(".safetensors"):
        layout = "safetensors"
    elif name.endswith(TORCH_SUFFIXES):
        layout = "torch_zip"
    else:
        raise UnsupportedCheckpoint(
            f"{source.url_of(path)} is no checkpoint by its name, expected {', '.join(WEIGHT_SUFFIXES)}"
        )
    is_link = any(entry.name == name and entry.is_link for entry in entries)
    return Located(
        path=path,
        candidates=(Candidate(layout=layout, path=path),),
        listings={folder: entries},
        is_folder=False,
        real_path=source.realpath(path) if is_link else None,
    )


def _nothing_in(url: str, entries: Sequence[DirEntry]) -> CheckpointNotFound:
    checkpoints = [entry.name for entry in entries if is_file(entry) and is_weight_name(entry.name)]
    if len(checkpoints) > 1:
        return CheckpointNotFound(f"{url} holds {len(checkpoints)} checkpoints, name one: {shortened(checkpoints)}")
    held = shortened(entry.name for entry in entries) or "nothing"
    return CheckpointNotFound(
        f"{url} is no checkpoint: it holds {held}, expected checkpoint.pt, model.safetensors or another weights file"
    )
