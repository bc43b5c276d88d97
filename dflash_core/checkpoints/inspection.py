"""Looking at a checkpoint: what it holds and what it would cost, from its index alone.

`open_checkpoint` is the common ground of inspecting and streaming; it keeps the files open, so that
what is planned and what is read are the same.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from dflash_core.checkpoints.dtypes import WEIGHT_TYPES, ElementType
from dflash_core.checkpoints.facts import collect_facts, step_of
from dflash_core.checkpoints.layout import Located, locate, step_and_run
from dflash_core.checkpoints.names import assign_roles, shortened
from dflash_core.checkpoints.pickle_values import TensorRef
from dflash_core.checkpoints.safetensors_file import SafetensorsHeader, StoredTensor, read_header
from dflash_core.checkpoints.source_base import Source, SourceFile
from dflash_core.checkpoints.sources import open_source
from dflash_core.checkpoints.torch_file import TorchFile, check_view, read_torch_file
from dflash_core.checkpoints.values import CheckpointCutOff, CheckpointInspection, CheckpointRef, Facts, TensorEntry
from dflash_core.checkpoints.zip_index import RangeReader
from dflash_core.config import HostSettings
from dflash_core.errors import CheckpointCorrupt, CheckpointNotFound, CheckpointNotReady, UnsupportedCheckpoint

MAX_SIDE_FILE_BYTES = 256 << 10
MAX_SHARDS = 1000
# Small JSON files that trainers put beside the weights; later ones win.
FACT_FILES = ("training_state.json", "trainer_state.json", "metadata.json")


@dataclass(kw_only=True, slots=True)
class WeightFile:
    """One open file with tensors in it."""

    file: SourceFile
    reader: RangeReader
    torch: TorchFile | None = None
    header: SafetensorsHeader | None = None

    def tensors(self) -> Mapping[str, TensorRef | StoredTensor]:
        """Return what it holds, by the names in it."""
        if self.torch is not None:
            return self.torch.weights
        assert self.header is not None
        return self.header.tensors


@dataclass(kw_only=True, slots=True)
class OpenCheckpoint:
    """A checkpoint whose index was read and whose files are open."""

    located: Located
    ref: CheckpointRef
    entries: tuple[TensorEntry, ...]
    files: tuple[WeightFile, ...]
    facts: Facts
    config: dict[str, Any] | None
    odd_globals: tuple[str, ...] = ()
    bytes_wanted: int = 0
    file_of: dict[str, WeightFile] = field(default_factory=dict)
    """The file that each tensor lies in, by its name in the checkpoint."""


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
        What it holds. A checkpoint that is still being written is described with `ready=False`.

    Raises:
        CheckpointNotFound: nothing is there, or no checkpoint.
        UnsupportedCheckpoint: it is of a kind that is not read, or holds tensors that are not known.
        CheckpointMismatch: the drafter in it is incomplete.
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
            ready=True,
            not_ready_reason=None,
            tensors=held.entries,
            bytes_wanted=held.bytes_wanted,
            bytes_total=held.ref.bytes_total,
            bytes_read=place.bytes_read - read_before,
            facts=held.facts,
            config=held.config,
            odd_globals=held.odd_globals,
        )


@contextmanager
def open_checkpoint(source: Source, url: str, *, run: str | None) -> Iterator[OpenCheckpoint]:
    """Open a checkpoint and read its index; the files stay open in the `with` block.

    Raises:
        CheckpointNotReady: a marker or a missing shard says that it is still being written.
        CheckpointCutOff: a file of it ends early.
    """
    located = locate(source, source.path_of(url))
    facts, config = read_side_files(source, located)
    with ExitStack() as stack:
        files = _open_weights(source, located, stack)
        torch = files[0].torch
        facts = {**facts, **(torch.facts if torch is not None else {})}
        named_step, named_run = step_and_run(located)
        content_step = step_of(facts)
        ref = CheckpointRef(
            url=url,
            run=run or named_run,
            step=named_step if content_step is None else content_step,
            layout=located.layout,
            identity=_identity(files),
            bytes_total=_bytes_total(located),
            files=tuple(entry.path for entry in located.files),
        )
        entries, file_of = _entries(files, url)
        yield OpenCheckpoint(
            located=located,
            ref=ref,
            entries=entries,
            files=files,
            facts=facts,
            config=config,
            odd_globals=torch.odd_globals if torch is not None else (),
            bytes_wanted=sum(entry.size_bytes for entry in entries if entry.role == "drafter"),
            file_of=file_of,
        )


def read_side_files(source: Source, located: Located) -> tuple[Facts, dict[str, Any] | None]:
    """Return the facts and the config in the small JSON files beside the weights.

    Raises:
        CheckpointNotReady: a marker beside the weights says that they are not complete.
    """
    if located.incomplete_marker is not None:
        raise CheckpointNotReady(
            f"{source.url_of(located.path)} is marked {located.incomplete_marker!r}; its writer is at work"
        )
    facts: Facts = {}
    if located.is_folder:
        for name in FACT_FILES:
            content = _read_json(source, located, name) or {}
            if name == "metadata.json" and content.get("complete") is False:
                raise CheckpointNotReady(f"{source.url_of(located.path)}: its metadata.json says complete: false")
            facts.update({key: value for key, value in collect_facts(content).items() if "." not in key})
    return facts, _read_json(source, located, "config.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardIndex:
    """What the index of a sharded checkpoint says."""

    weight_map: Mapping[str, str]
    """Tensor name to the name of its shard."""
    shards: tuple[str, ...]
    missing: tuple[str, ...]
    """Shards that do not lie in the folder."""


def read_shard_index(source: Source, located: Located) -> ShardIndex:
    """Read the index of a sharded checkpoint.

    Raises:
        CheckpointCorrupt: the index is no index.
    """
    index = _read_json(source, located, posixpath.basename(located.weights[0]))
    weight_map = index.get("weight_map") if index is not None else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointCorrupt(f"{source.url_of(located.weights[0])} has no weight_map, so it is no shard index")
    shards = tuple(sorted({str(name) for name in weight_map.values()}))
    if len(shards) > MAX_SHARDS or any("/" in name or name.startswith(".") for name in shards):
        raise CheckpointCorrupt(
            f"{source.url_of(located.weights[0])} names shards that do not lie beside it: {shortened(shards)}"
        )
    missing = tuple(name for name in shards if name not in located.beside)
    return ShardIndex(weight_map=weight_map, shards=shards, missing=missing)


def _open_weights(source: Source, located: Located, stack: ExitStack) -> tuple[WeightFile, ...]:
    if located.layout == "safetensors_sharded":
        return _open_shards(source, located, stack)
    file = stack.enter_context(source.open(located.weights[0]))
    reader = RangeReader(file)
    if located.layout == "torch_zip":
        return (WeightFile(file=file, reader=reader, torch=read_torch_file(reader)),)
    return (WeightFile(file=file, reader=reader, header=read_header(reader)),)


def _open_shards(source: Source, located: Located, stack: ExitStack) -> tuple[WeightFile, ...]:
    index = read_shard_index(source, located)
    where = source.url_of(located.path)
    if index.missing:
        raise CheckpointNotReady(
            f"{where}: {len(index.missing)} of {len(index.shards)} shards that its index names are missing: "
            f"{shortened(index.missing)}; still being written, or not copied whole"
        )
    files = []
    for shard in index.shards:
        file = stack.enter_context(source.open(posixpath.join(located.folder, shard)))
        reader = RangeReader(file)
        header = read_header(reader)
        absent = [name for name, at in index.weight_map.items() if at == shard and name not in header.tensors]
        if absent:
            raise CheckpointCorrupt(f"{where}: shard {shard!r} lacks what the index says it holds: {shortened(absent)}")
        files.append(WeightFile(file=file, reader=reader, header=header))
    return tuple(files)


def _entries(files: tuple[WeightFile, ...], where: str) -> tuple[tuple[TensorEntry, ...], dict[str, WeightFile]]:
    """Describe all tensors of a checkpoint, and say which file each lies in."""
    file_of: dict[str, WeightFile] = {}
    for file in files:
        for name in file.tensors():
            if name in file_of:
                raise CheckpointCorrupt(
                    f"{where}: tensor {name!r} lies in two shards; which one is meant cannot be told"
                )
            file_of[name] = file
    roles = assign_roles(file_of, where=where)
    entries = []
    for name, role in roles.items():
        tensor = file_of[name].tensors()[name]
        element: ElementType = tensor.element
        if role.role == "drafter" and element.name not in WEIGHT_TYPES:
            raise UnsupportedCheckpoint(
                f"{where}: tensor {name!r} is of type {element.name}, expected {', '.join(WEIGHT_TYPES)}; "
                "quantised drafters are not read"
            )
        entries.append(
            TensorEntry(
                name=name,
                canonical_name=role.canonical_name,
                dtype=element.name,
                shape=tensor.shape,
                size_bytes=_size_of(name, tensor, file_of[name], where),
                role=role.role,
                reason=role.reason,
            )
        )
    return tuple(entries), file_of


def _size_of(name: str, tensor: TensorRef | StoredTensor, file: WeightFile, where: str) -> int:
    if isinstance(tensor, StoredTensor):
        return tensor.data.size
    assert file.torch is not None
    return check_view(name, tensor, file.torch.records, where)


def _identity(files: tuple[WeightFile, ...]) -> str:
    if files[0].torch is not None:
        return files[0].torch.identity
    digest = hashlib.sha256(b"safetensors\0")
    for file in files:
        assert file.header is not None
        digest.update(file.header.raw)
        digest.update(f"{file.file.stat.size} {file.file.stat.mtime_ns}\n".encode())
    return digest.hexdigest()


def _bytes_total(located: Located) -> int:
    return sum(entry.stat.size for entry in located.files if entry.stat is not None)


def _read_json(source: Source, located: Located, name: str) -> dict[str, Any] | None:
    """Return a small JSON object beside the weights, or None where there is none.

    Raises:
        CheckpointNotReady: it is no JSON (yet).
    """
    entry = located.beside.get(name)
    limit = MAX_SIDE_FILE_BYTES if name in FACT_FILES else 16 * MAX_SIDE_FILE_BYTES
    if entry is None or entry.stat is None or entry.stat.size > limit:
        return None
    try:
        with source.open(entry.path) as file:
            content = json.loads(file.read_at(0, file.stat.size))
    except CheckpointNotFound:
        return None
    except (ValueError, RecursionError) as error:
        raise CheckpointNotReady(
            f"{source.url_of(entry.path)} is no JSON ({error}); is it still being written?"
        ) from error
    return content if isinstance(content, dict) else None


def _not_ready(source: Source, url: str, run: str | None, reason: str, bytes_read: int) -> CheckpointInspection:
    located = locate(source, source.path_of(url))
    step, named_run = step_and_run(located)
    sizes = "".join(f"{entry.name} {entry.stat}\n" for entry in located.files)
    total = _bytes_total(located)
    ref = CheckpointRef(
        url=url,
        run=run or named_run,
        step=step,
        layout=located.layout,
        identity=hashlib.sha256(b"not ready\0" + sizes.encode(errors="surrogateescape")).hexdigest(),
        bytes_total=total,
        files=tuple(entry.path for entry in located.files),
    )
    return CheckpointInspection(
        ref=ref,
        ready=False,
        not_ready_reason=reason,
        tensors=(),
        bytes_wanted=0,
        bytes_total=total,
        bytes_read=bytes_read,
        facts={},
        config=None,
        odd_globals=(),
    )
