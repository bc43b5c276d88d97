"""Finding the checkpoints of a run, and telling which are ready to be scored."""

from __future__ import annotations

import hashlib
import posixpath
from collections.abc import Iterable, Mapping
from contextlib import ExitStack

from dflash_core.checkpoints.layout import Listings, locate, locate_in_folder, nested_listings, step_and_run
from dflash_core.checkpoints.names import read_roles, refusal, shortened
from dflash_core.checkpoints.opening import open_weights
from dflash_core.checkpoints.paths import (
    INCOMPLETE_MARKER,
    is_file,
    is_unfinished_name,
    is_weight_name,
    natural_key,
    step_in_name,
    without_suffix,
)
from dflash_core.checkpoints.side_files import read_side_files
from dflash_core.checkpoints.source_base import DirEntry, Source
from dflash_core.checkpoints.sources import open_source
from dflash_core.checkpoints.values import CheckpointCutOff, FoundCheckpoint, Readiness
from dflash_core.config import HostSettings
from dflash_core.errors import CheckpointError, CheckpointNotFound, CheckpointNotReady


def list_checkpoints(
    run_url: str,
    *,
    hosts: Mapping[str, HostSettings] | None = None,
    run: str | None = None,
    source: Source | None = None,
    allow_empty: bool = False,
) -> list[FoundCheckpoint]:
    """Return the checkpoints in a run's folder in the order of their steps; reads no file.

    Links are followed and counted once (`step_latest` is `step_300`); hidden and temporary names
    are passed over. A URL of one checkpoint gives that one.

    Args:
        run_url: the folder that holds the steps, or one checkpoint.
        hosts: the configured hosts.
        run: name of the training run; None takes the folder that holds the steps.
        source: an open source of the same place, to save a connection.
        allow_empty: return an empty list for a folder without a checkpoint, as a watch wants that
            starts before the training.

    Raises:
        CheckpointNotFound: nothing is there, or no checkpoint in it.
        HostUnreachable, HostKeyUnknown: its host cannot be used.
    """
    with ExitStack() as stack:
        place = source or stack.enter_context(open_source(run_url, hosts or {}))
        path = place.path_of(run_url)
        if place.stat(path).kind != "folder":
            located = locate(place, path)
            beside = located.listings[posixpath.dirname(path)]
            entry = next(entry for entry in beside if entry.path == path)
            return [_found_file(place, entry, run or step_and_run(located)[1], {entry.name for entry in beside})]
        entries = place.list_dir(path)
        listings: Listings = {path: entries}
        if not _holds_steps(path, entries):
            listings = {path: entries, **nested_listings(place, listings)}
            if locate_in_folder(path, listings) is not None:
                return [_found_folder(place, path, run or _folder_name(posixpath.dirname(path)), listings)]
        found = _in_run_folder(place, path, run or _folder_name(path), entries)
        if not found and not allow_empty:
            held = shortened(entry.name for entry in entries) or "nothing"
            raise CheckpointNotFound(
                f"{run_url} holds no checkpoint but {held}; expected folders such as step_100 with checkpoint.pt or "
                "model.safetensors, or files such as checkpoint-100.pt"
            )
        return found


def check_readiness(
    found: FoundCheckpoint,
    previous_signature: str | None,
    *,
    hosts: Mapping[str, HostSettings] | None = None,
    source: Source | None = None,
) -> Readiness:
    """Tell whether a checkpoint is whole and nobody is writing it.

    Args:
        found: as listed now.
        previous_signature: its signature at the last look; None at the first.
        hosts: the configured hosts.
        source: an open source of the same place, to save a connection.

    Returns:
        Ready when two looks saw the same sizes and times, no marker says otherwise, and each file
        ends where its own index says. A checkpoint that is damaged or of a kind that is refused
        counts as ready, so that scoring it records why.

    Raises:
        HostUnreachable, HostKeyUnknown: its host cannot be used.
    """
    if found.incomplete_reason is not None:
        return Readiness(ready=False, reason=found.incomplete_reason)
    if previous_signature is None:
        return Readiness(ready=False, reason="seen for the first time; it must be the same at a second look")
    if previous_signature != found.signature:
        return Readiness(ready=False, reason="it changed since the last look; its writer is at work")
    with ExitStack() as stack:
        try:
            place = source or stack.enter_context(open_source(found.url, hosts or {}))
            located = locate(place, place.path_of(found.url))
            read_side_files(place, located)
            why = refusal(read_roles(open_weights(place, located, stack).tensors), where=found.url)
        except (CheckpointCutOff, CheckpointNotReady, CheckpointNotFound) as error:
            return Readiness(ready=False, reason=str(error))
        except CheckpointError as error:
            why = error
    if why is not None:
        return Readiness(ready=True, reason=f"unchanged, but will be refused: {why}")
    return Readiness(ready=True, reason="unchanged over two looks, and complete")


