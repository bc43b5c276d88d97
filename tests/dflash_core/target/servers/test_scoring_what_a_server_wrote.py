"""What a server of the target wrote is scored as what the target itself wrote, turns of conversations among it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dflash_core import evaluation, stages
from dflash_core.config import Config, load_config
from dflash_core.store import Store
from dflash_core.target import transcripts as written
from dflash_core.target.rendering import load_tokenizer
from tests.support.completion_server import Behaviour, CompletionServer
from tests.support.direct import Evaluated, evaluate_directly
from tests.support.scene import Setup, make_setup

CONVERSATION = {"id": "talk", "dataset": "talks", "turns": ["w20 w21 w22", "w23", "w24 w25"]}


def configured(setup: Setup, store: Path, **completions: Any) -> Config:
    config = load_config(setup.config)
    data = config.completions.model_copy(update=completions)
    return config.model_copy(update={"completions": data, "store": str(store)})


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    setup = make_setup(tmp_path_factory.mktemp("scored") / "s")
    with (setup.folder / "prompts.jsonl").open("a") as file:
        file.write(json.dumps(CONVERSATION) + "\n")
    return setup


@pytest.fixture(scope="module")
def local(setup: Setup) -> Evaluated:
    return evaluate_directly(configured(setup, setup.folder / "store"), setup.run / "step_1")


def transcripts_of(config: Config) -> list[written.Transcript]:
    return stages.read_transcripts(config, stages.plan_target(config))


def test_each_turn_is_a_prompt_with_a_walk_of_its_own(setup: Setup, local: Evaluated) -> None:
    rows = {prompt.prompt_id: prompt for prompt in local.record.prompts}
    assert [name for name in rows if name.startswith("talk")] == ["talk#1", "talk#2", "talk#3"]
    assert [rows[f"talk#{number}"].prompt_text for number in (1, 2, 3)] == CONVERSATION["turns"]
    assert {rows[f"talk#{number}"].dataset for number in (1, 2, 3)} == {"talks"}
    lengths = [rows[f"talk#{number}"].num_prompt_tokens for number in (1, 2, 3)]
    assert lengths == sorted(set(lengths)), "later turns hold the earlier ones"
    walks = local.walks()
    for name, row in rows.items():
        assert sum(walks[name]) == row.num_response_tokens - 1, "the first token is the target's own"


@pytest.mark.parametrize("api", ["sglang", "vllm"])
def test_a_servers_words_score_as_the_targets_own(setup: Setup, local: Evaluated, tmp_path: Path, api: str) -> None:
    mine = transcripts_of(configured(setup, setup.folder / "store"))
    said = {t.prompt_ids: (list(t.response_ids), t.stop_reason) for t in mine}

    def continue_ids(prompt: Sequence[int]) -> tuple[list[int], str]:
        return said[tuple(prompt)]

    behaviour = Behaviour(api=api, continue_ids=continue_ids, tokenizer=load_tokenizer(_target(setup)))
    with CompletionServer(behaviour).running() as server:
        config = configured(setup, tmp_path / "store", source="server", base_url=server.url)
        served = evaluate_directly(config, setup.run / "step_1")
    assert transcripts_of(config) == mine
    assert served.walks() == local.walks()
    assert served.spec == local.spec
    assert served.record.evaluation_id == local.record.evaluation_id, "the same numbers under the same conditions"
    artifact = Store(config.store).find(written.KIND, stages.plan_target(config).transcripts_key)
    assert artifact is not None
    assert artifact.meta["server"]["api"] == api


def test_given_answers_score_as_the_targets_own_and_say_that_they_were_given(
    setup: Setup, local: Evaluated, tmp_path: Path
) -> None:
    mine = {t.id: t for t in transcripts_of(configured(setup, setup.folder / "store"))}
    lines = [json.loads(line) for line in (setup.folder / "prompts.jsonl").read_text().splitlines()]
    for line in lines:
        if "turns" in line:
            line["response_ids"] = [list(mine[f"{line['id']}#{number}"].response_ids) for number in (1, 2, 3)]
        else:
            line["response_ids"] = list(mine[line["id"]].response_ids)
    path = tmp_path / "given.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    config = configured(setup, tmp_path / "store", source="file").model_copy(update={"prompts": str(path)})
    given = evaluate_directly(config, setup.run / "step_1")
    assert given.walks() == local.walks()
    assert given.spec["sampling"] == "given"
    assert given.record.evaluation_id != local.record.evaluation_id


def test_a_set_that_was_written_is_known_without_the_server(setup: Setup, local: Evaluated, tmp_path: Path) -> None:
    config = configured(setup, tmp_path / "store", source="server", base_url="http://127.0.0.1:1")
    inspection = evaluation.inspect(str(setup.run / "step_1"), config)
    assert evaluation.known_evaluation_id(config, inspection) is None, "nothing is asked to find out"


def _target(setup: Setup) -> Any:
    return stages.plan_target(load_config(setup.config)).target
