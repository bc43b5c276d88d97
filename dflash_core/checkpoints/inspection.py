"""Looking at a checkpoint: what it holds and what it would cost, from its index alone.

`open_checkpoint` is the common ground of inspecting and streaming; it keeps the files open, so that
what is planned and what is read are the same.
"""

from __future__ import annotations

import hashlib
import posixpath
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from dflash_core.checkpoints.container import Container
from dflash_core.checkpoints.facts import step_of
from dflash_core.checkpoints.layout import Located, locate, step_and_run
from dflash_core.checkpoints.names import NamedRole, read_roles, refusal
from dflash_core.checkpoints.opening import open_weights
from dflash_core.checkpoints.side_files import read_side_files
from dflash_core.checkpoints.source_base import Source
from dflash_core.checkpoints.sources import open_source
from dflash_core.checkpoints.trainers import Dialect, recognise
from dflash_core.checkpoints.values import CheckpointCutOff, CheckpointInspection, CheckpointRef, Facts, TensorEntry
from dflash_core.config import HostSettings
from dflash_core.errors import CheckpointError, CheckpointNotFound, CheckpointNotReady, CheckpointVanished


@dataclass(kw_only=True, slots=True)
class OpenCheckpoint:
    """A checkpoint whose index was read and whose files are open."""

    ref: CheckpointRef
    dialect: Dialect
    entries: tuple[TensorEntry, ...]
    container: Container
    facts: Facts
    config: dict[str, Any] | None
    refusal: CheckpointError | None
    """Why it cannot be scored, or None."""
    contradictions: tuple[str, ...]

    @property
    def bytes_wanted(self) -> int:
        """Return the bytes of the drafter's own tensors."""
        return sum(entry.size_bytes for entry in self.entries if entry.role == "drafter")


def inspect_checkpoint(
    url: str,
    *,
    hosts: Mapping[str, HostSettings] | None = None,
    run: str | None = None,
    source: Source | None = None,
) -> CheckpointInspection:
    """Look at a checkpoint without reading its tensors.

    Args:
        url: a file or folder; a path or URL.
        hosts: the configured hosts.
        run: name of the training run; None takes the folder that holds the steps.
        source: an open source of the same place, to save a connection.

    Returns:
        What it holds. A checkpoint that is still being written is described with `ready=False`; one
        that holds tensors of no drafter, or lacks some, with the reason in `refusal`.

    Raises:
        CheckpointNotFound: nothing is there, or no checkpoint.
        UnsupportedCheckpoint: it is of a kind that is not read.
        CheckpointCorrupt: its index contradicts itself.
        HostUnreachable, HostKeyUnknown: its host cannot be used.
    """
    with ExitStack() as stack:
        place = source or stack.enter_context(open_source(url, hosts or {}))
        read_before = place.bytes_read
        try:
            held = stack.enter_context(open_checkpoint(place, url, run=run))
        except (CheckpointCutOff, CheckpointNotReady) as error:
            return _not_ready(place, url, run, str(error), place.bytes_read - read_before)
        return CheckpointInspection(
            ref=held.ref,
            dialect=held.dialect,
            ready=True,
            not_ready_reason=None,
            refusal=None if held.refusal is None else str(held.refusal),
            tensors=held.entries,
            bytes_wanted=held.bytes_wanted,
            bytes_total=held.ref.bytes_total,
            bytes_read=place.bytes_read - read_before,
            facts=held.facts,
            config=held.config,
            odd_globals=held.container.odd_globals,
            contradictions=held.contradictions,
        )


