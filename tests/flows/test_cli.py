"""`dflash-eval` as people and scripts call it: output, JSON, exit status, one-line errors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.scene import Setup, make_setup

JSON_KEYS = {"checkpoint", "run", "step", "status", "error", "evaluation_id", "block_size", "bytes_read", "bytes_total"}
JSON_KEYS |= {"cached", "seconds", "datasets"}
SLICE_KEYS = {"num_prompts", "num_verification_steps", "num_accepted_drafts", "tau_pooled", "tau_prompt_mean"}
SLICE_KEYS |= {"ci_low", "ci_high", "survival"}


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory, prefect_api: str) -> Setup:
    """A set-up whose two checkpoints were scored by the command."""
    setup = make_setup(tmp_path_factory.mktemp("cli") / "s", steps=(1, 2))
    done = setup.process("evaluate", str(setup.run / "step_1"), str(setup.run / "step_2"))
    assert done.returncode == 0, done.stderr
    assert "Acceptance" in done.stdout
    return setup


def fails(setup: Setup, *arguments: str, status: int = 2) -> str:
    """Run a command that must fail with one line on standard error and nothing on standard output."""
    done = setup.cli(*arguments)
    assert done.returncode == status, done.stdout + done.stderr
    assert done.stdout == ""
    lines = [line for line in done.stderr.splitlines() if not line.startswith("starting the orchestration")]
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("dflash-eval: ")
    return lines[0]


def test_evaluate_answers_a_known_checkpoint_without_prefect(scored: Setup) -> None:
    unusable = {"PREFECT_API_URL": "http://127.0.0.1:9/api"}
    done = scored.process("evaluate", str(scored.run / "step_1"), "--json", "--blocks", env=unusable)
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(done.stdout)
    assert set(result) >= JSON_KEYS | {"walks"}
    assert result["status"] == "done"
    assert (result["run"], result["step"]) == ("a", 1)
    assert all(result["cached"].values())
    assert set(result["datasets"]) == {"all", "odd", "even"}
    for slice_ in result["datasets"].values():
        assert set(slice_) >= SLICE_KEYS
        assert len(slice_["survival"]) == result["block_size"] - 1
    everything = result["datasets"]["all"]
    lengths = [length for walk in result["walks"].values() for length in walk]
    assert everything["num_verification_steps"] == len(lengths)
    assert everything["tau_pooled"] == pytest.approx(sum(lengths) / len(lengths), abs=1e-12)


def test_a_batch_with_a_bad_checkpoint_scores_the_others_and_ends_with_1(scored: Setup) -> None:
    done = scored.cli("evaluate", str(scored.run / "step_1"), str(scored.run / "nowhere"), "--json")
    assert done.returncode == 1
    good, bad = json.loads(done.stdout)
    assert (good["status"], bad["status"]) == ("done", "failed")
    assert "nowhere" in bad["error"]
    assert set(bad) >= JSON_KEYS


def test_compare_pairs_steps_and_judges_a_gate(scored: Setup) -> None:
    table = scored.json("compare")
    assert [row["step"] for row in table["rows"]] == [1, 2]
    assert table["rows"][1]["difference"]["num_prompts"] == 4
    assert scored.cli("compare", "--fail-below", "1").returncode == 0
    assert "--baseline" in fails(scored, "compare", "--fail-below", "0")
    missed = scored.cli("compare", "--fail-below", "7.5")
    assert missed.returncode == 1
    assert "7.5" in missed.stdout
    assert "step 9" in fails(scored, "compare", "9") or "'9'" in fails(scored, "compare", "9")


def test_sql_reads_and_cannot_write(scored: Setup) -> None:
    assert scored.json("sql", "SELECT 1e0 / 0 AS x") == [{"x": None}]
    rows = scored.json("sql", "SELECT run, step FROM leaderboard ORDER BY step")
    assert rows == [{"run": "a", "step": 1}, {"run": "a", "step": 2}]
    before = scored.results.read_bytes()
    fails(scored, "sql", "DELETE FROM blocks")
    fails(scored, "sql", "SELECT nothing FROM nowhere")
    assert scored.results.read_bytes() == before


def test_show_draws_the_same_walk_as_the_evaluation(scored: Setup) -> None:
    shown = scored.json("show", str(scored.run / "step_1"), "p1")
    (result,) = scored.json("evaluate", str(scored.run / "step_1"), "--blocks")
    drawn = [len(block["accepted"]) + (block["bonus"] is not None) for block in shown["blocks"]]
    assert drawn == result["walks"]["p1"]
    text = scored.cli("show", str(scored.run / "step_1")).stdout
    assert "verification steps" in text
    assert "no prompt 'p99'" in fails(scored, "show", str(scored.run / "step_1"), "p99")


def test_inspect_says_what_it_is(scored: Setup) -> None:
    found = scored.json("inspect", str(scored.run / "step_1"))
    assert found["ready"] is True
    assert found["ref"]["step"] == 1
    assert found["drafter"]["block_size"] == 8
    assert found["drafter"]["sources"]["block_size"] == "config.json: block_size"
    assert "layers.N.self_attn.q_proj.weight" in scored.cli("inspect", str(scored.run / "step_1")).stdout


def test_probe_reports_this_machine(scored: Setup) -> None:
    found = scored.json("probe")
    (local,) = found["hosts"]
    assert local["status"] == "ok"
    assert local["ram_total_bytes"] > 0
    assert local["models"][0]["config"]["hidden_size"] == 64
    assert [stage["stage"] for stage in found["plan"]] == ["target", "drafter"]
    assert all(stage["fits"] for stage in found["plan"])
    assert "Plan" in scored.cli("probe").stdout
    assert scored.json("sql", "SELECT name, status FROM hosts") == [{"name": "local", "status": "ok"}]


def test_report_writes_one_page(scored: Setup) -> None:
    path = Path(scored.json("report", "--out", str(scored.folder / "page.html"))["report"])
    assert "<svg" in path.read_text()


def test_prepare_is_found_again_by_evaluate(tmp_path: Path, prefect_api: str) -> None:
    setup = make_setup(tmp_path / "s")
    config = setup.run / "step_1" / "config.json"
    setup.change_config(drafter={"config": str(shutil.copy(config, setup.folder / "draft.json"))})
    prepared = setup.json("prepare")
    assert prepared["hidden_states"]["layers"] == [1, 2, 4]
    (result,) = setup.json("evaluate", str(setup.run / "step_1"))
    assert result["cached"]["write_transcripts"]
    assert result["cached"]["extract_hidden_states"]
    assert not result["cached"]["run_drafter"]


@pytest.mark.usefixtures("prefect_api")
class TestBadInput:
    """One clear line, exit status 2, nothing lost."""

    @pytest.fixture
    def setup(self, tmp_path: Path) -> Setup:
        return make_setup(tmp_path / "s")

    def test_missing_path(self, setup: Setup) -> None:
        assert "step_404" in fails(setup, "evaluate", str(setup.run / "step_404"))

    def test_folder_without_a_checkpoint(self, setup: Setup) -> None:
        (setup.folder / "empty").mkdir()
        assert "empty" in fails(setup, "evaluate", str(setup.folder / "empty"))
        assert "empty" in fails(setup, "inspect", str(setup.folder / "empty"))

    def test_truncated_file(self, setup: Setup) -> None:
        path = setup.run / "step_1" / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-1])
        line = fails(setup, "evaluate", str(setup.run / "step_1"))
        assert "step_1" in line
        inspected = setup.json("inspect", str(setup.run / "step_1"))
        assert inspected["ready"] is False
        assert inspected["not_ready_reason"]

    def test_a_run_folder_that_does_not_exist(self, setup: Setup) -> None:
        assert "'" + str(setup.folder / "runs" / "b") in fails(
            setup, "watch", str(setup.folder / "runs" / "b"), "--once"
        )

    def test_key_that_does_not_exist(self, setup: Setup) -> None:
        setup.change_config(promts="x")
        line = fails(setup, "evaluate", str(setup.run / "step_1"))
        assert "'promts'" in line
        assert "'prompts'" in line

    def test_missing_config_file(self, setup: Setup) -> None:
        setup.config.unlink()
        assert "dflash.yaml" in fails(setup, "probe")

    def test_empty_prompt_file(self, setup: Setup) -> None:
        (setup.folder / "prompts.jsonl").write_text("\n")
        assert "prompts.jsonl" in fails(setup, "evaluate", str(setup.run / "step_1"))

    def test_prompt_longer_than_the_context(self, setup: Setup) -> None:
        line = json.dumps({"id": "endless", "prompt": "w20 " * 600})
        (setup.folder / "prompts.jsonl").write_text(line + "\n")
        message = fails(setup, "evaluate", str(setup.run / "step_1"))
        assert "'endless'" in message
        assert "512" in message

    def test_drafter_for_another_target(self, setup: Setup) -> None:
        config = setup.run / "step_1" / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"num_target_layers": 64}))
        assert "64" in fails(setup, "evaluate", str(setup.run / "step_1"))

    def test_no_target(self, setup: Setup) -> None:
        setup.change_config(target={})
        assert "target.model" in fails(setup, "evaluate", str(setup.run / "step_1"))

    def test_block_size_longer_than_trained(self, setup: Setup) -> None:
        assert "9" in fails(setup, "evaluate", str(setup.run / "step_1"), "--block-size", "9")

    def test_cuda_without_a_gpu(self, setup: Setup) -> None:
        import torch

        if torch.cuda.is_available():
            pytest.skip("this machine has a GPU")
        assert "cuda" in fails(setup, "evaluate", str(setup.run / "step_1"), "--device", "cuda")

    def test_no_results_yet(self, setup: Setup) -> None:
        for command in (["sql", "SELECT 1"], ["compare"], ["report"]):
            assert "acceptance.duckdb" in fails(setup, *command)

    def test_unknown_command_and_no_command(self, setup: Setup) -> None:
        assert setup.cli("evalate").returncode == 2
        assert setup.cli("evaluate").returncode == 2

    def test_json_holds_the_error(self, setup: Setup) -> None:
        done = setup.cli("inspect", "nowhere", "--json")
        assert done.returncode == 2
        assert json.loads(done.stdout)["exit_status"] == 2

    def test_debug_shows_where(self, setup: Setup) -> None:
        assert "Traceback" in setup.process("inspect", "nowhere", "--debug").stderr

    def test_unknown_host_key(self, setup: Setup) -> None:
        from tests.support.sftp_server import RecordingSFTPServer

        with RecordingSFTPServer(setup.folder / "runs") as server:
            empty = setup.folder / "known_hosts"
            empty.write_text("")
            host = server.host_settings.model_dump(mode="json") | {"known_hosts": str(empty)}
            setup.change_config(hosts={"training": host})
            for command in (["evaluate", server.url("a/step_1")], ["watch", server.url("a"), "--once"]):
                line = fails(setup, *command)
                assert "host key" in line
                assert "known_hosts" in line

    def test_a_password_in_an_address_is_refused_and_not_shown(self, setup: Setup) -> None:
        line = fails(setup, "evaluate", "ssh://me:secret@box/runs/a/step_1")
        assert "secret" not in line


def test_a_watch_over_ssh_scores_each_checkpoint_once_and_only_reads(tmp_path: Path, prefect_api: str) -> None:
    """The whole of watch + evaluate against a server that records every operation."""
    from tests.support.sftp_server import READ_ONLY_OPEN, RecordingSFTPServer

    setup = make_setup(tmp_path / "s", steps=(1, 2))
    with RecordingSFTPServer(setup.folder / "runs") as server:
        host: Any = server.host_settings.model_dump(mode="json")
        setup.change_config(hosts={"training": host})
        first = setup.json("watch", server.url("a"), "--once")
        scored_steps = [(result["run"], result["step"], result["status"]) for result in first]
        assert scored_steps == [("a", 1, "done"), ("a", 2, "done")]
        sent = server.bytes_sent
        again = setup.json("watch", server.url("a"), "--once")
        assert [result["evaluation_id"] for result in again] == [result["evaluation_id"] for result in first]
        assert all(result["cached"]["stream_checkpoint"] for result in again)
        assert server.bytes_sent - sent < first[0]["bytes_total"], "weights are not read again"
        reading = {"open", "read", "close", "stat", "lstat", "fstat", "scandir", "realpath", "statvfs"}
        assert {operation.name for operation in server.ops} <= reading
        assert {operation.flags for operation in server.ops if operation.name == "open"} == {READ_ONLY_OPEN}
        assert server.execs == []
        assert server.write_attempts == []
    rows = setup.json("sql", "SELECT count(*) AS n FROM evaluations")
    assert rows == [{"n": 2}]


def test_a_failed_checkpoint_does_not_stop_a_watch(tmp_path: Path, prefect_api: str) -> None:
    setup = make_setup(tmp_path / "s", steps=(1, 2, 3))
    config = setup.run / "step_2" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": 7}))
    half = setup.run / "step_3" / "model.safetensors"
    half.write_bytes(half.read_bytes()[:-10])
    done = setup.cli("watch", str(setup.run), "--once", "--json")
    assert done.returncode == 1
    results = json.loads(done.stdout)
    assert [(Path(result["checkpoint"]).name, result["status"]) for result in results] == [
        ("step_1", "done"),
        ("step_2", "failed"),
    ]
    assert "step_3" in done.stderr, "what is not ready is said"


def test_checkpoints_that_vanish_are_told_apart_from_failures(
    tmp_path: Path, prefect_api: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run rotates the checkpoint away after its index was read; what it left can be scored."""
    from flows import evaluate_checkpoint

    setup = make_setup(tmp_path / "s", steps=(1, 2))
    probe = evaluate_checkpoint.probe_hosts

    def rotate_and_probe(config: Any) -> Any:
        if (setup.run / "step_1").exists():
            (setup.run / "step_1").rename(setup.folder / "elsewhere")
        return probe(config)

    monkeypatch.setattr(evaluate_checkpoint, "probe_hosts", rotate_and_probe)
    watched = setup.cli("watch", str(setup.run), "--once", "--json")
    assert watched.returncode == 0, "a run that rotates its checkpoints has not failed"
    done, vanished = json.loads(watched.stdout)
    assert (Path(done["checkpoint"]).name, done["status"]) == ("step_2", "done")
    assert (Path(vanished["checkpoint"]).name, vanished["status"]) == ("step_1", "vanished")
    (told,) = [line for line in watched.stderr.splitlines() if "step_1" in line]
    assert " vanished step_1 " in told

    (setup.folder / "elsewhere").rename(setup.run / "step_1")
    evaluated = setup.cli("evaluate", str(setup.run / "step_1"), "--json")
    assert evaluated.returncode == 1
    (result,) = json.loads(evaluated.stdout)
    assert set(result) >= JSON_KEYS
    assert result["status"] == "vanished"
    rows = setup.json("sql", "SELECT step, status, error FROM evaluations JOIN checkpoints USING (checkpoint_id)")
    assert sorted((row["step"], row["status"]) for row in rows) == [(1, "vanished"), (2, "done")]
    assert result["error"] in [row["error"] for row in rows]


def test_the_config_of_the_readme_is_understood() -> None:
    from dflash_core.config import parse_config

    readme = (Path(__file__).parents[2] / "README.md").read_text()
    blocks = [block.split("```")[0] for block in readme.split("```yaml\n")[1:]]
    assert blocks
    for block in blocks:
        parse_config(yaml.safe_load(block), where="README.md")
