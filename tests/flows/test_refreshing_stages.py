"""`--refresh STAGE`: what is stored is made again, and all that is made from it, by command and by parameter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars
import pytest
from prefect.exceptions import ParameterTypeError

from dflash_core.store import MANIFEST_NAME, Store
from dflash_core.target import runtime
from tests.support.scene import Setup, make_setup

STAGE_OF = {
    "transcripts": "write_transcripts",
    "hidden_states": "extract_hidden_states",
    "drafter": "stream_checkpoint",
    "blocks": "run_drafter",
}
pytestmark = pytest.mark.usefixtures("prefect_api")


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory, prefect_api: str) -> Setup:
    made = make_setup(tmp_path_factory.mktemp("refreshing") / "s", steps=(1, 2))
    evaluate(made)
    return made


def evaluate(setup: Setup, **options: Any) -> dict[str, Any]:
    from flows.evaluate_checkpoint import evaluate_checkpoint

    return evaluate_checkpoint(str(setup.run / "step_1"), str(setup.config), **options)


def publications(setup: Setup) -> dict[str, set[int]]:
    """Return the inode of every manifest, by kind: a new publication has a new one."""
    root = setup.folder / "store"
    return {kind: {path.stat().st_ino for path in root.glob(f"{kind}/*/{MANIFEST_NAME}")} for kind in STAGE_OF}


@pytest.mark.parametrize(
    ("stage", "made_again"),
    [
        ("transcripts", {"transcripts", "hidden_states", "blocks"}),
        ("hidden_states", {"hidden_states", "blocks"}),
        ("drafter", {"drafter", "blocks"}),
        ("blocks", {"blocks"}),
        ("results", set()),
    ],
)
def test_a_stage_and_what_is_made_from_it_are_made_again(setup: Setup, stage: str, made_again: set[str]) -> None:
    known, before, passes = evaluate(setup), publications(setup), runtime.num_forward_passes
    again = evaluate(setup, refresh=[stage])
    assert {kind for kind, name in STAGE_OF.items() if not again["cached"][name]} == made_again
    assert {kind for kind, found in publications(setup).items() if found != before[kind]} == made_again
    assert (runtime.num_forward_passes > passes) == ("hidden_states" in made_again)
    assert again["datasets"] == known["datasets"]
    assert again["evaluation_id"] == known["evaluation_id"]
    assert again["warnings"] == known["warnings"] == [], "it came out as it was"
    after = publications(setup)
    assert evaluate(setup, refresh=["results"])["cached"] == dict.fromkeys(again["cached"], True)
    assert publications(setup) == after


def test_what_comes_out_otherwise_is_told(setup: Setup) -> None:
    """The store holds, under the right key, something that this machine does not compute."""
    known, store = evaluate(setup), Store(setup.folder / "store")
    for folder in (store.root / "blocks").iterdir():
        found = store.find("blocks", folder.name)
        if found is None or found.meta["weights_sha256"] != spec_of(setup, known)["weights_sha256"]:
            continue
        frame, meta = polars.read_parquet(found.file("blocks.parquet")), found.meta
        (folder / MANIFEST_NAME).unlink()

        def write(folder: Path, frame: polars.DataFrame = frame, meta: Any = meta) -> Any:
            frame.with_columns(polars.col("num_available") + 1).write_parquet(folder / "blocks.parquet")
            return meta

        store.build("blocks", folder.name, write)
    again = evaluate(setup, refresh=["blocks"])
    assert len(again["warnings"]) == 1
    assert "was made again and came out otherwise (blocks.parquet)" in again["warnings"][0]
    assert evaluate(setup, refresh=["blocks"])["warnings"] == []


def spec_of(setup: Setup, result: dict[str, Any]) -> dict[str, Any]:
    (row,) = setup.json("sql", f"SELECT spec FROM evaluations WHERE evaluation_id = '{result['evaluation_id']}'")
    spec: dict[str, Any] = json.loads(row["spec"])
    return spec


class TestCommand:
    def test_a_known_checkpoint_is_scored_again(self, setup: Setup) -> None:
        checkpoint = str(setup.run / "step_1")
        (known,) = setup.json("evaluate", checkpoint)
        assert known["cached"]["run_drafter"]
        (again,) = setup.json("evaluate", checkpoint, "--refresh", "blocks")
        assert not again["cached"]["run_drafter"]
        assert again["cached"]["stream_checkpoint"]
        assert again["datasets"] == known["datasets"]

    def test_the_target_runs_once_for_all_checkpoints(self, setup: Setup) -> None:
        setup.json("evaluate", str(setup.run / "step_2"))
        begin = runtime.num_forward_passes
        setup.json("evaluate", str(setup.run / "step_1"), "--refresh", "transcripts")
        once = runtime.num_forward_passes - begin
        begin = runtime.num_forward_passes
        both = setup.json("evaluate", str(setup.run / "step_1"), str(setup.run / "step_2"), "--refresh", "transcripts")
        assert runtime.num_forward_passes - begin == once > 0
        assert [result["cached"]["run_drafter"] for result in both] == [False, False]

    def test_the_target_is_prepared_again(self, setup: Setup) -> None:
        # Of no layers: what the configuration does not name is not asked for.
        setup.json("prepare")
        passes, before = runtime.num_forward_passes, publications(setup)
        setup.json("prepare")
        assert (runtime.num_forward_passes, publications(setup)) == (passes, before)
        assert setup.json("prepare", "--refresh", "hidden_states")["warnings"] == []
        after = publications(setup)
        assert {kind for kind, found in after.items() if found != before[kind]} == {"hidden_states"}
        assert runtime.num_forward_passes > passes

    @pytest.mark.parametrize("command", [["evaluate", "anything"], ["prepare"]], ids=" ".join)
    def test_an_unknown_stage_is_refused_with_those_that_exist(self, setup: Setup, command: list[str]) -> None:
        done = setup.cli(*command, "--refresh", "block")
        assert done.returncode == 2
        assert "'block' is no stage; expected all, or some of transcripts, hidden_states" in done.stderr


def test_the_flow_refuses_an_unknown_stage(setup: Setup) -> None:
    with pytest.raises(ParameterTypeError, match="refresh"):
        evaluate(setup, refresh=["block"])
