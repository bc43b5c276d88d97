"""The end of a flow run that scored a checkpoint, or failed to: artifacts for a person, news for the webhook.

Neither ever changes how the run ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prefect import runtime

from dflash_core.checkpoints import CheckpointInspection
from dflash_core.config import Config
from dflash_core.errors import CheckpointVanished, one_line
from dflash_core.results.standing import read_standing
from flows import artifacts, notifying


def conclude(config: Config, result: Mapping[str, Any]) -> None:
    """Leave the artifacts of an evaluation that is done, and send what is news about it."""
    label = _label(result["run"], result["step"])
    warn = artifacts.run_logger().warning
    try:
        standing = read_standing(config.results, result["evaluation_id"], config.baseline)
    except Exception as error:  # the numbers are in the database; this is only about them
        warn("%s: it could not be compared with others: %s: %s", label, type(error).__name__, one_line(error))
        return
    artifacts.run_logger().info("%s", artifacts.one_line_of(standing))
    artifacts.leave_result(standing, result)
    notifying.tell_done(config, standing, say=warn)


def conclude_failure(config: Config, inspection: CheckpointInspection, error: Exception) -> None:
    """Leave the error of a checkpoint that came to no number, and send it unless somebody tries again."""
    ref = inspection.ref
    artifacts.leave_failure(ref.run, _label(ref.run, ref.step), one_line(error))
    is_watched = notifying.is_watched() or notifying.WATCHED_TAG in (runtime.flow_run.tags or [])
    if not is_watched and not isinstance(error, CheckpointVanished):  # a run that rotates its checkpoints is no news
        notifying.tell_failed(config, inspection, error, say=artifacts.run_logger().warning)


def _label(run: str, step: int | None) -> str:
    return run if step is None else f"{run}:{step}"
