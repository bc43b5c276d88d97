"""Values pickled, or saved by torch, and read back without any of their classes."""

from __future__ import annotations

import io
import pickle
import zipfile
from typing import Any

import torch

from dflash_core.checkpoints.facts import collect_facts
from dflash_core.checkpoints.inert_pickle import InertPickle, read_inert

PROTOCOLS = range(6)


def read(value: Any, protocol: int = 2) -> InertPickle:
    return read_inert(pickle.dumps(value, protocol=protocol), where="test.pt")


def facts_of(value: Any, protocol: int = 2) -> dict[str, Any]:
    return collect_facts(read(value, protocol).root)


def read_saved(value: Any, **options: Any) -> InertPickle:
    """Read the pickle that torch.save writes."""
    content = io.BytesIO()
    torch.save(value, content, **options)
    with zipfile.ZipFile(content) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("data.pkl"))
        return read_inert(archive.read(name), where="test.pt")
