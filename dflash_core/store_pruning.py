"""Removing from a store what nobody needs: chosen, shown with what it would cost to make again, then removed.

An artifact is removed under its lock, which builders and readers hold, so that what is in use stays. It
is renamed away first: to others it is there whole, or not at all.
"""

from __future__ import annotations

import os
import shutil
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from dflash_core.errors import HostUnreachable
from dflash_core.store import MANIFEST_NAME, Store, lock_of_unfinished
from dflash_core.store_listing import LeftOver, Listing, StoredArtifact, list_store
from dflash_core.store_remote import RemoteStore
from dflash_core.store_remote_listing import is_used_since, remove_remote

Item = StoredArtifact | LeftOver


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """Which artifacts may go: those that meet every condition that is set. With none set, none."""

    kinds: tuple[str, ...] = ()
    older_than_s: float | None = None
    """Not used for so many seconds."""
    target: str | None = None
    """Name of the target that they belong to."""
    run: str | None = None
    """Name of the run whose checkpoint they belong to."""
    checkpoint: str | None = None
    """Address of the checkpoint that they belong to, or its end, from a slash on."""
    keep_bytes: int | None = None
    """Of those, the least recently used, until the whole store takes no more than so many bytes."""

    @property
    def is_empty(self) -> bool:
        """Is no condition set?"""
        return self == Selection()


