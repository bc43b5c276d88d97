"""A line for whoever follows a run: its log in Prefect, and the terminal where somebody typed the command."""

from __future__ import annotations

from prefect import get_run_logger, runtime

from flows import screen


def say(text: str) -> None:
    """Tell what a run waits for."""
    get_run_logger().info("%s", text)
    if runtime.deployment.id is None:
        screen.say(text)
