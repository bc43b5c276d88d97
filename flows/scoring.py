"""Scoring one checkpoint, answered from the results database where it is known."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from dflash_core import evaluation
from dflash_core.checkpoints import CheckpointInspection
from dflash_core.config import Config
from dflash_core.errors import CheckpointNotFound, DoesNotFit
from dflash_core.results import database
from flows import notifying


class Scored(NamedTuple):
    """The result of a checkpoint, and whether it was known before."""

    result: dict[str, Any]
    is_known: bool


def score_checkpoint(
    config: Config, checkpoint: str, evaluate: Callable[[str], dict[str, Any]], *, must_run: bool = False
) -> Scored:
    """Return the result of a checkpoint: from the database where it is known, else from the flow.

    Args:
        config: the configuration.
        checkpoint: path or URL.
        evaluate: runs the flow for an address and returns the result.
        must_run: run it also where the result is known: something is to be made again.

    Raises:
        CheckpointNotFound: it was not there at the first look.
        CheckpointVanished: it was there at the first look and not any more when the flow came to read it;
            the results hold a row of it.
        DFlashEvalError: whatever else went wrong.
    """
    begin, started_at = time.monotonic(), evaluation.now()
    inspection = evaluation.inspect(checkpoint, config)
    evaluation.require_ready(inspection)
    known = None if must_run else known_result(config, inspection, begin)
    if known is not None:
        notifying.tell_known(config, known)
        return Scored(known, is_known=True)
    try:
        return Scored(evaluate(checkpoint), is_known=False)
    except CheckpointNotFound as error:  # the flow looked a second time, and found nothing to write a row of
        vanished = evaluation.vanished(inspection)
        row = evaluation.checkpoint_record(inspection, None)
        record = evaluation.failed_record(config, row, vanished, started_at=started_at, seconds={})
        database.write_evaluation(config.results, record)
        raise vanished from error


def known_result(config: Config, inspection: CheckpointInspection, begin: float) -> dict[str, Any] | None:
    """Return the stored result of a checkpoint that was scored under these conditions, else None.

    Only the checkpoint's index was read; neither Prefect nor the target is needed.

    Args:
        config: the configuration, conditions included.
        inspection: of the checkpoint.
        begin: when the work on the answer began, by `time.monotonic`.
    """
    try:
        known = evaluation.known_evaluation(config, inspection)
    except DoesNotFit:  # now: the flow waits for its turn on the device, and looks again
        return None
    if known is None or not database.has_evaluation(config.results, known.evaluation_id, extras=known.extras):
        return None
    result = database.read_evaluation(config.results, known.evaluation_id)
    if result is None:
        return None
    # What this answer cost, not what the first one did.
    answered = {"cached": dict.fromkeys(result["cached"], True), "bytes_read": inspection.bytes_read}
    return result | answered | {"seconds": {"answer_from_store": round(time.monotonic() - begin, 3)}}
