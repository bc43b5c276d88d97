"""`dflash-eval store`: what is shown, what is asked, what goes, and how the command ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from dflash_core.errors import InputError
from dflash_core.results.database import write_evaluation
from dflash_core.store import MANIFEST_NAME, Store
from flows.storing import parse_bytes, parse_seconds
from tests.support import scene
from tests.support.direct import evaluate_directly

ROOT = Path(__file__).parents[2]


def writer(size_bytes: int, **meta: Any) -> Callable[[Path], dict[str, Any]]:
    def write(folder: Path) -> dict[str, Any]:
        (folder / "a.bin").write_bytes(b"a" * size_bytes)
        return meta

    return write


@dataclass(frozen=True)
class Place:
    """A store with a configuration that names it."""

    store: Store
    setup: scene.Setup

    def keys(self) -> set[str]:
        """Return the keys of what the store holds."""
        return {one["key"] for one in self.setup.json("store", "list")["artifacts"]}


@pytest.fixture
def place(tmp_path: Path) -> Place:
    config = tmp_path / "dflash.yaml"
    config.write_text(yaml.safe_dump({"store": str(tmp_path / "store"), "results": str(tmp_path / "r.duckdb")}))
    store = Store(tmp_path / "store")
    store.build("transcripts", "t", writer(1000, digest="d1", target="smol", num_transcripts=2))
    store.build("drafter", "d", writer(5000, checkpoint="/runs/a/step_1", bytes_read=6000, seconds=90))
    store.build("blocks", "b", writer(3000, num_blocks=7, target="smol", transcripts="d1", seconds=30))
    then = time.time() - 40 * 86400
    os.utime(store.folder("drafter", "d") / MANIFEST_NAME, (then, then))
    return Place(store, scene.Setup(tmp_path, config, tmp_path / "runs" / "a"))


class TestListing:
    def test_a_person_sees_what_belongs_to_what_and_totals(self, place: Place) -> None:
        done = place.setup.cli("store", "list")
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        (drafter,) = [line for line in lines if "/runs/a/step_1" in line]
        assert "40 d ago" in drafter
        assert "90 s" in drafter
        assert any("2 transcripts, smol" in line for line in lines)
        assert any("7 blocks, smol, transcripts d1" in line for line in lines)
        assert any(line.split()[1:4:2] == ["all", "3"] for line in lines)

    def test_a_program_gets_every_number(self, place: Place) -> None:
        listing = place.setup.json("store", "list")
        assert listing["store"] == str(place.store.root)
        drafter = next(one for one in listing["artifacts"] if one["key"] == "d")
        assert drafter["kind"] == "drafter"
        assert drafter["checkpoint"] == {"run": None, "step": None, "url": "/runs/a/step_1"}
        assert (drafter["seconds"], drafter["bytes_read"], drafter["is_damaged"]) == (90, 6000, False)
        assert drafter["size_bytes"] > 5000
        assert 39 * 86400 < drafter["age_s"] < 41 * 86400
        assert listing["size_bytes"] == sum(one["size_bytes"] for one in listing["artifacts"])
        assert {kind: total["number"] for kind, total in listing["kinds"].items()} == {
            "transcripts": 1,
            "drafter": 1,
            "blocks": 1,
        }

    def test_an_empty_store_is_said_to_be_empty(self, place: Place, tmp_path: Path) -> None:
        place.setup.change_config(store=str(tmp_path / "none"))
        done = place.setup.cli("store", "list")
        assert (done.returncode, done.stdout) == (0, f"{tmp_path / 'none'} holds nothing\n")
        assert not (tmp_path / "none").exists()

    def test_checkpoints_go_by_the_names_that_the_results_have(self, tmp_path: Path) -> None:
        setup = scene.make_setup(tmp_path)
        from dflash_core.config import load_config

        config = load_config(setup.config)
        write_evaluation(config.results, evaluate_directly(config, setup.run / "step_1").record)
        listing = setup.json("store", "list")
        names = {one["kind"]: one["checkpoint"] for one in listing["artifacts"] if one["checkpoint"]}
        assert {kind: (name["run"], name["step"]) for kind, name in names.items()} == {
            "drafter": ("a", 1),
            "blocks": ("a", 1),
        }
        # Whatever of it is removed, evaluating again makes it again with the same numbers.
        before = evaluate_directly(config, setup.run / "step_1")
        done = setup.cli("store", "prune", "--run", "a", "--yes")
        assert done.returncode == 0, done.stderr
        again = evaluate_directly(config, setup.run / "step_1")
        assert sorted(again.built) == ["blocks", "drafter"]
        assert again.walks() == before.walks()


class TestPruning:
    def test_it_shows_what_would_go_and_what_making_it_again_costs(self, place: Place) -> None:
        done = place.setup.cli("store", "prune", "--kind", "drafter", "--kind", "blocks", "--dry-run")
        assert done.returncode == 0, done.stderr
        assert "/runs/a/step_1" in done.stdout
        assert "to make it again costs 2 min of work and 6.0 kB to be read from the checkpoints' hosts" in done.stdout
        assert place.keys() == {"t", "d", "b"}

    @pytest.mark.parametrize(
        ("arguments", "left"),
        [
            (["--older-than", "30d"], {"t", "b"}),
            (["--older-than", "50d"], {"t", "d", "b"}),
            (["--kind", "blocks"], {"t", "d"}),
            (["--target", "smol"], {"d"}),
            (["--checkpoint", "step_1"], {"t", "b"}),
            (["--keep-bytes", "6kB"], {"t", "b"}),
            (["--keep-bytes", "0"], set()),
            ([], {"t", "d", "b"}),
        ],
        ids=" ".join,
    )
    def test_what_is_selected_goes(self, place: Place, arguments: list[str], left: set[str]) -> None:
        done = place.setup.cli("store", "prune", "--yes", *arguments)
        assert done.returncode == 0, done.stderr
        assert place.keys() == left

    def test_a_program_gets_what_went_and_what_did_not(self, place: Place) -> None:
        artifact = place.store.find("blocks", "b")
        assert artifact is not None
        with place.store.reading(artifact):
            pruned = place.setup.json("store", "prune", "--kind", "blocks", "--kind", "drafter", "--yes")
        assert [one["key"] for one in pruned["removed"]] == ["d"]
        assert [one["key"] for one in pruned["in_use"]] == ["b"]
        assert pruned["recompute"] == {"seconds": 120.0, "num_without_seconds": 0, "bytes_to_read": 6000}
        assert len(pruned["to_remove"]) == 2

    def test_a_kind_that_is_not_there_is_told(self, place: Place) -> None:
        done = place.setup.cli("store", "prune", "--kind", "block", "--yes")
        assert done.returncode == 0
        assert "nothing to remove; there is no block here, but blocks, drafter, transcripts" in done.stdout

    def test_where_something_cannot_be_removed_it_ends_with_1_and_says_why(
        self, place: Place, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(path: Path, to: Path) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(Path, "rename", fail)
        done = place.setup.cli("store", "prune", "--kind", "blocks", "--yes")
        assert done.returncode == 1
        assert done.stderr.strip().endswith("could not be removed: Permission denied")

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--older-than", "30"], "is no span of time"),
            (["--older-than", "-1d"], "is no span of time"),
            (["--keep-bytes", "much"], "is no size"),
            (["--keep-bytes", "5XB"], "is no size"),
        ],
        ids=" ".join,
    )
    def test_a_selection_that_cannot_be_read_removes_nothing(
        self, place: Place, arguments: list[str], message: str
    ) -> None:
        done = place.setup.cli("store", "prune", "--yes", *[" ".join(arguments).replace(" ", "=", 1)])
        assert done.returncode == 2
        assert message in done.stderr
        assert len(done.stderr.splitlines()) == 1
        assert place.keys() == {"t", "d", "b"}


class TestAsking:
    def test_where_nobody_can_answer_nothing_goes(self, place: Place) -> None:
        done = place.setup.process("store", "prune", "--kind", "blocks")
        assert done.returncode == 2
        assert "nobody is there to confirm; add --yes" in done.stderr
        assert place.keys() == {"t", "d", "b"}

    def test_a_program_must_say_yes_itself(self, place: Place) -> None:
        done = place.setup.cli("store", "prune", "--kind", "blocks", "--json")
        assert done.returncode == 2
        assert json.loads(done.stdout)["exit_status"] == 2

    @pytest.mark.parametrize(("answer", "left"), [("y", {"t", "d"}), ("n", {"t", "d", "b"}), ("", {"t", "d", "b"})])
    def test_at_a_terminal_a_person_is_asked(self, place: Place, answer: str, left: set[str]) -> None:
        terminal, its_end = os.openpty()
        os.write(terminal, f"{answer}\n".encode())
        command = [sys.executable, "-m", "flows.cli", "store", "prune", "--kind", "blocks"]
        done = subprocess.run(
            [*command, "--config", str(place.setup.config)],
            stdin=its_end,
            capture_output=True,
            text=True,
            timeout=60,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        os.close(terminal)
        os.close(its_end)
        assert done.returncode == 0, done.stderr
        assert "Remove 1 and free 3." in done.stdout
        assert ("nothing was removed" in done.stdout) == (answer != "y")
        assert place.keys() == left


@pytest.mark.parametrize(
    ("text", "seconds"), [("45s", 45), ("3m", 180), ("1.5h", 5400), ("30d", 2592000), (" 2 w ", 1209600)]
)
def test_spans_of_time_are_read(text: str, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("12", 12), ("5B", 5), ("50GB", 50 * 10**9), ("50 gb", 50 * 10**9), ("2GiB", 2 << 30), ("1.5kB", 1500)],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "d", "30", "1y", "-3d", "3 d d"])
def test_what_is_no_span_of_time_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="is no span of time"):
        parse_seconds(text)
