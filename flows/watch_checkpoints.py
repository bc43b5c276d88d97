"""Flow: watch a run and score each checkpoint that becomes ready; deployed as `watch-checkpoints`."""

from __future__ import annotations

from typing import Any

from prefect import flow, get_run_logger

from dflash_core.config import load_config
from flows.evaluate_checkpoint import evaluate_checkpoint
from flows.watching import Watch, WatchEvent


@flow(name="watch-checkpoints", flow_run_name="watch {run_url}", validate_parameters=True)
def watch_checkpoints(
    run_url: str, config: str | None = None, once: bool = False, every_s: float = 30.0
) -> list[dict[str, Any]]:
    """Score each checkpoint of a run that becomes ready.

    Args:
        run_url: path or fsspec URL of the folder that holds the steps.
        config: the configuration file on the machine that runs this; none takes dflash.yaml or the defaults.
        once: score what is ready now and end, instead of watching on.
        every_s: pause between looks while nothing is ready, in seconds.
    """
    logger = get_run_logger()

    def tell(event: WatchEvent) -> None:
        logger.info("%s %s %s", event.kind, event.name, event.message)

    watch = Watch(
        run_url=run_url,
        config=load_config(config),
        evaluate=lambda checkpoint: evaluate_checkpoint(checkpoint, config),
        tell=tell,
    )
    watch.run(once=once, every_s=every_s)
    return watch.results
