"""What the files of one model folder say: its sizes, its shards, and which of them are not there.

Pure: the listing and the two small texts come from the shell script or from SFTP.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dflash_core.errors import TargetError, one_line
from dflash_core.hosts.report import ModelFolder
from dflash_core.hosts.wording import printable
from dflash_core.target.model_config import ModelConfig, read_model_config

INDEX_NAMES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".gguf")
"""Kinds of weight files, in the order in which a loader prefers them."""

_NUMBERED = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})(\.[a-z]+)")
# PyTorch's .bin is a common ending; only these names are weights.
_BIN_WEIGHTS = re.compile(r"(pytorch_)?model.*\.bin")


@dataclass(kw_only=True, slots=True)
class FolderAnswer:
    """A model folder as it was read, before anything is made of it."""

    path: str
    kind: str = "folder"
    """`folder`, `file`, `absent` or `denied`."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Bytes of each file directly in the folder, by name."""
    broken_links: list[str] = field(default_factory=list)
    is_cut: bool = False
    """True: there were too many files to list them all."""
    config_text: str | None = None
    index_text: str | None = None
    problems: list[str] = field(default_factory=list)


def describe_folder(answer: FolderAnswer) -> ModelFolder:
    """Return what a folder's listing and texts say; nothing in them makes this raise."""
    if answer.kind != "folder":
        return _describe_other(answer)
    problems = list(answer.problems)
    config = _read_config(answer, problems)
    shards, missing = _find_shards(answer, problems)
    if not answer.sizes:
        problems = ["the folder is empty"]
    elif not shards and not missing:
        problems.append("no weight files (.safetensors, .bin or .gguf)")
    if missing:
        problems.append(f"{len(missing)} of {len(shards) + len(missing)} shards missing: {_first_few(missing)}")
    if answer.is_cut:
        problems.append(f"more than {len(answer.sizes)} files: the rest was not looked at")
    return ModelFolder(
        path=answer.path,
        is_present=True,
        size_bytes=sum(answer.sizes.values()),
        weights_bytes=sum(answer.sizes[name] for name in shards),
        num_shards=len(shards),
        shards_missing=tuple(missing),
        config=config,
        problem=printable("; ".join(problems), longest=500),
    )


def _describe_other(answer: FolderAnswer) -> ModelFolder:
    """Describe what is not a folder that can be listed."""
    reasons = {
        "absent": "no such folder",
        "denied": "the folder cannot be read: permission denied",
        "file": "one file: its sizes are not read by probe",
    }
    is_file = answer.kind == "file"
    size = sum(answer.sizes.values()) if is_file else None
    return ModelFolder(
        path=answer.path,
        is_present=answer.kind in ("file", "denied"),
        size_bytes=size,
        weights_bytes=size,
        num_shards=int(is_file),
        shards_missing=(),
        config=None,
        problem=reasons.get(answer.kind, "unreadable answer"),
    )


def _read_config(answer: FolderAnswer, problems: list[str]) -> ModelConfig | None:
    """Return the sizes that config.json states; why there are none goes to the problems."""
    if answer.config_text is None:
        if not any(problem.startswith("config.json") for problem in problems):
            problems.append("no config.json")
        return None
    data = parse_json(answer.config_text)
    if data is None:
        problems.append("config.json is not valid JSON")
        return None
    try:
        config = read_model_config(data)
    except TargetError as error:
        problems.append(one_line(error))
        return None
    problems.extend(config.conflicts)
    return config


def _find_shards(answer: FolderAnswer, problems: list[str]) -> tuple[list[str], list[str]]:
    """Return the weight files that are there and those that are asked for and are not."""
    expected, total_bytes = _read_index(answer, problems)
    present = {name for name, size in answer.sizes.items() if size > 0}
    # A link to nowhere is a download that did not finish; a file without a byte, one that just began.
    hollow = {*answer.broken_links, *answer.sizes} - present
    named = present | hollow | expected
    suffix = next((suffix for suffix in WEIGHT_SUFFIXES if any(_is_weight_file(name, suffix) for name in named)), None)
    if suffix is None:
        return [], []
    weights = {name for name in present | hollow if _is_weight_file(name, suffix)}
    asked = expected or weights | _numbered_siblings(weights, suffix)
    shards = sorted(asked & present)
    missing = [] if answer.is_cut else sorted(asked - present)
    weights_bytes = sum(answer.sizes[name] for name in shards)
    if total_bytes is not None and not missing and weights_bytes < total_bytes:
        problems.append(f"the shards hold {weights_bytes} bytes, their index counts {total_bytes}: one is cut off")
    return shards, missing


def _read_index(answer: FolderAnswer, problems: list[str]) -> tuple[set[str], int | None]:
    """Return the shard names and the total of tensor bytes that the index states."""
    if answer.index_text is None:
        return set(), None
    data = parse_json(answer.index_text)
    weight_map = data.get("weight_map") if isinstance(data, Mapping) else None
    if not isinstance(data, Mapping) or not isinstance(weight_map, Mapping):
        problems.append("the index of the shards is not valid JSON with a weight_map")
        return set(), None
    metadata = data.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, Mapping) else None
    is_count = isinstance(total, int) and not isinstance(total, bool)
    return {name for name in weight_map.values() if isinstance(name, str)}, total if is_count else None


def _numbered_siblings(names: Iterable[str], suffix: str) -> set[str]:
    """Return all names of the sets that `x-00002-of-00015` style names belong to."""
    asked: set[str] = set()
    for name in names:
        numbered = _NUMBERED.fullmatch(name)
        if numbered and numbered[4] == suffix:
            total = min(int(numbered[3]), 9999)
            asked |= {f"{numbered[1]}-{number:05d}-of-{numbered[3]}{suffix}" for number in range(1, total + 1)}
    return asked


def _is_weight_file(name: str, suffix: str) -> bool:
    if suffix == ".bin":
        return _BIN_WEIGHTS.fullmatch(name) is not None
    return name.endswith(suffix)


def _first_few(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def parse_json(text: str) -> Any:
    """Return what a JSON text holds, or None where it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
