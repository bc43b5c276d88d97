"""Flow: watch a run and score each checkpoint that becomes ready; deployed as `watch-checkpoints`."""

from __future__ import annotations

from typing import Any, Literal

from prefect import flow, get_run_logger

from dflash_core.config import load_config
from flows.evaluate_checkpoint import evaluate_checkpoint
from flows.run_names import watch_name
from flows.watch_choice import Choice
from flows.watch_runs import DeployedRuns
from flows.watch_values import WatchEvent
from flows.watching import LONGEST_IDLE_S, Watch


@flow(name="watch-checkpoints", flow_run_name=watch_name, validate_parameters=True)
def watch_checkpoints(
    run_url: str,
    config: str | None = None,
    once: bool = False,
    every_s: float = 30.0,
    every_idle_s: float = LONGEST_IDLE_S,
    each: int = 1,
    multiple_of: int = 1,
    from_step: int | None = None,
    match: list[str] | None = None,
    max_backlog: int | None = None,
    order: Literal["oldest", "newest"] = "oldest",
    deployment: str | None = None,
) -> list[dict[str, Any]]:
    """Score each checkpoint of a run that becomes ready.

    Args:
        run_url: path or fsspec URL of the folder that holds the steps.
        config: the configuration file on the machine that runs this; none takes dflash.yaml or the defaults.
        once: score what is ready now and end, instead of watching on.
        every_s: pause between looks while nothing is ready, in seconds.
        every_idle_s: what that pause grows to while nothing changes, in seconds.
        each: take each Nth checkpoint, in the order of steps.
        multiple_of: take steps that are a multiple of this.
        from_step: take this step and later ones.
        match: take names that match one of these patterns, such as `step_*`.
        max_backlog: where more than so many wait to be scored, skip those after the first so many.
        order: which waiting step goes first.
        deployment: have this deployment score them, such as `evaluate-checkpoint/evaluate-checkpoint`; none scores
            them here, one after the other.
    """
    logger = get_run_logger()

    def tell(event: WatchEvent) -> None:
        logger.info("%s %s %s", event.kind, event.name, event.message)

    settings = load_config(config)
    runs = None
    if deployment is not None:
        runs = DeployedRuns(deployment, config=settings, parameters={"config": config})
        runs.require_deployment()
    watch = Watch(
        run_url=run_url,
        config=settings,
        evaluate=lambda checkpoint: evaluate_checkpoint(checkpoint, config),
        tell=tell,
        choice=Choice(
            each=each,
            multiple_of=multiple_of,
            from_step=from_step,
            match=tuple(match or ()),
            max_backlog=max_backlog,
            order=order,
        ),
        runs=runs,
    )
    watch.run(once=once, every_s=every_s, idle_s=every_idle_s)
    return watch.results
