"""What a box needs of the target that only runs drafters: config, tokenizer, embedding and head, kept in the store.

    target.model = store:<key>     what is kept under this key, as `dflash-eval prepare` prints it

A drafter's box reads the stored transcripts and hidden states instead of running the target, so it need not
hold the other nine tenths of its weights. `loading.resolve_target` finds what is kept here. The key pins the
tokenizer and the chat template, too, which are no part of a target's identity: who edits them gets another key.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from dflash_core.store import MANIFEST_NAME, Artifact, Store, digest, file_sha256
from dflash_core.target.head import load_embedding_and_head
from dflash_core.target.loading import TABLES_KIND, TABLES_NAME, Target

TABLES_VERSION = 1
"""Raised when something else would be written for the same target."""
_SUFFIXES = {".json", ".jinja", ".txt", ".model", ".tiktoken"}
"""Of config, tokenizer and chat template; weights and their index stay where they are."""
_LARGEST_FILE_BYTES = 256 << 20


def keep_tables(store: Store, target: Target) -> Artifact:
    """Return config, tokenizer, embedding and head of a target as an artifact of the store, copied where missing.

    Raises:
        TargetError: its embedding or head cannot be read.
    """
    side_files = list(_side_files(target.folder))
    contents = [[path.name, file_sha256(path)] for path in side_files]

    def write(folder: Path) -> dict[str, Any]:
        for path in side_files:
            shutil.copyfile(path, folder / path.name)
        embedding_VD, head_VD = load_embedding_and_head(target)
        tables = {"embed_tokens.weight": embedding_VD}
        if head_VD is not embedding_VD:
            tables["lm_head.weight"] = head_VD
        save_file(tables, folder / TABLES_NAME)
        return {"target": target.name, "target_identity": target.identity, "size_bytes": target.size_bytes}

    return store.build(TABLES_KIND, digest(TABLES_KIND, TABLES_VERSION, target.identity, contents), write)


def _side_files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        # A converted target lies in the store and has a manifest there; what is kept of it gets its own.
        is_left_out = path.name.endswith(".index.json") or path.name == MANIFEST_NAME
        is_text = path.is_file() and path.suffix in _SUFFIXES
        if is_text and not is_left_out and path.stat().st_size <= _LARGEST_FILE_BYTES:
            yield path
