"""Reading training checkpoints of drafters: found, looked at, and fetched without running them."""

from dflash_core.checkpoints.inspection import inspect_checkpoint
from dflash_core.checkpoints.listing import check_readiness, list_checkpoints
from dflash_core.checkpoints.source_base import Source, SourceFile
from dflash_core.checkpoints.sources import open_source
from dflash_core.checkpoints.streaming import stream_checkpoint, weights_digest
from dflash_core.checkpoints.values import (
    CheckpointInspection,
    CheckpointRef,
    FoundCheckpoint,
    Readiness,
    StreamedCheckpoint,
    TensorEntry,
)

__all__ = [
    "CheckpointInspection",
    "CheckpointRef",
    "FoundCheckpoint",
    "Readiness",
    "Source",
    "SourceFile",
    "StreamedCheckpoint",
    "TensorEntry",
    "check_readiness",
    "inspect_checkpoint",
    "list_checkpoints",
    "open_source",
    "stream_checkpoint",
    "weights_digest",
]