@contextmanager
def open_checkpoint(source: Source, url: str, *, run: str | None) -> Iterator[OpenCheckpoint]:
    """Open a checkpoint and read its index; the files stay open in the `with` block.

    Raises:
        CheckpointNotReady: a marker or a missing shard says that it is still being written.
        CheckpointCutOff: a file of it ends early.
        CheckpointVanished: its files went away while it was looked at.
    """
    located = locate(source, source.path_of(url))
    with ExitStack() as stack:
        try:
            facts, config = read_side_files(source, located)
            container = open_weights(source, located, stack)
        except CheckpointNotFound as error:
            raise CheckpointVanished(
                f"{url} went away while it was looked at ({error}); it was deleted, renamed or rotated away"
            ) from error
        facts = {**facts, **container.facts}
        named_step, named_run = step_and_run(located)
        content_step = step_of(facts)
        roles = read_roles(container.tensors)
        yield OpenCheckpoint(
            ref=CheckpointRef(
                url=url,
                run=run or named_run,
                step=named_step if content_step is None else content_step,
                layout=container.layout,
                identity=_identity(container, named_run, named_step),
                bytes_total=_bytes_total(located),
                files=tuple(entry.path for entry in located.files),
            ),
            dialect=recognise(located, config, container.weights_under),
            entries=_entries(container, roles),
            container=container,
            facts=facts,
            config=config,
            refusal=refusal(roles, where=url),
            # A bare number as a name may count epochs, as speculators' does.
            contradictions=tuple(
                _contradictions(None if located.name.isdecimal() else named_step, content_step, config, roles)
            ),
        )


def _entries(container: Container, roles: Mapping[str, NamedRole]) -> tuple[TensorEntry, ...]:
    """Describe all tensors of a checkpoint."""
    return tuple(
        TensorEntry(
            name=name,
            canonical_name=role.canonical_name,
            dtype=container.tensors[name].element.name,
            shape=container.tensors[name].shape,
            size_bytes=container.tensors[name].size_bytes,
            role=role.role,
            reason=role.reason,
        )
        for name, role in roles.items()
    )


def _contradictions(
    named_step: int | None, content_step: int | None, config: Mapping[str, Any] | None, roles: Mapping[str, NamedRole]
) -> Iterator[str]:
    """Yield what two places of a checkpoint say differently."""
    if None not in (named_step, content_step) and named_step != content_step:
        yield f"its name says step {named_step}, its content step {content_step}; the content is believed"
    backbone = (config or {}).get("transformer_layer_config") or config or {}
    stated = backbone.get("num_hidden_layers") if isinstance(backbone, dict) else None
    layers = {
        role.canonical_name.split(".")[1]
        for role in roles.values()
        if role.canonical_name and role.canonical_name.startswith("layers.")
    }
    if isinstance(stated, int) and stated != len(layers):
        yield f"config.json says num_hidden_layers = {stated}, the tensors make {len(layers)} layers"


def _identity(container: Container, run: str, step: int | None) -> str:
    """Return what tells these bytes from others: the index and, where no checksums stand in it, the names around it.

    Header, size and time (over SFTP in whole seconds) are the same for two steps that were copied within one second.
    """
    if container.has_checksums:
        return container.identity
    folder, _ = posixpath.split(container.files[0].path)
    names = [run, posixpath.basename(folder) if step is None else str(step)]
    names += sorted(posixpath.basename(file.path) for file in container.files)
    text = "\0".join([container.identity, *names])
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()


def _bytes_total(located: Located) -> int:
    return sum(entry.stat.size for entry in located.files if entry.stat is not None)


def _not_ready(source: Source, url: str, run: str | None, reason: str, bytes_read: int) -> CheckpointInspection:
    located = locate(source, source.path_of(url))
    step, named_run = step_and_run(located)
    sizes = "".join(f"{entry.name} {entry.stat}\n" for entry in located.files)
    total = _bytes_total(located)
    ref = CheckpointRef(
        url=url,
        run=run or named_run,
        step=step,
        layout=located.candidates[0].layout,
        identity=hashlib.sha256(b"not ready\0" + sizes.encode(errors="surrogateescape")).hexdigest(),
        bytes_total=total,
        files=tuple(entry.path for entry in located.files),
    )
    return CheckpointInspection(
        ref=ref,
        dialect=recognise(located, None, None),
        ready=False,
        not_ready_reason=reason,
        refusal=None,
        tensors=(),
        bytes_wanted=0,
        bytes_total=total,
        bytes_read=bytes_read,
        facts={},
        config=None,
        odd_globals=(),
    )
