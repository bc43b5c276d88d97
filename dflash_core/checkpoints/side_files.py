"""The small files beside the weights: markers, facts and the draft config."""

from __future__ import annotations

import json
import posixpath
from typing import Any, NamedTuple

from dflash_core.checkpoints.facts import collect_facts
from dflash_core.checkpoints.layout import Located
from dflash_core.checkpoints.source_base import Source
from dflash_core.checkpoints.torch_file import read_plain_facts
from dflash_core.checkpoints.trainers import missing_marker
from dflash_core.checkpoints.values import Facts
from dflash_core.errors import CheckpointNotFound, CheckpointNotReady, UnsupportedCheckpoint

MAX_FACT_FILE_BYTES = 256 << 10
MAX_CONFIG_BYTES = 4 << 20
# Small JSON files that trainers put beside the weights; later ones win.
FACT_FILES = ("training_state.json", "trainer_state.json", "meta.json", "metadata.json")
# Small torch files with plain values: NeMo's.
TORCH_FACT_FILES = ("dflash_meta.pt",)
CONFIG_NAME = "config.json"
MASK_VECTOR = "mask_embedding.pt"


class SideFiles(NamedTuple):
    """What lies beside the weights."""

    facts: Facts
    config: dict[str, Any] | None


def read_side_files(source: Source, located: Located) -> SideFiles:
    """Return the facts and the config in the small files beside the weights.

    Raises:
        CheckpointNotReady: a marker beside the weights says that they are not complete.
        UnsupportedCheckpoint: a part of the drafter lies in a file that is not read.
    """
    facts: Facts = {}
    if located.is_folder:
        for name in FACT_FILES:
            content = read_json(source, located, name) or {}
            facts.update({key: value for key, value in collect_facts(content).items() if "." not in key})
    reason = missing_marker(source, located, facts)
    if reason is not None:
        raise CheckpointNotReady(f"{source.url_of(located.path)}: {reason}")
    if located.is_folder:
        for name in TORCH_FACT_FILES:
            entry = located.find(name)
            if entry is not None and entry.stat is not None and entry.stat.size <= MAX_FACT_FILE_BYTES:
                with source.open(entry.path) as file:
                    facts.update(read_plain_facts(file))
        if located.holds(MASK_VECTOR):
            raise UnsupportedCheckpoint(
                f"{source.url_of(posixpath.join(located.path, MASK_VECTOR))} holds a learned mask vector, which is not "
                "read; without it another drafter would be scored, so the checkpoint is refused"
            )
    return SideFiles(facts, read_json(source, located, CONFIG_NAME))


def read_json(source: Source, located: Located, name: str) -> dict[str, Any] | None:
    """Return a small JSON object beside the weights, or None where there is none.

    Raises:
        CheckpointNotReady: it is no JSON (yet).
    """
    entry = located.find(name)
    limit = MAX_FACT_FILE_BYTES if name in FACT_FILES else MAX_CONFIG_BYTES
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
