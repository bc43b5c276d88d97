"""From what the user wrote as `target.model` to a folder that transformers reads, and its identity.

A GGUF file is converted once to safetensors and kept in the store: reading it takes half a minute,
and left quantised its forward pass is many times slower.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_core.errors import TargetError
from dflash_core.store import Store, digest, file_sha256
from dflash_core.target.model_config import ModelConfig, read_model_config

KIND = "target"
CONVERSION_VERSION = 1
"""Raised when the conversion of a GGUF file would write something else."""
TABLES_KIND = "target_tables"
TABLES_NAME = "model.safetensors"
STORED = "store:"
"""Begins a `target.model` that names what is kept of a target."""
_SAMPLES_PER_FILE = 16
_SAMPLE_BYTES = 64 << 10
_INDEX_NAME = "model.safetensors.index.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """The target on disk: a folder of config, tokenizer and safetensors."""

    name: str
    """As people know it: the last part of the path or the hub id."""
    folder: Path
    identity: str
    """Digest of config, tensor index, sizes and samples of every weight file."""
    config: ModelConfig
    shards: tuple[str, ...]
    size_bytes: int
    is_whole: bool = True
    """False where only config, tokenizer, embedding and head are here: enough for a drafter, not to run it."""


def resolve_target(model: str | None, store: Store) -> Target:
    """Find the target and make it readable.

    Args:
        model: a folder, a `.gguf` file, a hub id that is already in the hub's local cache, or `store:` and the
            key under which another box kept what a drafter needs of its target (see `kept_tables`).
        store: where a converted GGUF file is kept, and what was kept of a target.

    Raises:
        TargetError: nothing is given or found, shards are missing, or the kind is not supported.
    """
    if not model:
        raise TargetError("no target is set; write target.model in the config (a folder, a .gguf file or a hub id)")
    if "://" in model and not model.startswith("file://"):
        raise TargetError(f"target.model = {model!r}: remote targets are not supported yet; copy it to a local folder")
    if model.startswith(STORED):
        return _kept(model.removeprefix(STORED), store)
    path = Path(model.removeprefix("file://")).expanduser()
    if path.is_dir():
        return read_target_folder(path, name=path.resolve().name)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise TargetError(f"target.model = {model!r}: no such file; check the path")
        converted = store.build(KIND, _gguf_key(path), _converter(path))
        return read_target_folder(converted.path, name=path.stem)
    return read_target_folder(_hub_folder(model), name=model)


def _kept(key: str, store: Store) -> Target:
    found = store.find(TABLES_KIND, key)
    if found is None:
        raise TargetError(
            f"target.model = '{STORED}{key}': the store {store} keeps nothing of a target under this key; run "
            "`dflash-eval prepare` on a box that holds the target, with this store, and write what it prints"
        )
    config = json.loads(found.file("config.json").read_text(encoding="utf-8"))
    return Target(
        name=str(found.meta["target"]),
        folder=found.path,
        identity=str(found.meta["target_identity"]),
        config=read_model_config(config, where=str(found.file("config.json"))),
        shards=(TABLES_NAME,),
        size_bytes=int(found.meta["size_bytes"]),
        is_whole=False,
    )


def find_converted(model: str, store: Store) -> Target | None:
    """Return what a `.gguf` file was converted to, or None where it was not yet; converts nothing."""
    path = Path(model).expanduser()
    if path.suffix != ".gguf" or not path.is_file():
        return None
    converted = store.find(KIND, _gguf_key(path))
    return None if converted is None else read_target_folder(converted.path, name=path.stem)


def _gguf_key(path: Path) -> str:
    stat = path.stat()
    return digest("gguf", CONVERSION_VERSION, _sha256_of(path.absolute(), stat.st_size, stat.st_mtime_ns))


@functools.lru_cache(maxsize=8)
def _sha256_of(path: Path, _size_bytes: int, _mtime_ns: int) -> str:
    """Return a file's digest, computed once per process as long as its size and time stay the same."""
    return file_sha256(path)


def read_target_folder(folder: Path, *, name: str) -> Target:
    """Read what a folder of a model holds, without loading its weights.

    Raises:
        TargetError: there is no config.json, or a shard that the index names is missing.
    """
    try:
        data = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except OSError as error:
        raise TargetError(f"{folder} has no readable config.json; target.model must be a folder of a model") from error
    except ValueError as error:
        raise TargetError(f"{folder}/config.json is not JSON: {error}") from error
    config = read_model_config(data, where=str(folder / "config.json"))
    shards = _shards(folder)
    return Target(
        name=name,
        folder=folder,
        identity=_identity(folder, data, shards),
        config=config,
        shards=tuple(shards),
        size_bytes=sum((folder / shard).stat().st_size for shard in shards),
    )


def quiet_transformers() -> None:
    """Switch off transformers' own progress bars; the stages report their progress themselves."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def _hub_folder(model: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise TargetError(
            f"target.model = {model!r} is neither a folder, a .gguf file, nor in the hub's local cache; "
            f"check the path, or download it first: hf download {model}"
        ) from error


def _shards(folder: Path) -> list[str]:
    index = folder / _INDEX_NAME
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            if not all(isinstance(name, str) for name in names):
                raise TypeError("a shard's name is a text")
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise TargetError(f"{index} is not an index of shards: {error}") from error
    else:
        names = sorted(path.name for path in folder.glob("*.safetensors"))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise TargetError(f"{folder} lacks {len(missing)} of {len(names)} shards, first {missing[0]!r}; copy it again")
    if not names:
        raise TargetError(f"{folder} holds no .safetensors file; the target's weights must be safetensors or GGUF")
    return names


def _identity(folder: Path, config: Mapping[str, Any], shards: list[str]) -> str:
    """Digest config, headers, sizes and samples: a fine-tuned copy of equal shape differs in the samples."""
    parts = []
    for name in shards:
        path = folder / name
        size = path.stat().st_size
        running = hashlib.sha256()
        with path.open("rb") as file:
            for sample in range(_SAMPLES_PER_FILE):
                file.seek(max(0, size - _SAMPLE_BYTES) * sample // (_SAMPLES_PER_FILE - 1))
                running.update(file.read(_SAMPLE_BYTES))
        parts.append([name, size, running.hexdigest()])
    ignored = {"_name_or_path", "transformers_version"}
    return digest("target", {key: value for key, value in config.items() if key not in ignored}, parts)


def _converter(path: Path) -> Callable[[Path], dict[str, Any]]:
    def convert(folder: Path) -> dict[str, Any]:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

        quiet_transformers()
        where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
        try:
            with contextlib.redirect_stderr(io.StringIO()):  # a progress bar that cannot be switched off
                loaded: Any = AutoModelForCausalLM.from_pretrained(
                    **where,
                    quantization_config=GgufConfig(dequantize=True),
                    dtype=torch.float32,
                    output_loading_info=True,
                )
            tokenizer = AutoTokenizer.from_pretrained(**where)
        except Exception as error:  # a damaged file ends in whatever its reader stumbles over
            raise TargetError(f"{path} cannot be read as GGUF: {' '.join(str(error).split())[:300]}") from error
        model, found = loaded
        if found["missing_keys"]:
            raise TargetError(f"{path} lacks tensors, first {min(found['missing_keys'])!r}; copy it again")
        # save_pretrained refuses what still says it is quantised.
        model.hf_quantizer = None
        model.config.__dict__.pop("quantization_config", None)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return {"source": path.name}

    return convert
