"""The prompt file: one JSON object a line, read and checked before anything costly starts."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_core.errors import PromptError

ALL = "all"
"""Reserved name: the row over every prompt."""
_KNOWN_KEYS = {"id", "dataset", "group", "prompt", "turns", "messages", "response", "prompt_ids", "response_ids"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One conversation for the target to continue."""

    id: str
    dataset: str
    group: str | None
    """A second way to slice the prompts, for example trained-on and held-out."""
    messages: tuple[tuple[str, str], ...]
    """(role, content) pairs, the last one the user's."""


def load_prompts(path: str | Path) -> list[Prompt]:
    """Read the prompt file.

    Args:
        path: JSON lines; each object has `prompt` (text), or `messages` (role and content), and
            may have `id`, `dataset` and `group`.

    Returns:
        The prompts in file order.

    Raises:
        PromptError: the file is missing or empty, a line is malformed, or an id occurs twice.
    """
    try:
        # Not splitlines: a text may hold other line separators (U+2028), which JSON does not escape.
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"cannot read the prompt file {str(path)!r}: {error}; set `prompts` in the config") from error
    prompts = [_parse(line, f"{path}:{number}", number) for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise PromptError(f'{path} holds no prompt; write one JSON object a line: {{"id": "a", "prompt": "..."}}')
    _check_names(prompts, path)
    return prompts


def _parse(line: str, where: str, number: int) -> Prompt:
    try:
        data = json.loads(line)
    except ValueError as error:
        raise PromptError(f"{where} is not JSON: {error}") from error
    try:
        json.dumps(data, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise PromptError(f"{where} holds half of a character ({half!r}); write it whole") from error
    if not isinstance(data, dict):
        raise PromptError(f"{where} must be a JSON object, found {type(data).__name__}")
    unknown = sorted(set(data) - _KNOWN_KEYS)
    if unknown:
        raise PromptError(f"{where} has unknown keys {unknown}; known are {sorted(_KNOWN_KEYS)}")
    return Prompt(
        id=_name(data, "id", where) or f"prompt-{number}",
        dataset=_name(data, "dataset", where) or "default",
        group=_name(data, "group", where),
        messages=_messages(data, where),
    )


def _name(data: dict[str, Any], key: str, where: str) -> str | None:
    """Return a name as text, or None where it is left out or null."""
    value = data.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise PromptError(f"{where}: `{key}` = {value!r} must be a text or a number")
    return str(value)


def _messages(data: dict[str, Any], where: str) -> tuple[tuple[str, str], ...]:
    if {"turns", "response", "prompt_ids", "response_ids"} & set(data):
        raise PromptError(
            f"{where} uses turns, response, prompt_ids or response_ids, which are not supported yet; "
            f"give `prompt` or `messages`"
        )
    if ("prompt" in data) == ("messages" in data):
        raise PromptError(f"{where} needs exactly one of `prompt` and `messages`")
    if "prompt" in data:
        if not isinstance(data["prompt"], str) or not data["prompt"].strip():
            raise PromptError(f"{where}: `prompt` must be a text that is not empty")
        return (("user", data["prompt"]),)
    messages = data["messages"]
    try:
        pairs = tuple((message["role"], message["content"]) for message in messages)
    except (TypeError, KeyError) as error:
        raise PromptError(f"{where}: `messages` must be a list of objects with role and content") from error
    if not pairs or pairs[-1][0] != "user" or not all(isinstance(text, str) for pair in pairs for text in pair):
        raise PromptError(f"{where}: `messages` must be texts and end with a message of the user")
    return pairs


def _check_names(prompts: list[Prompt], path: str | Path) -> None:
    twice = [name for name, count in Counter(prompt.id for prompt in prompts).items() if count > 1]
    if twice:
        raise PromptError(f"{path}: id {twice[0]!r} occurs more than once; ids tell prompts apart in the results")
    datasets = {prompt.dataset for prompt in prompts}
    groups = {prompt.group for prompt in prompts if prompt.group is not None}
    if ALL in datasets | groups:
        raise PromptError(f"{path}: {ALL!r} names the row over every prompt; call the dataset or group something else")
    both = sorted(datasets & groups)
    if both:
        raise PromptError(f"{path}: {both[0]!r} names a dataset and a group; rows could not be told apart")
