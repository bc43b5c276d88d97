"""Opening the containers of a checkpoint's weights, whatever their layout.

Where a folder holds several containers of one model, they are compared: the preferred one is read
when the others hold the same, else the folder is refused, for which one is meant cannot be told.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
from collections.abc import Callable, Mapping
from contextlib import ExitStack

from dflash_core.checkpoints.container import Container, JoinedContainer
from dflash_core.checkpoints.dcp import DcpCheckpoint
from dflash_core.checkpoints.dcp_safetensors import DcpSafetensors
from dflash_core.checkpoints.layout import Candidate, Located
from dflash_core.checkpoints.names import looks_like_drafter, read_roles, shortened
from dflash_core.checkpoints.paths import is_shard_name, shard_numbers
from dflash_core.checkpoints.safetensors_container import SafetensorsFile
from dflash_core.checkpoints.samples import hold_the_same
from dflash_core.checkpoints.source_base import Source, SourceFile
from dflash_core.checkpoints.torch_file import LegacyTorchFile
from dflash_core.checkpoints.torch_legacy import TorchLegacy
from dflash_core.checkpoints.torch_zip import TorchZip
from dflash_core.checkpoints.values import Layout, NoDrafter
from dflash_core.errors import CheckpointCorrupt, CheckpointNotReady, UnsupportedCheckpoint

MAX_SHARDS = 1000
MAX_INDEX_BYTES = 16 << 20


def open_weights(source: Source, located: Located, stack: ExitStack) -> Container:
    """Open the container of a checkpoint's weights and read its index; its files are closed by the stack.

    Raises:
        UnsupportedCheckpoint: no drafter is in it, it is of a kind that is not read, or the folder
            holds two containers with different contents.
        CheckpointNotReady: shards are missing.
        CheckpointCutOff, CheckpointCorrupt: a file ends early, or contradicts itself.
    """
    opened: list[tuple[Candidate, Container]] = []
    reasons: list[NoDrafter] = []
    for candidate in located.candidates:
        try:
            container = _open(source, located, candidate, stack)
            if not looks_like_drafter(container.tensors):
                raise NoDrafter(
                    f"{source.url_of(candidate.path)} holds no drafter: none of its {len(container.tensors)} tensors "
                    f"is fc.weight; it holds {shortened(container.tensors)}"
                )
        except NoDrafter as error:
            reasons.append(error)
            continue
        opened.append((candidate, container))
    if not opened:
        raise reasons[0]
    first, container = opened[0]
    for reason in reasons:
        container.facts = {**reason.facts, **container.facts}
    for other, compared in opened[1:]:
        difference = _difference(container, compared)
        if difference is not None:
            raise UnsupportedCheckpoint(
                f"{source.url_of(located.path)} holds two models: {posixpath.basename(first.path)!r} and "
                f"{posixpath.basename(other.path)!r} differ ({difference}); give the address of the one that is meant"
            )
        container.facts = {**compared.facts, **container.facts}
    return container


def _open(source: Source, located: Located, candidate: Candidate, stack: ExitStack) -> Container:
    if candidate.layout == "safetensors_sharded":
        return _open_shards(source, located, candidate, stack, SafetensorsFile)
    if candidate.layout == "torch_sharded":
        return _open_shards(source, located, candidate, stack, lambda file: _open_torch(file, is_shard=True))
    if candidate.layout == "dcp":
        return DcpCheckpoint(source, candidate.path, stack)
    if candidate.layout == "dcp_safetensors":
        return DcpSafetensors(source, candidate.path, stack)
    file = stack.enter_context(source.open(candidate.path))
    return SafetensorsFile(file) if candidate.layout == "safetensors" else _open_torch(file)


def _open_torch(file: SourceFile, *, is_shard: bool = False) -> Container:
    try:
        return TorchZip(file, is_shard=is_shard)
    except LegacyTorchFile:
        return TorchLegacy(file, is_shard=is_shard)


def _open_shards(
    source: Source,
    located: Located,
    candidate: Candidate,
    stack: ExitStack,
    open_one: Callable[[SourceFile], Container],
) -> Container:
    where = source.url_of(candidate.folder)
    present = {entry.name for entry in located.listings[candidate.folder]}
    name = posixpath.basename(candidate.path)
    weight_map = None if is_shard_name(name) else _read_weight_map(source, candidate.path)
    shards = _numbered_shards(name, present, where) if weight_map is None else sorted(set(weight_map.values()))
    missing = [shard for shard in shards if shard not in present]
    if missing:
        raise CheckpointNotReady(
            f"{where}: {len(missing)} of {len(shards)} shards that its index names are missing: "
            f"{shortened(missing)}; still being written, or not copied whole"
        )
    parts = {
        shard: open_one(stack.enter_context(source.open(posixpath.join(candidate.folder, shard)))) for shard in shards
    }
    return _joined(candidate.layout, where, parts, weight_map)


def _joined(
    layout: Layout, where: str, parts: Mapping[str, Container], weight_map: Mapping[str, str] | None
) -> JoinedContainer:
    joined = JoinedContainer(layout, where, list(parts.values()))
    digest = hashlib.sha256(f"{layout}\0".encode())
    tensors = {}
    for shard, part in parts.items():
        digest.update(f"{shard} {part.identity}\n".encode())
        if weight_map is not None:
            absent = [name for name, at in weight_map.items() if at == shard and name not in part.tensors]
            if absent:
                raise CheckpointCorrupt(
                    f"{where}: shard {shard!r} lacks what the index says it holds: {shortened(absent)}"
                )
        for name, tensor in part.tensors.items():
            if name in joined.holders:
                raise CheckpointCorrupt(
                    f"{where}: tensor {name!r} lies in two shards; which one is meant cannot be told"
                )
            tensors[name] = tensor
            joined.holders[name] = part
        joined.facts |= part.facts
        joined.odd_globals += part.odd_globals
    joined.tensors, joined.identity = tensors, digest.hexdigest()
    return joined


def _read_weight_map(source: Source, path: str) -> dict[str, str]:
    """Read the index of a sharded checkpoint.

    Raises:
        CheckpointNotReady: it is no JSON (yet).
        CheckpointCorrupt: it is no index.
    """
    where = source.url_of(path)
    with source.open(path) as file:
        if file.stat.size > MAX_INDEX_BYTES:
            raise CheckpointCorrupt(f"{where} has {file.stat.size} bytes, too many for a shard index")
        try:
            index = json.loads(file.read_at(0, file.stat.size))
        except (ValueError, RecursionError) as error:
            raise CheckpointNotReady(f"{where} is no JSON ({error}); is it still being written?") from error
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointCorrupt(f"{where} has no weight_map, so it is no shard index")
    shards = {str(name) for name in weight_map.values()}
    if len(shards) > MAX_SHARDS or any("/" in name or name.startswith(".") for name in shards):
        raise CheckpointCorrupt(f"{where} names shards that do not lie beside it: {shortened(sorted(shards))}")
    return {name: str(shard) for name, shard in weight_map.items()}


def _numbered_shards(name: str, present: set[str], where: str) -> list[str]:
    """Return the names of all shards of a save without an index, from the name of one of them."""
    numbers = shard_numbers(name)
    assert numbers is not None, name
    _, count = numbers
    if not 0 < count <= MAX_SHARDS:
        raise CheckpointCorrupt(f"{where}: {name!r} says that there are {count} shards, at most {MAX_SHARDS} are read")
    stem, _, rest = name.partition(f"-{name.split('-of-')[0].rpartition('-')[2]}-of-")
    width = len(name.split("-of-")[0].rpartition("-")[2])
    return [f"{stem}-{number:0{width}d}-of-{rest}" for number in range(1, count + 1)]


def _difference(one: Container, other: Container) -> str | None:
    """Return in what two containers of a drafter differ, or None: names, shapes, types or sampled bytes."""
    names, other_names = _own_names(one), _own_names(other)
    only = sorted(names.keys() ^ other_names.keys())
    if only:
        return f"only one of them holds {shortened(only)}"
    pairs = [(name, other_names[canonical]) for canonical, name in names.items()]
    for name, other_name in pairs:
        mine, its = one.tensors[name], other.tensors[other_name]
        if (mine.shape, mine.element) != (its.shape, its.element):
            return (
                f"{name!r} is {mine.element.name} {list(mine.shape)} in one, "
                f"{its.element.name} {list(its.shape)} in the other"
            )
    unlike = hold_the_same(one, other, pairs)
    return None if unlike is None else f"the bytes of {unlike!r} are not the same"


def _own_names(container: Container) -> dict[str, str]:
    """Return z-lab's names of the drafter's own tensors, with those in the container; unknown ones count too."""
    roles = read_roles(container.tensors)
    return {role.canonical_name or name: name for name, role in roles.items() if role.role in ("drafter", "unknown")}
