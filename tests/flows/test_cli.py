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
    assert table["verdict"] is None
    assert "conditions: those of the config" in table["notes"]
    assert scored.cli("compare", "--fail-below", "1").returncode == 0
    assert "--baseline" in fails(scored, "compare", "--fail-below", "0")
    missed = scored.cli("compare", "--fail-below", "7.5")
    assert missed.returncode == 1
    assert "7.5" in missed.stdout
    assert "step 9" in fails(scored, "compare", "9") or "'9'" in fails(scored, "compare", "9")


def test_the_gate_of_compare_takes_negative_limits_and_per_cent(scored: Setup) -> None:
    for limit in ("-0.05", "-2%"):
        judged = scored.json("compare", "2", "--baseline", "1", "--fail-below", limit)
        assert judged["verdict"] == judged["gate"]["verdict"]
        assert judged["verdict"] in ("worse", "not worse", "cannot tell")
    assert "-2 %" in scored.cli("compare", "2", "--baseline", "1", "--fail-below", "-2%").stdout
    assert "'lots'" in fails(scored, "compare", "2", "--baseline", "1", "--fail-below", "lots")
    assert "--detect" in fails(scored, "compare", "--detect", "-1")


def test_compare_shows_both_means_slices_and_conditions(scored: Setup) -> None:
    text = scored.cli("compare", "--by", "dataset").stdout
    for words in (
        "tau pooled",
        "tau prompt mean",
        "By dataset",
        "odd",
        "even",
        "row alignment",
        "conditions: those of",
    ):
        assert words in text
    assert "a:2" in [row["label"] for row in scored.json("compare", "best", "latest")["rows"]]
    by_dataset = scored.json("compare", "--by", "dataset")["slices"]
    assert [(row["name"], row["label"]) for row in by_dataset] == [
        (name, label) for name in ("even", "odd") for label in ("a:1", "a:2")
    ]
    assert by_dataset[0]["tau"]["num_prompts"] == 2
    assert scored.cli("compare", "--block-size", "8").returncode == 0
    assert "there is: 8" in fails(scored, "compare", "--block-size", "3")


def test_compare_takes_the_conditions_of_the_config_and_says_where_nothing_has_them(scored: Setup) -> None:
    kept = scored.config.read_text()
    try:
        scored.change_config(target={"model": str(scored.folder / "gone")})
        assert any("of the newest evaluation" in note for note in scored.json("compare")["notes"])
        scored.config.write_text(kept)
        scored.change_config(drafter={"block_size": 4})
        assert "block size 4" in fails(scored, "compare")
    finally:
        scored.config.write_text(kept)


def test_sql_reads_and_cannot_write(scored: Setup) -> None:
    assert scored.json("sql", "SELECT 1e0 / 0 AS x") == [{"x": None}]
    rows = scored.json("sql", "SELECT run, step FROM leaderboard ORDER BY step")
    assert rows == [{"run": "a", "step": 1}, {"run": "a", "step": 2}]
    before = scored.results.read_bytes()
    fails(scored, "sql", "DELETE FROM blocks")
    fails(scored, "sql", "SELECT nothing FROM nowhere")
    assert scored.results.read_bytes() == before


def test_sql_shows_what_is_too_wide_record_by_record_and_what_is_too_long_in_part(scored: Setup) -> None:
    narrow = scored.cli("sql", "SELECT run, step FROM leaderboard ORDER BY step").stdout
    assert "┃ run ┃ step ┃" in narrow
    wide = scored.cli("sql", "FROM leaderboard").stdout
    assert "row 2" in wide
    assert all(line.split()[:1] != ["│"] for line in wide.splitlines())
    long = scored.cli("sql", "SELECT * FROM range(500) AS numbers(n)", "--limit", "3")
    assert "3 of 500 rows" in long.stderr
    assert len(long.stdout.splitlines()) < 12
    assert len(scored.json("sql", "SELECT * FROM range(500) AS numbers(n)", "--limit", "3")) == 500
    assert "--limit" in fails(scored, "sql", "SELECT 1 AS n", "--limit", "-1")


def test_sql_exports_all_rows_as_csv_and_parquet(scored: Setup) -> None:
    import csv
    import io

    import polars

    done = scored.cli("sql", "SELECT run, step, NULL AS nothing FROM leaderboard ORDER BY step", "--csv")
    assert list(csv.reader(io.StringIO(done.stdout))) == [["run", "step", "nothing"], ["a", "1", ""], ["a", "2", ""]]
    path = scored.folder / "rows.parquet"
    written = scored.cli("sql", "FROM blocks", "--parquet", str(path))
    assert written.stdout == ""
    assert "rows written to" in written.stderr
    (number,) = scored.json("sql", "SELECT count(*) AS n FROM blocks")
    assert polars.read_parquet(path).height == number["n"]
    assert "no/where" in fails(scored, "sql", "SELECT 1 AS n", "--parquet", "no/where/x.parquet")


def test_show_draws_the_same_walk_as_the_evaluation(scored: Setup) -> None:
    shown = scored.json("show", str(scored.run / "step_1"), "p1")
    (result,) = scored.json("evaluate", str(scored.run / "step_1"), "--blocks")
    drawn = [len(block["accepted"]) + (block["bonus"] is not None) for block in shown["blocks"]]
    assert drawn == result["walks"]["p1"]
    text = scored.cli("show", str(scored.run / "step_1")).stdout
    assert "verification steps" in text
    assert "no prompt 'p99'" in fails(scored, "show", str(scored.run / "step_1"), "p99")


def test_show_knows_the_names_of_the_results_and_has_the_ranks_that_were_stored(scored: Setup) -> None:
    by_name = scored.json("show", "1", "p1")
    assert by_name["blocks"] == scored.json("show", str(scored.run / "step_1"), "p1")["blocks"]
    assert "no evaluation matches 'nobody'" in fails(scored, "show", "nobody")
    stored = scored.json(
        "sql",
        "SELECT anchor_index, miss_rank FROM blocks JOIN evaluations USING (evaluation_id) "
        "JOIN checkpoints USING (checkpoint_id) WHERE step = 1 AND prompt_id = 'p1' AND is_on_walk ORDER BY 1",
    )
    ranks = [(block["anchor_index"], block["odds"]["miss_rank"]) for block in by_name["blocks"]]
    assert ranks == [(row["anchor_index"], row["miss_rank"]) for row in stored]
    for block in by_name["blocks"]:
        chances = block["odds"]["probabilities"]
        assert len(chances) == len(block["accepted"]) + len(block["rejected"])
        assert all(0 < chance <= 1 for chance in chances)
        if block["odds"]["miss_rank"] is not None:
            assert block["odds"]["miss_probability"] <= chances[len(block["accepted"])]
    text = scored.cli("show", "1", "p1", "--probabilities").stdout
    assert f"rank {stored[0]['miss_rank']}" in text
    assert "rank" not in scored.cli("show", "1", "p1").stdout


def test_show_puts_two_checkpoints_side_by_side(scored: Setup) -> None:
    both = scored.json("show", "1", "--against", "2", "p1")
    assert both["prompt_id"] == "p1"
    assert both["blocks"] == scored.json("show", "1", "p1")["blocks"]
    assert both["against"]["blocks"] == scored.json("show", "2", "p1")["blocks"]
    text = scored.cli("show", "1", "--against", "2", "p1").stdout
    assert "A: 1; B: 2" in text
    assert text.count("the target's answer") == 1
    assert "anchors are on both walks" in text
    assert scored.cli("show", "1", "p1", "extra").returncode == 2


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
    assert "plotly" in path.read_text()


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
