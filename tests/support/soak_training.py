"""The training run of a soak: checkpoints with weights of their own, written, finished, replaced, rotated, damaged."""

from __future__ import annotations

import json
import shutil
import threading
import zipfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from dflash_core import stages
from dflash_core.config import load_config
from dflash_core.target import transcripts as written
from tests.support import tiny
from tests.support.direct import evaluate_directly
from tests.support.scene import Setup
from tests.support.sftp_server import SFTPOperation
from tests.support.soak_plan import GONE, Fate, PlannedCheckpoint

SNAPSHOTS = (0, 15, 30, 45, 60, 80)
"""Training steps: from a drafter that knows nothing to one that drafts whole blocks."""
MOST_NOISE = 0.5


class Weights:
    """Weights by seed: a trained drafter of some age with noise, so that its numbers tell it from others."""

    def __init__(self, setup: Setup) -> None:
        """Train a tiny drafter on the transcripts of a set-up whose step 1 is scored here and now."""
        config = load_config(str(setup.config))
        evaluate_directly(config, setup.run / "step_1")
        plan = stages.plan_target(config)
        transcripts = stages.read_transcripts(config, plan)
        self.config = tiny.draft_config(plan.target)
        spec, weights = tiny.random_weights(self.config, plan.target, seed=1)
        states = stages.find_states(config, plan, written.transcripts_digest(transcripts), spec.target_layer_ids)
        assert states is not None
        self._ages = tiny.train_drafter(spec, weights, plan.target, transcripts, states, snapshots=SNAPSHOTS)

    def of(self, seed: int) -> dict[str, Tensor]:
        """Return the weights of a seed."""
        generator = torch.Generator().manual_seed(seed)
        age = SNAPSHOTS[int(torch.randint(len(SNAPSHOTS), (1,), generator=generator))]
        noise = MOST_NOISE * float(torch.rand(1, generator=generator))
        return {
            name: tensor + noise * tensor.std() * torch.randn(tensor.shape, generator=generator)
            if tensor.ndim == 2
            else tensor
            for name, tensor in self._ages[age].items()
        }


@dataclass(frozen=True, kw_only=True)
class Content:
    """What lay under a step at one time, and what should come of it."""

    step: int
    fate: Fate
    clean: Path | None
    """The same weights where nothing happens to them; None where they cannot be scored."""
    is_superseded: bool = False
    """The step came again with other weights: this one may have been too quick to be scored."""


