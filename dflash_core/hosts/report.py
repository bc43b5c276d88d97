"""What is known about one machine after it was asked: values only, each of which may be absent.

None means that the machine did not say. Sizes are bytes unless a name ends in `_mib` (2^20 bytes,
the unit of `nvidia-smi`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dflash_core.target.model_config import ModelConfig

Status = Literal["ok", "read-only", "unreachable", "refused", "unknown-key", "timed-out", "unreadable", "misconfigured"]
"""`ok` and `read-only` are answers; the rest say why there is none, or only a part of one."""

READ_ONLY_NOTE = "read-only: SFTP facts only"
BF16_FLAGS = ("avx512_bf16", "amx_bf16")
"""CPU flags that make bfloat16 matrix products fast; without one they are a hundred times slower than float32."""
CPU_FLAGS = ("avx2", "avx512f", *BF16_FLAGS)
"""CPU flags that decide how fast a model runs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GPU:
    """One NVIDIA GPU as `nvidia-smi` describes it."""

    index: int
    name: str
    memory_total_mib: int | None
    memory_used_mib: int | None
    driver: str | None
    compute_capability: str | None
    """`major.minor`; absent with drivers too old to be asked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Disk:
    """The file system that a folder lies on."""

    path: str
    is_present: bool
    """False: the folder does not exist yet; the sizes are of the disk where it would be made."""
    total_bytes: int | None
    free_bytes: int | None
    """Free for an ordinary user."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFolder:
    """One model on a host: its weights on disk and its sizes."""

    path: str
    is_present: bool
    size_bytes: int | None
    """All files directly in the folder."""
    weights_bytes: int | None
    """The weight files among them: safetensors, else PyTorch's .bin, else GGUF."""
    num_shards: int
    """Weight files that are there."""
    shards_missing: tuple[str, ...]
    """Weight files that the index, or the numbering of the others, asks for and that are not there."""
    config: ModelConfig | None
    problem: str | None
    """One line; None when everything is there."""

    @property
    def is_whole(self) -> bool:
        """Tell whether every weight file that is asked for is there."""
        return self.is_present and self.num_shards > 0 and not self.shards_missing


@dataclass(frozen=True, kw_only=True, slots=True)
class Listing:
    """The folder that a read-only host's URL points to."""

    path: str
    num_entries: int | None
    """Files and folders directly in it; None when it cannot be listed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostFacts:
    """What a machine said about itself."""

    system: str | None = None
    """Kernel and architecture."""
    gpus: tuple[GPU, ...] = ()
    ram_total_bytes: int | None = None
    ram_available_bytes: int | None = None
    """What new processes can get without swapping; not more than a container's limit leaves."""
    swap_total_bytes: int | None = None
    swap_free_bytes: int | None = None
    disks: tuple[Disk, ...] = ()
    cpu_model: str | None = None
    threads: int | None = None
    cpu_flags: tuple[str, ...] | None = None
    """Those of `CPU_FLAGS` that this CPU has; None when it did not say."""
    load_1min: float | None = None
    python: str | None = None
    torch: str | None = None
    torch_cuda: str | None = None
    """CUDA version that torch was built for; None for a CPU build or without torch."""
    models: tuple[ModelFolder, ...] = ()
    folder: Listing | None = None
    notes: tuple[str, ...] = ()
    """Smaller things worth telling, one line each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostReport:
    """One host of the configuration after it was asked."""

    name: str
    url: str
    status: Status
    problem: str | None
    """One line that says what went wrong and what to do; None when nothing did."""
    seconds: float
    """How long asking took."""
    facts: HostFacts

    @property
    def is_local(self) -> bool:
        """Tell whether this is the machine that asked."""
        return self.url == LOCAL_URL

    @property
    def may_be_given_work(self) -> bool:
        """Tell whether the host answered and is not marked read-only."""
        return self.status == "ok"


LOCAL_URL = "local"
"""The URL of the machine that asks."""
