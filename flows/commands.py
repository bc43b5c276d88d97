"""The commands of `dflash-eval`: each reads the configuration, calls flows or core, and shows the result."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_core.config import Config, load_config, with_overrides
from dflash_core.errors import DFlashEvalError, UnsupportedCheckpoint, one_line
from flows import screen
from flows.extras_table import extras_lines

if TYPE_CHECKING:
    from dflash_core.hosts.report import HostReport


def demo(options: argparse.Namespace) -> int:
    """Run the whole job on a real target; see `flows/demo.py`."""
    from flows.demo import run_demo

    return run_demo(Path(options.folder), as_json=options.json, debug=options.debug)


def probe(options: argparse.Namespace) -> int:
    """Show what every host has and what would run where."""
    from dflash_core.hosts import present
    from dflash_core.hosts.probe import probe_hosts
    from dflash_core.results.database import write_hosts
    from flows.planning import plan_for

    config = load_config(options.config)
    reports = probe_hosts(config)
    write_hosts(config.results, [_host_row(report) for report in reports])
    plan, why_not = plan_for(config, reports)
    if options.json:
        hosts = [present.report_json(report) for report in reports]
        rows = present.plan_json(plan) if plan is not None else None
        screen.print_json({"hosts": hosts, "plan": rows, "plan_problem": why_not})
        return 0
    screen.print_table("Hosts", present.turn(present.report_rows(reports), by="host"))
    models = present.model_rows(reports)
    if models:
        named = [{"model": f"{row['host']}: {row['path']}", **row} for row in models]
        screen.print_table("Models", present.turn(named, by="model"))
    if plan is not None:
        screen.print_table("Plan", present.turn(present.plan_rows(plan), by="stage"))
    else:
        screen.say(f"no plan: {why_not}")
    return 0


def inspect(options: argparse.Namespace) -> int:
    """Show what a checkpoint is, from its index alone."""
    from dflash_core.checkpoints import inspect_checkpoint
    from flows.inspecting import inspection_json, show_inspection

    config = load_config(options.config)
    inspection = inspect_checkpoint(options.checkpoint, hosts=config.hosts, run=config.run)
    if options.json:
        screen.print_json(inspection_json(inspection, config))
    else:
        show_inspection(inspection, config)
    if inspection.refusal is not None:
        screen.say(f"dflash-eval: {inspection.refusal}")
        return UnsupportedCheckpoint.exit_status
    return 0


def prepare(options: argparse.Namespace) -> int:
    """Have the target do its part, once."""
    from dflash_core import refreshing

    refresh: list[Any] = refreshing.require_stages(options.refresh, refreshing.OF_TARGET)
    with _prefect(load_config(options.config), options):
        from flows.prepare_target import prepare_target

        result = prepare_target(options.config, refresh=refresh or None)
    for warning in result["warnings"]:
        screen.say(f"warning: {warning}")
    if options.json:
        screen.print_json(result)
        return 0
    transcripts, states = result["transcripts"], result["hidden_states"]
    row = {
        "target": result["target"],
        "identity": result["target_identity"],
        **({"for boxes without it": result["kept_as"]} if result["kept_as"] else {}),
        "transcripts": transcripts["num_transcripts"],
        "tokens": transcripts["num_tokens"],
        "compute dtype": transcripts["compute_dtype"] or f"from the {transcripts['source']}",
        "layers kept": ", ".join(map(str, states["layers"])) or "only the final state",
        "tokens not greedy": states["num_not_greedy"],
    }
    screen.print_table("Target prepared", [row])
    return 0


def evaluate(options: argparse.Namespace) -> int:
    """Score checkpoints; one that fails does not stop the others."""
    from dflash_core.refreshing import refreshing

    config = with_overrides(load_config(options.config), block_size=options.block_size, device=options.device)
    results: list[dict[str, Any]] = []
    errors: list[DFlashEvalError] = []
    # Around all of them: the target's part is made again once, not for each.
    with refreshing(options.refresh), _Scorer(config, options) as score:
        for checkpoint in options.checkpoints:
            try:
                results.append(score(checkpoint))
            except DFlashEvalError as error:
                if options.debug:
                    raise
                errors.append(error)
                results.append(_without_numbers(checkpoint, one_line(error), error.status))
                screen.say(f"dflash-eval: {one_line(error)}")
    if options.json:
        screen.print_json([_with_walks(result, config) if options.blocks else result for result in results])
    elif len(errors) < len(results):
        _show_results(results)
    if not errors:
        return 0
    return errors[0].exit_status if len(results) == 1 else 1


def watch(options: argparse.Namespace) -> int:
    """Score each checkpoint of a run as it becomes ready; see `flows/watch_command.py`."""
    from flows import watch_command

    config = with_overrides(load_config(options.config), block_size=options.block_size, device=options.device)
    with _Scorer(config, options) as score:
        watching = watch_command.run_watch(config, options, score.run_flow)
    if options.json:
        ended = {"failed": watching.failures, "vanished": watching.vanished, "skipped": watching.skipped}
        others = [_without_numbers(name, text, status) for status, of in ended.items() for name, text in of.items()]
        others += [_without_numbers(name, None, "done") for name in watching.scored_elsewhere]
        screen.print_json(watching.results + others)
    elif watching.results:
        _show_results(watching.results)
    elif options.once and not (watching.failures or watching.vanished or watching.scored_elsewhere):
        screen.say(f"nothing was ready in {options.run_url}")
    return 1 if watching.failures else 0


def up(options: argparse.Namespace) -> int:
    """Start server, workers and watch; see `flows/services.py`."""
    from flows.services import Services

    load_config(options.config)  # a mistake in it is told here, not in a log
    services = Services(options.state, port=options.port)
    pids = services.up(run_url=options.run_url, config=options.config, say=screen.say)
    if options.json:
        screen.print_json({"services": pids, "url": services.url, "state": str(services.state)})
    else:
        screen.print_table("", [{"service": name, "pid": pid} for name, pid in pids.items()])
        print(f"Prefect at {services.url.removesuffix('/api')}; logs and state in {services.state}")
    return 0


def down(options: argparse.Namespace) -> int:
    """End what `up` started."""
    from flows.services import Services

    ended = Services(options.state).down(say=screen.say)
    if options.json:
        screen.print_json({"ended": ended})
    elif not ended:
        print("nothing ran")
    return 0


def compare(options: argparse.Namespace) -> int:
    """Compare checkpoints over the same prompts, and judge a gate; see `flows/comparing.py`."""
    from flows.comparing import compare_command

    return compare_command(options)


def show(options: argparse.Namespace) -> int:
    """Show what one drafter, or two, proposed on one prompt; see `flows/showing.py`."""
    from flows.showing import show_command

    return show_command(options)


def sql(options: argparse.Namespace) -> int:
    """Run one read-only statement on the results; see `flows/querying.py`."""
    from flows.querying import sql_command

    return sql_command(options)


def report(options: argparse.Namespace) -> int:
    """Write the report."""
    from flows.report_making import make_report

    config = load_config(options.config)
    path = make_report(config, options.out, baseline=options.baseline, has_drafts=not options.no_drafts)
    if options.json:
        screen.print_json({"report": str(path)})
    else:
        print(path)
    return 0


def store(options: argparse.Namespace) -> int:
    """Show what lies in the store, or make room in it; see `flows/storing.py`."""
    from flows import storing

    return storing.list_command(options) if options.action == "list" else storing.prune_command(options)


@contextmanager
def _prefect(config: Config, options: argparse.Namespace) -> Iterator[str]:
    """Give the block a Prefect server, whose address it yields, and a progress bar."""
    from dflash_core.store_opening import store_of
    from flows.orchestration import prefect_server

    state = str(store_of(config).root)
    with screen.progress_bars(enabled=not options.json), prefect_server(state, debug=options.debug) as url:
        yield url


class _Scorer:
    """Scores checkpoints: from the database where they are known, else by the flow.

    Prefect is imported and its server started only when a checkpoint is not known.
    """

    def __init__(self, config: Config, options: argparse.Namespace) -> None:
        self._config = config
        self._options = options
        self._context: Any = None
        self._url = ""

    def __enter__(self) -> _Scorer:
        return self

    def __exit__(self, *details: Any) -> None:
        self._end(*details)

    def _end(self, *details: Any) -> None:
        context, self._context = self._context, None
        if context is not None:
            context.__exit__(*(details or (None, None, None)))

    def __call__(self, checkpoint: str) -> dict[str, Any]:
        from flows.scoring import score_checkpoint

        must_run = bool(self._options.refresh)
        return score_checkpoint(self._config, checkpoint, self.run_flow, must_run=must_run).result

    def run_flow(self, checkpoint: str) -> dict[str, Any]:
        """Run the flow for a checkpoint that is not known."""
        from flows.orchestration import is_healthy

        if self._context is not None and not is_healthy(self._url, timeout_s=10):
            self._end()  # a server of our own that was killed, or fell over; what it knew is on disk
        if self._context is None:
            if not self._options.json:
                screen.say("starting the orchestration ...")
            context = _prefect(self._config, self._options)
            self._url = context.__enter__()
            self._context = context
        from flows.evaluate_checkpoint import evaluate_checkpoint

        options = self._options
        flow: Callable[..., dict[str, Any]] = evaluate_checkpoint
        how = {"prepare": vars(options).get("prepare"), "refresh": vars(options).get("refresh") or None}
        return flow(checkpoint, options.config, options.block_size, options.device, **how)


def _host_row(report: HostReport) -> dict[str, Any]:
    from dflash_core.hosts.present import report_json

    values = report_json(report)
    own = {name: values.pop(name) for name in ("name", "url", "status", "problem")}
    return {**own, "probed_at": datetime.now(UTC), "facts": values}


def _without_numbers(checkpoint: str, error: str | None, status: str) -> dict[str, Any]:
    empty: dict[str, Any] = {"cached": {}, "seconds": {}, "datasets": {}, "groups": {}}
    unknown = dict.fromkeys(("run", "step", "evaluation_id", "block_size", "bytes_read", "bytes_total"))
    return {"checkpoint": checkpoint, "status": status, "error": error, "warnings": [], **unknown, **empty}


def _with_walks(result: dict[str, Any], config: Config) -> dict[str, Any]:
    from dflash_core.results.database import read_evaluation

    if result["status"] != "done":
        return result
    stored = read_evaluation(config.results, result["evaluation_id"], blocks=True)
    return result | {"walks": stored["walks"] if stored else {}}


def _show_results(results: list[dict[str, Any]]) -> None:
    """Print one checkpoint slice by slice, several with one line each."""
    done = [result for result in results if result["status"] == "done"]
    caption = "tau: tokens emitted per verification step, bonus included; [95 % interval over prompts]"
    conditions = sorted({f"block size {one['block_size']}, {one['dtype']} on {one['device']}" for one in done})
    if len(results) == 1:
        (result,) = done
        slices = result["datasets"] | result["groups"]
        title = f"{result['run']}, step {result['step']}: read {_read_text(result)}, {_seconds_text(result)}"
        rows = [_slice_row(name, slice_) for name, slice_ in slices.items()]
    else:
        title, rows = "Acceptance", [_checkpoint_row(result) for result in results]
    screen.print_table(title, rows, caption="; ".join([caption, *conditions]))
    for line in extras_lines(done[0]) if len(results) == 1 else []:
        print(line)
    for result in done:
        for warning in result["warnings"]:
            screen.say(f"warning: {result['checkpoint']}: {warning}")


def _slice_row(name: str, slice_: dict[str, Any]) -> dict[str, Any]:
    return {
        "prompts": name,
        "number": slice_["num_prompts"],
        "verification steps": slice_["num_verification_steps"],
        "tau": screen.tau_text(slice_),
        "mean over prompts": slice_["tau_prompt_mean"],
    }


def _checkpoint_row(result: dict[str, Any]) -> dict[str, Any]:
    if result["status"] != "done":
        return {"run": result["checkpoint"], "step": None, "tau": result["status"], "read": None, "took": None}
    return {
        "run": result["run"],
        "step": result["step"],
        "tau": screen.tau_text(result["datasets"]["all"]),
        "read": _read_text(result),
        "took": _seconds_text(result),
    }


def _read_text(result: dict[str, Any]) -> str:
    return f"{screen.megabytes(result['bytes_read'])} of {screen.megabytes(result['bytes_total'])}"


def _seconds_text(result: dict[str, Any]) -> str:
    return f"{sum(result['seconds'].values()):.1f} s"