class TrainingRun:
    """Writes into the run's folder, as a trainer does that is sometimes slow, interrupted or short of disk."""

    def __init__(self, run: Path, work: Path, weights: Weights) -> None:
        """Take the run's folder, and one beside it for what is not there yet or any more."""
        self.run, self._work, self._weights = run, work, weights
        self.contents: list[Content] = []
        self.gone: set[int] = set()
        """Steps that were deleted or renamed away while they were read."""
        self._at_read: dict[int, tuple[int, Fate]] = {}
        self._reads: Counter[int] = Counter()
        self._mutex = threading.Lock()
        for folder in (run, work / "new", work / "trash", work / "clean"):
            folder.mkdir(parents=True)

    def appear(self, planned: PlannedCheckpoint) -> None:
        """Put a checkpoint there, in the state in which it is first seen."""
        folder = self._write(planned, planned.seed)
        clean = None
        if planned.fate not in ("diverged", "bit flipped", "cut off", "never released"):
            clean = self._keep_clean(planned, folder, planned.seed)
        self.contents.append(
            Content(step=planned.step, fate=planned.fate, clean=clean, is_superseded=planned.fate == "replaced")
        )
        weights = self._weights_file(folder, planned)
        match planned.fate:
            case "growing" | "cut off":
                data = weights.read_bytes()
                weights.write_bytes(data[: int(len(data) * planned.share)])
            case "marked" | "never released":
                (folder / ".incomplete").touch()
            case "bit flipped":
                _flip_a_bit(weights, planned.share)
            case "deleted" | "renamed":
                with self._mutex:
                    self._at_read[planned.step] = (planned.read, planned.fate)
        folder.rename(self._final(planned))

    def go_on(self, planned: PlannedCheckpoint) -> None:
        """Do what comes later: finish, release or replace."""
        final = self._final(planned)
        match planned.fate:
            case "growing":
                whole = self._weights_file(self._clean(planned, planned.seed), planned).read_bytes()
                there = self._weights_file(final, planned)
                size = there.stat().st_size
                with there.open("ab") as file:  # in two parts, the first of which is not the end
                    for part in (whole[size : (size + len(whole)) // 2], whole[(size + len(whole)) // 2 :]):
                        file.write(part)
                        file.flush()
            case "marked":
                (final / ".incomplete").unlink()
            case "replaced":
                folder = self._write(planned, planned.second_seed)
                clean = self._keep_clean(planned, folder, planned.second_seed)
                final.rename(self._work / "trash" / f"step_{planned.step}-replaced")
                folder.rename(final)
                self.contents.append(Content(step=planned.step, fate="replaced", clean=clean))

    def note_read(self, operation: SFTPOperation) -> None:
        """Take checkpoints away in the middle of a read; called by the server before it answers one."""
        parts = [part for part in operation.path.split("/") if part.startswith("step_")]
        if not parts:
            return
        step = int(parts[0].removeprefix("step_"))
        with self._mutex:
            self._reads[step] += 1
            at, fate = self._at_read.get(step, (0, "whole"))
            if fate not in GONE or self._reads[step] < at or step in self.gone:
                return
            self.gone.add(step)
        folder = self.run / f"step_{step}"
        if fate == "deleted":
            shutil.rmtree(folder)
        else:
            folder.rename(self._work / "trash" / folder.name)

    def keep_the_rest(self) -> None:
        """Rotate nothing any more."""
        with self._mutex:
            self._at_read.clear()

    def _final(self, planned: PlannedCheckpoint) -> Path:
        return self.run / f"step_{planned.step}"

    def _clean(self, planned: PlannedCheckpoint, seed: int) -> Path:
        return self._work / "clean" / f"{seed}" / f"step_{planned.step}"

    def _keep_clean(self, planned: PlannedCheckpoint, folder: Path, seed: int) -> Path:
        clean = self._clean(planned, seed)
        shutil.copytree(folder, clean)
        return clean

    def _weights_file(self, folder: Path, planned: PlannedCheckpoint) -> Path:
        return folder / ("checkpoint.pt" if planned.form == "torch" else "model.safetensors")

    def _write(self, planned: PlannedCheckpoint, seed: int) -> Path:
        folder = self._work / "new" / f"step_{planned.step}-{seed}"
        folder.mkdir()
        weights = self._weights.of(seed)
        if planned.fate == "diverged":
            weights["layers.0.mlp.up_proj.weight"][0, 0] = torch.nan
        (folder / "config.json").write_text(json.dumps(self._weights.config), encoding="utf-8")
        _save(weights, self._weights_file(folder, planned))
        return folder


def _save(weights: Mapping[str, Tensor], path: Path) -> None:
    own = {name: tensor.contiguous() for name, tensor in weights.items()}
    if path.suffix == ".pt":
        content: dict[str, Any] = {"model": own}
        torch.save(content, path)
    else:
        save_file(own, path)


def _flip_a_bit(path: Path, share: float) -> None:
    """Flip one bit in the largest record of a zip that torch wrote."""
    with zipfile.ZipFile(path) as archive:
        largest = max(archive.infolist(), key=lambda info: info.file_size)
    data = bytearray(path.read_bytes())
    # The local header is 30 bytes, then name and padding, whose lengths it ends with.
    lengths = data[largest.header_offset + 26 : largest.header_offset + 30]
    start = largest.header_offset + 30 + int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
    data[start + int(share * (largest.file_size - 1))] ^= 0x10
    path.write_bytes(data)
