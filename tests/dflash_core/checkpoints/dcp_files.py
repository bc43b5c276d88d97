"""Distributed checkpoints as torch itself writes them: by one process, and by two ranks that shard their tensors.

`python -m tests.dflash_core.checkpoints.dcp_files FOLDER` writes the checkpoints of two ranks into FOLDER.
"""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from safetensors.torch import save_file
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.multiprocessing.spawn import spawn

from tests.dflash_core.checkpoints.checkpoint_files import drafter_tensors, training_args

NUM_RANKS = 2
STEP = 1200
# What a rank holds of the tensor `grid`: boxes (corner, shape) of uneven rows and columns.
GRID_SHAPE = (7, 9)
GRID_BOXES = (((0, 0), (4, 5)), ((0, 5), (4, 4)), ((4, 0), (3, 5)), ((4, 5), (3, 4)))


def save_alone(folder: Path, state: dict[str, Any], **options: Any) -> None:
    """Write a checkpoint with one process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(state, storage_writer=FileSystemWriter(folder, sync_files=False, **options), no_dist=True)


def save_small(folder: Path) -> None:
    """Write a small checkpoint with one process."""
    tensors = {"fc.weight": torch.randn(8, 16), "norm.weight": torch.randn(8)}
    save_alone(folder, {"model": tensors, "global_step": 7})


def save_two_ranks(folder: Path) -> None:
    """Write `train`, `fsdp` and `hf` with two ranks, and what they hold as `train.safetensors`, ..."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.dflash_core.checkpoints.dcp_files", str(folder)]
    root = Path(__file__).parents[3]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def sharded_drafter() -> tuple[dict[str, torch.Tensor], dict[str, Placement]]:
    """Return a drafter's tensors, some in bfloat16, and how each is sharded."""
    tensors = drafter_tensors(num_layers=1)
    placements: dict[str, Placement] = {}
    for name, tensor in tensors.items():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            placements[name] = Replicate()
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            placements[name] = Shard(1)
        else:
            placements[name] = Shard(0)
        if "mlp" in name:
            tensors[name] = tensor.bfloat16()
    tensors["uneven_rows.weight"] = torch.randn(5, 12)
    tensors["uneven_columns.weight"] = torch.randn(6, 5).bfloat16()
    tensors["one_row.weight"] = torch.randn(1, 16)
    placements |= {
        "uneven_rows.weight": Shard(0),
        "uneven_columns.weight": Shard(1),
        "one_row.weight": Shard(0),
    }
    return tensors, placements


def buffers() -> dict[str, torch.Tensor]:
    """Return the maps between the drafter's and the target's vocabulary."""
    return {"d2t": torch.arange(40, dtype=torch.int64) * 3, "t2d": torch.arange(120) % 3 == 0}


class AppState:
    """A trainer's wrapper around its state, with the two methods that torch looks for."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def _write_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=NUM_RANKS
    )
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    torch.manual_seed(0)
    _write_train(Path(folder), mesh, rank)
    _write_hf(Path(folder), mesh, rank)
    _write_fsdp(Path(folder), mesh, rank)
    torch.distributed.destroy_process_group()


def _write_train(folder: Path, mesh: DeviceMesh, rank: int) -> None:
    tensors, placements = sharded_drafter()
    held: dict[str, Any] = {
        name: distribute_tensor(tensor, mesh, [placements[name]]) for name, tensor in tensors.items()
    }
    grid = torch.randn(GRID_SHAPE)
    own = [box for number, box in enumerate(GRID_BOXES) if number % NUM_RANKS == rank]
    shards = [
        LocalShard(
            grid[top : top + rows, left : left + columns].contiguous(),
            ShardMetadata(shard_offsets=[top, left], shard_sizes=[rows, columns], placement=f"rank:{rank}/cpu"),
        )
        for (top, left), (rows, columns) in own
    ]
    held["grid.weight"] = init_from_local_shards(shards, GRID_SHAPE)
    state = {
        "model_state": AppState(
            {"model": {f"draft_model.{name}": value for name, value in (held | buffers()).items()}}
        ),
        "optimizer": {
            "state": {name: {"exp_avg": value, "step": torch.tensor(3.0)} for name, value in held.items()},
            "param_groups": [{"lr": 1e-3}],
        },
        "rng_state": torch.get_rng_state(),
        "global_step": STEP,
        "args": training_args(),
        "extra": {"epoch": 2},
    }
    save(state, storage_writer=FileSystemWriter(folder / "train", sync_files=False))
    if rank == 0:
        expected = tensors | buffers() | {"grid.weight": grid}
        save_file(
            {f"model_state.model.draft_model.{name}": value for name, value in expected.items()},
            folder / "train.safetensors",
        )


def _write_hf(folder: Path, mesh: DeviceMesh, rank: int) -> None:
    tensors, placements = sharded_drafter()
    held: dict[str, Any] = {
        name: distribute_tensor(tensor, mesh, [placements[name]]) for name, tensor in tensors.items()
    }
    numbers = {name: 1 + (name.startswith("layers.")) for name in held}
    save(held, storage_writer=HuggingFaceStorageWriter(str(folder / "hf"), numbers, save_distributed=True))
    if rank == 0:
        save_file(tensors, folder / "hf.safetensors")


def _write_fsdp(folder: Path, mesh: DeviceMesh, rank: int) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(16, 5), torch.nn.Linear(5, 7))
    whole = {f"app.model.{name}": value.detach().clone() for name, value in model.state_dict().items()}
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    model(torch.randn(2, 16)).sum().backward()
    optimizer.step()
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    weights, moments = get_state_dict(model, optimizer)
    save(
        {"app": AppState({"model": weights, "optim": moments}), "step": STEP},
        storage_writer=FileSystemWriter(folder / "fsdp", sync_files=False, thread_count=2),
    )
    if rank == 0:
        save_file(whole, folder / "fsdp.safetensors")


if __name__ == "__main__":
    spawn(_write_rank, args=(sys.argv[1],), nprocs=NUM_RANKS)