@dataclass(frozen=True, kw_only=True, slots=True)
class PrunePlan:
    """What would be removed."""

    artifacts: tuple[StoredArtifact, ...]
    left_overs: tuple[LeftOver, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes that would become free."""
        return sum(one.size_bytes for one in self.artifacts) + sum(one.size_bytes for one in self.left_overs)

    @property
    def seconds(self) -> float:
        """How long it took to make the artifacts, as far as they say."""
        return sum(one.seconds or 0.0 for one in self.artifacts)

    @property
    def num_without_seconds(self) -> int:
        """Artifacts that do not say how long they took."""
        return sum(one.seconds is None for one in self.artifacts)

    @property
    def bytes_to_read_again(self) -> int:
        """Bytes that would have to come from the checkpoints' hosts again."""
        return sum(one.bytes_read or 0 for one in self.artifacts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pruned:
    """What was removed and what was not."""

    removed: tuple[Item, ...]
    in_use: tuple[Item, ...]
    """Builders or readers hold them, or they were used or replaced since the plan was made."""
    failed: tuple[tuple[Item, str], ...]
    """With the reason why they could not be removed."""
    num_locks: int
    """Lock files that nobody held, and whose artifact is not there."""


def plan_pruning(listing: Listing, selection: Selection, *, now: float | None = None) -> PrunePlan:
    """Choose what to remove.

    Left-overs of killed builders go too: all where nothing is selected, else those of the selected kinds
    and age. Those of one target, run or checkpoint cannot be told, so that with these none go.

    Args:
        listing: what lies in the store.
        selection: what may go.
        now: seconds since 1970; None takes the clock.
    """
    now = time.time() if now is None else now
    left_overs = (
        []
        if _names_an_owner(selection)
        else [one for one in listing.left_overs if _meets_kind_and_age(one, selection, now)]
    )
    chosen = [] if selection.is_empty else [one for one in listing.artifacts if _meets(one, selection, now)]
    chosen.sort(key=lambda one: (not one.is_damaged, one.last_used))
    if selection.keep_bytes is not None:
        excess = listing.size_bytes - sum(one.size_bytes for one in left_overs) - selection.keep_bytes
        chosen = _until(chosen, excess)
    return PrunePlan(artifacts=tuple(chosen), left_overs=tuple(left_overs))


def _until(artifacts: Sequence[StoredArtifact], excess_bytes: int) -> list[StoredArtifact]:
    """Return as many artifacts, from the first, as free so many bytes."""
    taken: list[StoredArtifact] = []
    for one in artifacts:
        if excess_bytes <= 0:
            break
        taken.append(one)
        excess_bytes -= one.size_bytes
    return taken


def _names_an_owner(selection: Selection) -> bool:
    return any(value is not None for value in (selection.target, selection.run, selection.checkpoint))


def _meets_kind_and_age(one: Item, selection: Selection, now: float) -> bool:
    if selection.kinds and one.kind not in selection.kinds:
        return False
    return selection.older_than_s is None or now - one.last_used >= selection.older_than_s


def _meets(one: StoredArtifact, selection: Selection, now: float) -> bool:
    if not _meets_kind_and_age(one, selection, now):
        return False
    if selection.target is not None and one.target != selection.target:
        return False
    name = one.checkpoint
    if selection.run is not None and (name is None or name.run != selection.run):
        return False
    return selection.checkpoint is None or (name is not None and _is_address(selection.checkpoint, name.url))


def _is_address(wanted: str, url: str) -> bool:
    wanted, url = wanted.rstrip("/"), url.rstrip("/")
    return url == wanted or url.endswith(f"/{wanted.lstrip('/')}")


def prune(store: Store, plan: PrunePlan, *, on_removed: Callable[[Item], None] = lambda item: None) -> Pruned:
    """Remove what a plan names, but what is in use.

    Args:
        store: that the plan was made for.
        plan: what to remove.
        on_removed: called after each.

    Raises:
        HostUnreachable: a remote store does not answer.
    """
    removed: list[Item] = []
    in_use: list[Item] = []
    failed: list[tuple[Item, str]] = []
    items: list[Item] = [*plan.left_overs, *plan.artifacts]
    for item in items:
        try:
            with store.lock(item.kind, item.key, wait=False):
                if _was_used_since(store, item):
                    in_use.append(item)
                elif _remove(store, item):
                    removed.append(item)
                    on_removed(item)
        except BlockingIOError:
            in_use.append(item)
        except HostUnreachable:
            raise
        except OSError as error:
            failed.append((item, error.strerror or str(error)))
    return Pruned(
        removed=tuple(removed), in_use=tuple(in_use), failed=tuple(failed), num_locks=_remove_idle_locks(store)
    )


def _was_used_since(store: Store, item: Item) -> bool:
    """Return whether an artifact was found or built after it was listed."""
    if isinstance(store, RemoteStore):
        return isinstance(item, StoredArtifact) and is_used_since(store, item)
    manifest = item.path / MANIFEST_NAME
    return isinstance(item, StoredArtifact) and manifest.exists() and manifest.stat().st_mtime > item.last_used


def _remove(store: Store, item: Item) -> bool:
    """Remove a folder whose lock is ours; False where it is gone: pruned by another, or finished by its builder.

    It is renamed to a builder's temporary folder: what a killed pruner leaves is cleaned up like one. Of a remote
    store, the copy in the mirror goes too.
    """
    is_removed = False
    if isinstance(store, RemoteStore):
        is_removed = remove_remote(store, item)
        if isinstance(item, LeftOver):
            return is_removed
    hidden = store.folder(item.kind, f".{item.key}.{uuid.uuid4().hex[:8]}.tmp")
    hidden.parent.mkdir(parents=True, exist_ok=True)
    try:
        item.path.rename(hidden)
    except FileNotFoundError:
        return is_removed
    shutil.rmtree(hidden)
    return True


def plan_mirror_pruning(store: RemoteStore) -> PrunePlan:
    """Choose all copies in a mirror, but what still has to go to the store."""
    listing = list_store(store.mirror)
    kept = [one for one in listing.artifacts if not store.is_due(one.kind, one.key)]
    return PrunePlan(artifacts=tuple(kept), left_overs=listing.left_overs)


def _remove_idle_locks(store: Store) -> int:
    """Remove lock files that nobody holds and whose artifact is not there; one that is kept costs nothing."""
    num_removed = 0
    with suppress(OSError):
        for path in sorted((store.root / "locks").iterdir()):
            kind, key = lock_of_unfinished(path.stem)
            is_lock = path.suffix == ".lock" and bool(kind)
            if not is_lock or store.folder(kind, key).exists() or (store.root / "unfinished" / path.stem).exists():
                continue
            with suppress(OSError), store.lock(kind, key, wait=False):
                os.unlink(path)
                num_removed += 1
    return num_removed
