"""A box that runs the target and a box that runs the drafter, joined by a store over SSH and by nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dflash_core import stages
from dflash_core.config import Config, load_config
from dflash_core.store import file_sha256
from dflash_core.store_opening import close_connections, store_of
from dflash_core.target import hidden_states as hidden
from dflash_core.target import runtime
from examples.training_box import find_sshd
from tests.support.direct import evaluate_directly
from tests.support.scene import Setup, make_setup
from tests.support.store_server import StoreBox

ROOT = Path(__file__).parents[2]
LAYERS = (1, 2, 4)

pytestmark = pytest.mark.skipif(find_sshd() is None, reason="sshd is not installed")


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreBox]:
    folder = tmp_path_factory.mktemp("box")
    (folder / "served").mkdir()
    with StoreBox(folder / "served", folder / "state") as running:
        yield running
        close_connections()


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory, box: StoreBox) -> Setup:
    made = make_setup(tmp_path_factory.mktemp("boxes") / "s")
    hosts = {name: host.model_dump() for name, host in box.hosts.items()}
    made.change_config(store=box.url("store"), store_mirror="~/.cache/dflash-eval/mirror", hosts=hosts)
    return made


def run_box(setup: Setup, home: Path, *arguments: str) -> dict[str, Any]:
    home.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.box_worker", str(setup.config), *arguments],
        cwd=ROOT,
        env=os.environ | {"HOME": str(home), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


def with_mirror(config: Config, mirror: Path) -> Config:
    return config.model_copy(update={"store_mirror": str(mirror)})


def digests_of_states(config: Config) -> dict[str, str]:
    """Return the digest of every stored part that a drafter of these layers needs."""
    plan = stages.plan_target(config)
    transcripts = store_of(config).find("transcripts", plan.transcripts_key)
    assert transcripts is not None
    states = stages.find_states(config, plan, transcripts.meta["digest"], LAYERS)
    assert states is not None
    artifacts = [states.final, states.choices, *states.layers.values()]
    return {path.name: file_sha256(path) for one in artifacts for path in one.path.glob("*.safetensors")}


def test_one_box_prepares_and_the_other_scores_without_ever_running_the_target(
    setup: Setup, box: StoreBox, tmp_path: Path
) -> None:
    everything = json.dumps([*LAYERS, 0, 3])
    prepared = run_box(setup, tmp_path / "cpu", "prepare", everything)
    assert prepared["built"] == {"transcripts": True, "hidden_states": True}
    assert prepared["passes"] > 0

    checkpoint = str(setup.run / "step_1")
    scored = run_box(setup, tmp_path / "gpu", "evaluate", checkpoint)
    assert scored["passes"] == 0, "the target ran on the box of the drafter"
    assert scored["built"] == {"drafter": True, "transcripts": False, "hidden_states": False, "blocks": True}

    shared = load_config(setup.config)
    of_box = {name: with_mirror(shared, tmp_path / name / ".cache/dflash-eval/mirror") for name in ("cpu", "gpu")}
    alone = shared.model_copy(update={"store": str(tmp_path / "alone"), "hosts": {}})
    evaluated = evaluate_directly(alone, checkpoint)
    assert digests_of_states(of_box["gpu"]) == digests_of_states(of_box["cpu"]) == digests_of_states(alone)
    assert scored["walks"] == evaluated.walks()

    mirrored = {path.name for path in store_of(of_box["gpu"]).root.glob(f"{hidden.KIND}/*/*.safetensors")}
    wanted = {f"layer_{layer:04d}.safetensors" for layer in LAYERS} | {"final.safetensors", "choices.safetensors"}
    assert mirrored == wanted, "only the layers that are asked for"
    assert len(list((box.root / "store" / hidden.KIND).glob("*/*.safetensors"))) == len(wanted) + 2

    passes = runtime.num_forward_passes
    third = evaluate_directly(with_mirror(shared, tmp_path / "third"), checkpoint)
    assert third.built == [], "a third box finds even the scored blocks"
    assert (runtime.num_forward_passes, third.walks()) == (passes, scored["walks"])


def test_a_damaged_layer_is_computed_again_and_replaced_for_everybody(
    setup: Setup, box: StoreBox, tmp_path: Path
) -> None:
    checkpoint, shared = str(setup.run / "step_1"), load_config(setup.config)
    first = evaluate_directly(with_mirror(shared, tmp_path / "first"), checkpoint)
    (path,) = (box.root / "store" / hidden.KIND).glob("*/layer_0002.safetensors")
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    for blocks in (box.root / "store" / "blocks").iterdir():
        (blocks / "manifest.json").unlink()

    repaired = evaluate_directly(with_mirror(shared, tmp_path / "second"), checkpoint)
    assert repaired.built == ["hidden_states", "blocks"]
    assert path.read_bytes() == whole
    passes = runtime.num_forward_passes
    third = evaluate_directly(with_mirror(shared, tmp_path / "third"), checkpoint)
    assert (third.built, runtime.num_forward_passes) == ([], passes)
    assert first.walks() == repaired.walks() == third.walks()
