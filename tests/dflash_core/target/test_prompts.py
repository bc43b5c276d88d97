"""The prompt file: what is read, and the line that is wrong when something is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import polars
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dflash_core.errors import PromptError
from dflash_core.target.prompts import Prompt, load_prompts

ROOT = Path(__file__).parents[3]
GOOD = {"id": "a", "prompt": "hello"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "prompts.jsonl"


def write(path: Path, *lines: Any, ascii_only: bool = True) -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line, ensure_ascii=ascii_only) for line in lines]
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return path


def refusal(path: Path) -> str:
    with pytest.raises(PromptError) as refused:
        load_prompts(path)
    assert "\n" not in str(refused.value)
    return str(refused.value)


class TestReading:
    def test_every_key_is_read_in_file_order(self, path: Path) -> None:
        messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
        write(
            path,
            {"id": "b", "dataset": "math", "group": "held out", "prompt": "1+1"},
            {"id": "a", "messages": messages},
        )
        assert load_prompts(path) == [
            Prompt(id="b", dataset="math", group="held out", messages=(("user", "1+1"),)),
            Prompt(id="a", dataset="default", group=None, messages=(("system", "be brief"), ("user", "hi"))),
        ]

    @pytest.mark.parametrize("empty", [{}, {"id": None, "dataset": None, "group": None}], ids=["left out", "null"])
    def test_names_that_are_not_given_are_made_up_from_the_line(self, path: Path, empty: dict[str, Any]) -> None:
        write(path, "", {"prompt": "x"} | empty)
        assert load_prompts(path) == [Prompt(id="prompt-2", dataset="default", group=None, messages=(("user", "x"),))]

    def test_numbers_may_name_prompts(self, path: Path) -> None:
        write(path, {"id": 7, "dataset": 1, "prompt": "x"})
        assert (load_prompts(path)[0].id, load_prompts(path)[0].dataset) == ("7", "1")

    @example(text="line\u2028separator", ascii_only=False)
    @example(text="next\x85line", ascii_only=False)
    @given(text=st.text(st.characters(codec="utf-8"), min_size=1).filter(str.strip), ascii_only=st.booleans())
    def test_any_text_arrives_as_it_was_written(
        self, tmp_path_factory: pytest.TempPathFactory, text: str, ascii_only: bool
    ) -> None:
        path = write(tmp_path_factory.mktemp("p") / "p.jsonl", {"prompt": text}, GOOD, ascii_only=ascii_only)
        assert [prompt.messages[0][1] for prompt in load_prompts(path)] == [text, "hello"]

    def test_windows_line_ends_are_no_part_of_the_text(self, path: Path) -> None:
        path.write_bytes(b'{"prompt": "x"}\r\n{"prompt": "y"}\r\n')
        assert [prompt.messages[0][1] for prompt in load_prompts(path)] == ["x", "y"]


class TestConversations:
    def test_each_turn_is_a_row_that_follows_the_one_before(self, path: Path) -> None:
        write(path, {"id": "c", "dataset": "mt", "group": "g", "turns": ["a", "b", "c"]}, {"turns": ["d"]})
        same: dict[str, Any] = {"dataset": "mt", "group": "g"}
        assert load_prompts(path) == [
            Prompt(id="c#1", messages=(("user", "a"),), **same),
            Prompt(id="c#2", messages=(("user", "b"),), follows="c#1", **same),
            Prompt(id="c#3", messages=(("user", "c"),), follows="c#2", **same),
            Prompt(id="prompt-2#1", dataset="default", group=None, messages=(("user", "d"),)),
        ]

    def test_a_system_message_comes_before_the_first_turn_alone(self, path: Path) -> None:
        write(path, {"system": "be brief", "turns": ["a", "b"]}, {"system": "be kind", "prompt": "c"})
        assert [prompt.messages for prompt in load_prompts(path)] == [
            (("system", "be brief"), ("user", "a")),
            (("user", "b"),),
            (("system", "be kind"), ("user", "c")),
        ]

    def test_what_is_given_is_given_for_each_turn(self, path: Path) -> None:
        write(
            path,
            {"turns": ["a", "b"], "response": ["x", "y"], "prompt_ids": [[1], [2, 3]], "reference": ["r", None]},
            {"prompt": "c", "response_ids": [4, 5], "reference": "s"},
        )
        first, second, third = load_prompts(path)
        assert (first.response, first.prompt_ids, first.reference) == ("x", (1,), "r")
        assert (second.response, second.prompt_ids, second.reference) == ("y", (2, 3), None)
        assert (third.response, third.response_ids, third.reference) == (None, (4, 5), "s")

    def test_history_may_hold_answers(self, path: Path) -> None:
        pairs = (("user", "a"), ("assistant", "b"), ("user", "c"))
        write(path, {"messages": [{"role": role, "content": content} for role, content in pairs]})
        assert load_prompts(path)[0].messages == pairs

    def test_an_id_that_looks_like_a_turns_is_taken_once(self, path: Path) -> None:
        write(path, {"id": "c", "turns": ["a", "b"]}, {"id": "c#2", "prompt": "x"})
        message = refusal(path)
        assert "'c#2' occurs more than once" in message
        assert f"({path}:1, {path}:2)" in message

    def test_empty_values_are_left_out(self, path: Path) -> None:
        write(path, {"prompt": None, "turns": ["a"], "messages": None, "response": None, "system": None})
        assert load_prompts(path)[0].messages == (("user", "a"),)


class TestPlaces:
    ROWS: ClassVar[list[dict[str, Any]]] = [
        {"id": "a", "dataset": "math", "prompt": "1+1", "reference": "2"},
        {"id": "b", "turns": ["x", "y"], "response_ids": [[1], [2, 3]]},
        {"id": "c", "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]},
    ]

    def test_a_table_is_read_like_lines(self, path: Path, tmp_path: Path) -> None:
        write(path, *self.ROWS)
        table = tmp_path / "prompts.parquet"
        keys = {key for row in self.ROWS for key in row}
        rows = [{key: row.get(key) for key in sorted(keys)} | {"score": 0.5} for row in self.ROWS]
        polars.DataFrame(rows, infer_schema_length=None).write_parquet(table)
        assert load_prompts(table) == load_prompts(path)
        assert load_prompts(table)[0].where == f"{table}:1"

    def test_a_tables_row_is_named_when_it_is_wrong(self, tmp_path: Path) -> None:
        table = tmp_path / "prompts.parquet"
        polars.DataFrame({"prompt": ["x", " "]}).write_parquet(table)
        assert refusal(table).startswith(f"{table}:2: `prompt` must be a text")

    def test_a_table_that_is_none_is_named(self, tmp_path: Path) -> None:
        table = tmp_path / "prompts.parquet"
        table.write_bytes(b"PAR1 and no more")
        assert str(table) in refusal(table)

    @pytest.mark.parametrize("given", ["", "*.jsonl", "[ab].jsonl"])
    def test_a_folder_or_pattern_is_all_its_files_in_order(self, tmp_path: Path, given: str) -> None:
        write(tmp_path / "b.jsonl", {"prompt": "second"}, {"id": "x", "prompt": "third"})
        write(tmp_path / "a.jsonl", {"prompt": "first"})
        (tmp_path / "notes.txt").write_text("no prompt")
        prompts = load_prompts(str(tmp_path / given) if given else tmp_path)
        assert [(prompt.id, prompt.messages[0][1]) for prompt in prompts] == [
            ("a-1", "first"),
            ("b-1", "second"),
            ("x", "third"),
        ]

    @pytest.mark.parametrize("given", ["", "*.jsonl"])
    def test_a_folder_without_prompts_is_refused(self, tmp_path: Path, given: str) -> None:
        message = refusal(tmp_path / given if given else tmp_path)
        assert "holds no file that ends in .jsonl or .parquet" in message

    @pytest.mark.parametrize("name", ["prompts.parquet", "prompts.jsonl"])
    def test_without_a_network_the_hub_is_one_line(self, name: str) -> None:
        """In a process of its own: polars keeps its connections."""
        code = (
            "from dflash_core.errors import PromptError\n"
            "from dflash_core.target.prompts import load_prompts\n"
            f"try: load_prompts('hf://datasets/nobody/nothing/{name}')\n"
            "except PromptError as error: print(error)"
        )
        environment = os.environ | {"HTTPS_PROXY": "http://127.0.0.1:9", "PYTHONPATH": str(ROOT)}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
        assert done.stdout.count("\n") == 1, done.stderr
        assert f"'hf://datasets/nobody/nothing/{name}'" in done.stdout
        assert "copy it to a local file when off-line" in done.stdout


class TestRefusals:
    def test_a_missing_file_names_the_config_key(self, path: Path) -> None:
        assert "set `prompts` in the config" in refusal(path)

    @pytest.mark.parametrize("content", [b"", b"\n \n", b"\xff\xfe"], ids=["empty", "blank lines", "not text"])
    def test_a_file_without_prompts_is_refused(self, path: Path, content: bytes) -> None:
        path.write_bytes(content)
        assert str(path) in refusal(path)

    @pytest.mark.parametrize(
        ("line", "expected"),
        [
            ("{", "is not JSON"),
            ("hello", "is not JSON"),
            ("[1]", "must be a JSON object, found list"),
            ('"text"', "must be a JSON object, found str"),
            ({"id": "x"}, "needs exactly one of `prompt`, `turns` and `messages`"),
            ({"prompt": "x", "messages": []}, "needs exactly one of `prompt`, `turns` and `messages`"),
            ({"prompt": ""}, "`prompt` must be a text that is not empty"),
            ({"prompt": " \n"}, "`prompt` must be a text that is not empty"),
            ({"prompt": 5}, "`prompt` must be a text that is not empty"),
            ({"prompt": None}, "`prompt` must be a text that is not empty"),
            ({"messages": []}, "end with a message of the user"),
            ({"messages": [{"role": "assistant", "content": "x"}]}, "end with a message of the user"),
            ({"messages": [{"role": "user", "content": ["x"]}]}, "must be texts"),
            ({"messages": [{"role": "user"}]}, "must be a list of objects with role and content"),
            ({"messages": "hi"}, "must be a list of objects with role and content"),
            ({"messages": 5}, "must be a list of objects with role and content"),
            ({"prompt": "x", "promt": "y"}, "unknown keys ['promt']"),
            ({"prompt_ids": [1], "response_ids": [2]}, "needs exactly one of"),
            ({"turns": ["a"], "prompt": "x"}, "found ['prompt', 'turns']"),
            ({"turns": []}, "`turns` must be a list of the user's texts"),
            ({"turns": "a"}, "`turns` must be a list of the user's texts"),
            ({"turns": ["a", " "]}, "turn 2 of `turns` must be a text that is not empty"),
            ({"turns": ["a", 5]}, "turn 2 of `turns` must be a text that is not empty"),
            ({"turns": ["a", "b"], "response": "y"}, "`response` must be a list with one item for each of the 2 turns"),
            ({"turns": ["a", "b"], "response_ids": [[1]]}, "`response_ids` must be a list with one item"),
            ({"prompt": "x", "response": ""}, "`response` = '' must be a text that is not empty"),
            ({"prompt": "x", "response": ["y"]}, "`response` = ['y'] must be a text"),
            ({"prompt": "x", "reference": 4}, "`reference` = 4 must be a text"),
            ({"prompt": "x", "response": "y", "response_ids": [1]}, "one of them, for they could contradict"),
            ({"prompt": "x", "response_ids": []}, "`response_ids` must be a list of token ids"),
            ({"prompt": "x", "response_ids": [1, True]}, "`response_ids` must be a list of token ids"),
            ({"prompt": "x", "prompt_ids": [-1]}, "`prompt_ids` must be a list of token ids"),
            ({"prompt": "x", "prompt_ids": "1 2"}, "`prompt_ids` must be a list of token ids"),
            ({"messages": [{"role": "user", "content": "x"}], "system": "s"}, "make it the first of the messages"),
            ({"prompt": "x", "system": ""}, "`system` = '' must be a text"),
            ({"prompt": "x", "id": ["a"]}, "`id` = ['a'] must be a text or a number"),
            ({"prompt": "x", "id": ""}, "`id` = '' must be a text or a number"),
            ({"prompt": "x", "dataset": True}, "`dataset` = True must be a text or a number"),
            ({"prompt": "x", "group": {}}, "`group` = {} must be a text or a number"),
            ('{"prompt": "half of a \\ud83d"}', "holds half of a character ('\\ud83d')"),
        ],
        ids=lambda value: (value if isinstance(value, str) else json.dumps(value))[:40],
    )
    def test_a_malformed_line_is_named_by_its_number(self, path: Path, line: Any, expected: str) -> None:
        write(path, GOOD, "", line)
        message = refusal(path)
        assert message.startswith(f"{path}:3")
        assert expected in message

    @pytest.mark.parametrize(
        ("first", "second"),
        [({"id": "x"}, {"id": "x"}), ({"id": 1}, {"id": "1"}), ({"id": "prompt-2"}, {})],
        ids=["same", "number and text", "given and made up"],
    )
    def test_an_id_occurs_once(self, path: Path, first: dict[str, Any], second: dict[str, Any]) -> None:
        write(path, first | {"prompt": "a"}, second | {"prompt": "b"})
        assert "occurs more than once" in refusal(path)

    @pytest.mark.parametrize("key", ["dataset", "group"])
    def test_all_is_the_name_of_the_row_over_every_prompt(self, path: Path, key: str) -> None:
        write(path, GOOD | {key: "all"})
        assert "'all' names the row over every prompt" in refusal(path)

    def test_a_dataset_and_a_group_must_not_share_a_name(self, path: Path) -> None:
        write(path, {"id": "a", "dataset": "math", "prompt": "x"}, {"id": "b", "group": "math", "prompt": "y"})
        assert "'math' names a dataset and a group" in refusal(path)
