"""The prompts: what the keys of a line mean, checked before anything costly starts.

    {"id": "a", "prompt": "1+1"}                                      one row,  a
    {"id": "b", "turns": ["1+1", "and twice that?"]}                  two rows, b#1 and b#2
    {"id": "c", "messages": [{"role": "system", "content": "..."},    one row,  c
                             {"role": "user", "content": "..."}]}

Each row is continued, scored and counted on its own: a conversation of two turns weighs like two prompts.
A later turn follows the one before: its prompt holds that turn's prompt and the target's own answer to it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_core.errors import PromptError
from dflash_core.target.prompt_files import Row, read_rows

ALL = "all"
"""Reserved name: the row over every prompt."""
_FORMS = ("prompt", "turns", "messages")
_PER_TURN = ("response", "response_ids", "prompt_ids", "reference")
_KNOWN_KEYS = {"id", "dataset", "group", "system", *_FORMS, *_PER_TURN}


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One text for the target to continue: a prompt, or one turn of a conversation."""

    id: str
    dataset: str
    group: str | None
    """A second way to slice the prompts, for example trained-on and held-out."""
    messages: tuple[tuple[str, str], ...]
    """(role, content) pairs, the last one the user's; of a later turn only what is new."""
    follows: str | None = None
    """Id of the turn before, which with the answer to it comes first."""
    prompt_ids: tuple[int, ...] | None = None
    """The whole prompt as token ids, where another tool rendered it; the template is not applied then."""
    response: str | None = None
    """A given answer, as text; read where completions.source is file."""
    response_ids: tuple[int, ...] | None = None
    """A given answer, as token ids."""
    reference: str | None = None
    """What a right answer holds, for whoever reads the file; nothing is scored by it."""
    where: str = field(default="", compare=False)
    """File and line, for messages."""


def load_prompts(path: str | Path) -> list[Prompt]:
    """Read the prompts of a file, a folder, a pattern or an `hf://` path (see `prompt_files`).

    Args:
        path: each line has one of `prompt` (text), `turns` (the user's texts of one conversation) and
            `messages` (role and content, answers among them where they are history), and may have `id`,
            `dataset`, `group`, `system` (text), `reference`, `prompt_ids`, and `response` or `response_ids`.
            With `turns` the last four are lists with one item a turn.

    Returns:
        The prompts in file order; the turns of a conversation one after the other.

    Raises:
        PromptError: there is none, a line is malformed, or an id occurs twice.
    """
    prompts = [prompt for row in read_rows(path) for prompt in _prompts_of(row)]
    if not prompts:
        raise PromptError(f'{path} holds no prompt; write one JSON object a line: {{"id": "a", "prompt": "..."}}')
    _check_names(prompts, path)
    return prompts


def _prompts_of(row: Row) -> list[Prompt]:
    data = _known(row)
    _check_characters(data, row.where)
    forms = [form for form in _FORMS if data.get(form) is not None] or [form for form in _FORMS if form in data]
    if len(forms) != 1:
        raise PromptError(f"{row.where} needs exactly one of `prompt`, `turns` and `messages`, found {forms}")
    if data.get("response") is not None and data.get("response_ids") is not None:
        raise PromptError(f"{row.where} gives `response` and `response_ids`; one of them, for they could contradict")
    name = _name(data, "id", row.where) or row.name
    rounds = _rounds(data, forms[0], row.where)
    ids = [f"{name}#{number}" for number in range(1, len(rounds) + 1)] if forms[0] == "turns" else [name]
    per_turn = {key: _spread(data, key, len(rounds), forms[0], row.where) for key in _PER_TURN}
    return [
        Prompt(
            id=own,
            dataset=_name(data, "dataset", row.where) or "default",
            group=_name(data, "group", row.where),
            messages=rounds[place],
            follows=ids[place - 1] if place else None,
            prompt_ids=_token_ids(per_turn["prompt_ids"][place], "prompt_ids", row.where),
            response=_text(per_turn["response"][place], "response", row.where),
            response_ids=_token_ids(per_turn["response_ids"][place], "response_ids", row.where),
            reference=_text(per_turn["reference"][place], "reference", row.where),
            where=row.where,
        )
        for place, own in enumerate(ids)
    ]