def _in_run_folder(source: Source, path: str, run: str, entries: list[DirEntry]) -> list[FoundCheckpoint]:
    """Return what a run's folder holds: one checkpoint per file of weights and per folder with some."""
    kept = _without_doubles(source, path, [entry for entry in entries if not is_unfinished_name(entry.name)])
    folders = [entry.path for entry in kept if entry.stat is not None and entry.stat.kind == "folder"]
    contents: Listings = dict(source.list_dirs(folders))
    contents = {**contents, **nested_listings(source, contents)}
    names = {entry.name for entry in entries}
    found = [
        _found_folder(source, folder, run, _below(folder, contents))
        for folder in folders
        if locate_in_folder(folder, _below(folder, contents)) is not None
    ]
    found += [_found_file(source, entry, run, names) for entry in kept if is_file(entry) and is_weight_name(entry.name)]
    return sorted(found, key=lambda one: (one.step is None, one.step or 0, natural_key(one.name)))


def _without_doubles(source: Source, path: str, entries: list[DirEntry]) -> list[DirEntry]:
    """Return entries without links to each other or to what is listed under its own name."""
    present = [entry for entry in entries if entry.stat is not None]
    links = [entry for entry in present if entry.is_link]
    if not links:
        return present
    real_folder = source.realpath(path)
    seen = {posixpath.join(real_folder, entry.name) for entry in present if not entry.is_link}
    kept = [entry for entry in present if not entry.is_link]
    for link in sorted(links, key=lambda entry: natural_key(entry.name)):
        real_path = source.realpath(link.path)
        if real_path not in seen:
            seen.add(real_path)
            kept.append(link)
    return kept


def _below(folder: str, listings: Listings) -> Listings:
    """Return the listings of a folder and of those inside it."""
    return {path: entries for path, entries in listings.items() if path == folder or path.startswith(f"{folder}/")}


def _folder_name(path: str) -> str:
    return posixpath.basename(path) or "run"


def _holds_steps(path: str, entries: list[DirEntry]) -> bool:
    """Tell whether a folder that could be a checkpoint is a run: it holds steps other than itself."""
    steps = {
        step_in_name(entry.name)
        for entry in entries
        if not is_unfinished_name(entry.name) and (not is_file(entry) or is_weight_name(entry.name))
    }
    return bool(steps - {None, step_in_name(posixpath.basename(path))})


def _found_folder(source: Source, path: str, run: str, listings: Listings) -> FoundCheckpoint:
    name = posixpath.basename(path)
    files = [entry for entries in listings.values() for entry in entries if is_file(entry)]
    is_marked = any(entry.name == INCOMPLETE_MARKER for entry in files)
    return FoundCheckpoint(
        url=source.url_of(path),
        run=run,
        name=name,
        step=step_in_name(name),
        signature=_signature(files),
        incomplete_reason=f"a file {INCOMPLETE_MARKER} lies in it" if is_marked else None,
    )


def _found_file(source: Source, entry: DirEntry, run: str, names: set[str]) -> FoundCheckpoint:
    marker = f"{entry.name}{INCOMPLETE_MARKER}"
    return FoundCheckpoint(
        url=source.url_of(entry.path),
        run=run,
        name=without_suffix(entry.name),
        step=step_in_name(entry.name),
        signature=_signature([entry]),
        incomplete_reason=f"a file {marker} lies beside it" if marker in names else None,
    )


def _signature(files: Iterable[DirEntry]) -> str:
    digest = hashlib.sha256()
    for entry in sorted(files, key=lambda entry: entry.path):
        if entry.stat is not None:
            digest.update(f"{entry.path}\0{entry.stat.version}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()
