"""`dflash-eval`: the command line.

Exit status: 0 done, 1 a checkpoint failed or vanished, a gate was missed, or something could not be removed from
the store, 2 the user's input was wrong.
(To a watch a checkpoint that vanished is no failure: runs rotate theirs.) An error is one line on standard
error; `--debug` shows where it came from. With `--json` standard output holds one JSON document and nothing else.

Prefect and torch are imported by the commands that need them, so that `--help` and `sql` stay quick.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence

from dflash_core.errors import DFlashEvalError, one_line

PROGRAM = "dflash-eval"
INTERRUPTED = 130


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--config", metavar="FILE", help="YAML configuration (default: dflash.yaml, if there is one)")
    common.add_argument("--json", action="store_true", help="one JSON document on standard output, nothing else")
    common.add_argument("--debug", action="store_true", help="show where an error came from")
    parser = argparse.ArgumentParser(prog=PROGRAM, description="Score checkpoints of a DFlash drafter as they appear.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, text: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=text, description=text, parents=[common])

    demo = add("demo", "The whole job on a real 135 M target, on a laptop CPU")
    demo.add_argument("--folder", default="results/demo", help="where the demo puts everything (default: %(default)s)")
    add("probe", "Ask every host of the config what it has; one that is down is a row")
    inspect = add("inspect", "Layout, tensors, bytes to read and to skip, readiness; reads the index only")
    inspect.add_argument("checkpoint", metavar="CHECKPOINT")
    prepare = add("prepare", "Transcripts and hidden states of the target, once")
    _add_refresh(prepare, "transcripts, hidden_states or all")
    evaluate = add("evaluate", "Score checkpoints")
    evaluate.add_argument("checkpoints", metavar="CHECKPOINT", nargs="+")
    _add_conditions(evaluate)
    evaluate.add_argument("--blocks", action="store_true", help="add the tokens emitted per verification step")
    _add_refresh(evaluate, "transcripts, hidden_states, drafter, blocks, results or all")
    evaluate.add_argument(
        "--prepare",
        metavar="WHERE",
        help="who runs the target where the store lacks its part: here, or a Prefect deployment that is waited for "
        "(default: prepare-target/prepare-target where that can help and a worker is up, else here)",
    )
    watch = add("watch", "Score each checkpoint of a run that becomes ready")
    _add_watch(watch)
    _add_conditions(watch)
    up = add("up", "Start Prefect's server, a worker per pool and a watch on this machine; what runs stays")
    up.add_argument("run_url", metavar="RUN_URL", nargs="?", help="watch this run, too")
    up.add_argument("--port", type=int, metavar="N", help="of the server (default: 4200)")
    down = add("down", "End what `up` started")
    for service in (up, down):
        service.add_argument(
            "--state", metavar="DIR", help="folder of their state (default: ~/.local/state/dflash-eval)"
        )
    _add_compare(add("compare", "Paired differences between checkpoints, with intervals"))
    _add_show(add("show", "The drafts themselves, accepted and rejected, token by token"))
    _add_sql(add("sql", "Query the results, read-only"))
    report = add("report", "One self-contained HTML file")
    report.add_argument("--out", metavar="FILE", help="where to write it (default: report.html beside the database)")
    report.add_argument("--baseline", metavar="R", help="what the others are compared with, as in `compare`")
    report.add_argument(
        "--no-drafts", action="store_true", help="leave out the drafts of the best and worst prompts: faster"
    )
    text = "What the store holds, and making room in it"
    _add_store(commands.add_parser("store", help=text, description=text), common)
    return parser


def _add_compare(compare: argparse.ArgumentParser) -> None:
    compare.add_argument(
        "selectors", metavar="CHECKPOINT", nargs="*", help="step, run:step, best, latest, address or evaluation id"
    )
    compare.add_argument("--baseline", metavar="R", help="what to compare with")
    compare.add_argument("--block-size", type=int, metavar="K", help="evaluations of this block size")
    compare.add_argument("--by", choices=["dataset", "group"], help="the same for each dataset or group of prompts")
    compare.add_argument(
        "--fail-below", metavar="T", help="exit with 1 where a checkpoint is worse by more: -0.05 (tokens) or -2%%"
    )
    compare.add_argument(
        "--detect",
        type=float,
        default=0.1,
        metavar="D",
        help="tell how many prompts would show D (default: %(default)s)",
    )


def _add_show(show: argparse.ArgumentParser) -> None:
    show.add_argument(
        "checkpoint", metavar="CHECKPOINT", help="address, or step, run:step, best, latest of the results"
    )
    show.add_argument("prompt", metavar="PROMPT", nargs="?", help="id of a prompt (default: the first)")
    show.add_argument("--against", metavar="B", help="a second checkpoint, side by side")
    show.add_argument(
        "--probabilities",
        action="store_true",
        help="add the drafter's probability of each draft: softmax, at temperature 1, of the scores that chose it (of "
        "DSpark the Markov head's bias included, of DFlash2 the selector's over its candidates); in brackets what "
        "DSpark's confidence head says of it, trained on the chance of acceptance when both draw at temperature 1; "
        "and the rank and probability of the target's token at the first miss",
    )
    _add_conditions(show)


def _add_sql(sql: argparse.ArgumentParser) -> None:
    sql.add_argument("statement", metavar="SQL")
    sql.add_argument("--csv", action="store_true", help="CSV on standard output")
    sql.add_argument("--parquet", metavar="FILE", help="write the rows to a Parquet file")
    sql.add_argument(
        "--limit", type=int, default=200, metavar="N", help="show people N rows, 0: all (default: %(default)s)"
    )


def _add_store(store: argparse.ArgumentParser, common: argparse.ArgumentParser) -> None:
    actions = store.add_subparsers(dest="action", required=True, metavar="ACTION")
    text = "Every artifact: size, last use, and what it belongs to"
    actions.add_parser("list", help=text, description=text, parents=[common])
    text = "Remove artifacts and what killed builders left; what is in use stays"
    prune = actions.add_parser(
        "prune",
        help=text,
        description=f"{text}. An artifact goes when it meets every selection below; without one, only left-overs go.",
        parents=[common],
    )
    prune.add_argument("--kind", action="append", metavar="KIND", help="of a kind, such as blocks (may be repeated)")
    prune.add_argument("--older-than", metavar="AGE", help="not used for so long: a number and s, m, h, d or w")
    prune.add_argument("--target", metavar="NAME", help="made for a target")
    prune.add_argument("--run", metavar="RUN", help="made for a run's checkpoints")
    prune.add_argument("--checkpoint", metavar="URL", help="made for a checkpoint: its address, or the end of it")
    prune.add_argument(
        "--keep-bytes", metavar="SIZE", help="the least recently used, until the store takes no more, such as 50GB"
    )
    prune.add_argument("--mirror", action="store_true", help="only this machine's copies of a store that is not local")
    prune.add_argument(
        "--dry-run", action="store_true", help="only show what would go, and what it costs to make again"
    )
    prune.add_argument("--yes", action="store_true", help="do not ask")


def _add_watch(watch: argparse.ArgumentParser) -> None:
    watch.add_argument("run_url", metavar="RUN_URL")
    watch.add_argument("--once", action="store_true", help="score what is ready now and end")
    watch.add_argument(
        "--every", type=float, default=10.0, metavar="S", help="pause between looks, in seconds (default: %(default)s)"
    )
    watch.add_argument(
        "--every-idle", type=float, metavar="S", help="what the pause grows to while nothing changes (default: 120)"
    )
    watch.add_argument(
        "--each", type=int, default=1, metavar="N", help="only each Nth checkpoint, in the order of steps"
    )
    watch.add_argument("--multiple-of", type=int, default=1, metavar="M", help="only steps that are a multiple of M")
    watch.add_argument("--from-step", type=int, metavar="STEP", help="only this step and later ones")
    watch.add_argument(
        "--match", action="append", default=[], metavar="GLOB", help="only names that match (may be repeated)"
    )
    watch.add_argument(
        "--max-backlog", type=int, metavar="N", help="where more than N wait to be scored, skip those after the first N"
    )
    watch.add_argument(
        "--order", choices=["oldest", "newest"], default="oldest", help="which step goes first (default: %(default)s)"
    )
    watch.add_argument(
        "--deployment",
        metavar="NAME",
        help="have a Prefect deployment score them, such as evaluate-checkpoint/evaluate-checkpoint",
    )


def _add_refresh(parser: argparse.ArgumentParser, stages: str) -> None:
    parser.add_argument(
        "--refresh",
        action="append",
        default=[],
        metavar="STAGE",
        help=f"make a stage again, and what is made from it, whatever is stored: {stages} (may be repeated)",
    )


def _add_conditions(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--block-size", type=int, metavar="K", help="draft shorter blocks than trained")
    parser.add_argument("--device", choices=["auto", "cuda", "cpu"], help="where the drafter runs")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    options = _parse(sys.argv[1:] if arguments is None else arguments)
    # Before torch is loaded: threads that wait by spinning made scoring 5 to 8 times slower on a busy machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        return _command(options.command)(options)
    except DFlashEvalError as error:
        if options.debug:
            raise
        return _fail(one_line(error), error.exit_status, options)
    except KeyboardInterrupt:
        return _fail("interrupted; what was finished is kept, start again to go on", INTERRUPTED, options)
    except BrokenPipeError:
        # The reader of a pipe has gone, as `head` does; Python would complain again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if options.debug:
            raise
        text = f"unexpected {type(error).__name__}: {one_line(error)}; run again with --debug to see where"
        return _fail(text, 1, options)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line, with two things that argparse cannot: `--fail-below -2%` and a PROMPT behind options."""
    words = list(arguments)
    for place in range(len(words) - 1):
        if words[place] == "--fail-below":
            words[place : place + 2] = [f"--fail-below={words[place + 1]}"]
            break
    parser = build_parser()
    options, left = parser.parse_known_args(words)
    if left and options.command == "show" and options.prompt is None and not left[0].startswith("-"):
        options.prompt = left.pop(0)
    if left:
        parser.error(f"unrecognized arguments: {' '.join(left)}")
    return options


def _fail(text: str, status: int, options: argparse.Namespace) -> int:
    print(f"{PROGRAM}: {text}", file=sys.stderr)
    if options.json:
        print(json.dumps({"error": text, "exit_status": status}))
    return status


def _command(name: str) -> Callable[[argparse.Namespace], int]:
    """Return the function of a command, importing only what it needs."""
    from flows import commands

    functions: dict[str, Callable[[argparse.Namespace], int]] = {
        "demo": commands.demo,
        "probe": commands.probe,
        "inspect": commands.inspect,
        "prepare": commands.prepare,
        "evaluate": commands.evaluate,
        "watch": commands.watch,
        "up": commands.up,
        "down": commands.down,
        "compare": commands.compare,
        "show": commands.show,
        "sql": commands.sql,
        "report": commands.report,
        "store": commands.store,
    }
    return functions[name]


if __name__ == "__main__":
    sys.exit(main())