def _known(row: Row) -> dict[str, Any]:
    """Return the keys that mean something; a table may have further columns, a line of ours may not."""
    unknown = sorted(set(row.data) - _KNOWN_KEYS)
    if unknown and not row.is_of_table:
        raise PromptError(f"{row.where} has unknown keys {unknown}; known are {sorted(_KNOWN_KEYS)}")
    return {key: value for key, value in row.data.items() if key in _KNOWN_KEYS}


def _check_characters(data: dict[str, Any], where: str) -> None:
    try:
        json.dumps(data, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise PromptError(f"{where} holds half of a character ({half!r}); write it whole") from error
    except TypeError as error:
        raise PromptError(f"{where} holds what is no text, number or list: {error}") from error


def _name(data: dict[str, Any], key: str, where: str) -> str | None:
    """Return a name as text, or None where it is left out or null."""
    value = data.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise PromptError(f"{where}: `{key}` = {value!r} must be a text or a number")
    return str(value)


def _rounds(data: dict[str, Any], form: str, where: str) -> list[tuple[tuple[str, str], ...]]:
    """Return the messages that each row adds."""
    if form == "messages":
        if data.get("system") is not None:
            raise PromptError(f"{where} gives `system` beside `messages`; make it the first of the messages")
        return [_messages(data["messages"], where)]
    texts = data["turns"] if form == "turns" else [data["prompt"]]
    if not isinstance(texts, list) or not texts:
        raise PromptError(f"{where}: `turns` must be a list of the user's texts")
    for number, text in enumerate(texts, 1):
        if not isinstance(text, str) or not text.strip():
            which = f"turn {number} of `turns`" if form == "turns" else "`prompt`"
            raise PromptError(f"{where}: {which} must be a text that is not empty")
    system = _text(data.get("system"), "system", where)
    before = () if system is None else (("system", system),)
    first, *later = texts
    return [(*before, ("user", first)), *((("user", text),) for text in later)]


def _messages(messages: Any, where: str) -> tuple[tuple[str, str], ...]:
    try:
        pairs = tuple((message["role"], message["content"]) for message in messages)
    except (TypeError, KeyError) as error:
        raise PromptError(f"{where}: `messages` must be a list of objects with role and content") from error
    if not pairs or pairs[-1][0] != "user" or not all(isinstance(text, str) for pair in pairs for text in pair):
        raise PromptError(f"{where}: `messages` must be texts and end with a message of the user")
    return pairs


def _spread(data: dict[str, Any], key: str, num_rounds: int, form: str, where: str) -> list[Any]:
    """Return the value of a key for each row; of a conversation the file gives them as a list."""
    value = data.get(key)
    if value is None:
        return [None] * num_rounds
    if form != "turns":
        return [value]
    if not isinstance(value, list) or len(value) != num_rounds:
        raise PromptError(f"{where}: `{key}` must be a list with one item for each of the {num_rounds} turns")
    return value


def _text(value: Any, key: str, where: str) -> str | None:
    if value is not None and (not isinstance(value, str) or not value):
        raise PromptError(f"{where}: `{key}` = {value!r} must be a text that is not empty")
    return value


def _token_ids(value: Any, key: str, where: str) -> tuple[int, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not value or not all(_is_token_id(token) for token in value):
        raise PromptError(f"{where}: `{key}` must be a list of token ids, whole numbers from 0, that is not empty")
    return tuple(value)


def _is_token_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _check_names(prompts: Sequence[Prompt], path: str | Path) -> None:
    twice = [name for name, count in Counter(prompt.id for prompt in prompts).items() if count > 1]
    if twice:
        places = ", ".join(prompt.where for prompt in prompts if prompt.id == twice[0])
        raise PromptError(
            f"{path}: id {twice[0]!r} occurs more than once ({places}); ids tell prompts apart in the results"
        )
    datasets = {prompt.dataset for prompt in prompts}
    groups = {prompt.group for prompt in prompts if prompt.group is not None}
    if ALL in datasets | groups:
        raise PromptError(f"{path}: {ALL!r} names the row over every prompt; call the dataset or group something else")
    both = sorted(datasets & groups)
    if both:
        raise PromptError(f"{path}: {both[0]!r} names a dataset and a group; rows could not be told apart")
