"""The prompt file: what is read, and the line that is wrong when something is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dflash_core.errors import PromptError
from dflash_core.target.prompts import Prompt, load_prompts

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
            ({"id": "x"}, "needs exactly one of `prompt` and `messages`"),
            ({"prompt": "x", "messages": []}, "needs exactly one of `prompt` and `messages`"),
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
            ({"turns": ["a", "b"]}, "not supported yet"),
            ({"prompt": "x", "response": "y"}, "not supported yet"),
            ({"prompt_ids": [1], "response_ids": [2]}, "not supported yet"),
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
