"""Files of torch.save that are written, streamed and compared, and a value in one that would run a command."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dflash_core.checkpoints import stream_checkpoint
from dflash_core.errors import UnsupportedCheckpoint


def saved(path: Path, content: Any, **options: Any) -> str:
    torch.save(content, path, **options)
    return str(path)


def streamed(url: str, folder: Path) -> dict[str, torch.Tensor]:
    return load_file(stream_checkpoint(url, folder / "out.safetensors").path)


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def refusal(content: Any, path: Path) -> str:
    with pytest.raises(UnsupportedCheckpoint) as caught:
        stream_checkpoint(saved(path, content), path.with_suffix(".safetensors"))
    assert not path.with_suffix(".safetensors").exists()
    return str(caught.value)


class Evil:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)
