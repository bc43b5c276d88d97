"""The tree of errors is as drawn, and each says how the command line ends."""

from __future__ import annotations

import inspect
import pickle
import re

import pytest

from dflash_core import errors
from dflash_core.errors import DFlashEvalError, one_line

CLASSES = {
    name: value for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, DFlashEvalError)
}
# Everything else ends with 2: the user can put it right. (A checkpoint that rotates away is nobody's mistake.)
ENDS_WITH_1 = {"DFlashEvalError", "ShapeMismatch", "ArtifactDamaged", "ResultsError", "CheckpointVanished"}
ENDS_WITH_1 |= {"PreparationFailed"}
BUILTINS = {
    "InputError": ValueError,
    "CheckpointNotFound": FileNotFoundError,
    "HostError": ConnectionError,
    "ServerError": ConnectionError,
    "DoesNotFit": MemoryError,
    "ShapeMismatch": ValueError,
    "NoResults": FileNotFoundError,
}


def drawn_tree() -> dict[str, str]:
    """Return child to parent as the docstring draws them; a level is four columns wide."""
    parents: dict[str, str] = {}
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"^    (?P<lines>[│├└─ ]*)(?P<name>[A-Z]\w+)(?:  |$)", line)
        if match is None:
            continue
        depth = len(match["lines"]) // 4
        path = [*path[:depth], match["name"]]
        if depth:
            parents[match["name"]] = path[depth - 1]
    return parents


def test_the_drawing_in_the_docstring_is_the_tree() -> None:
    actual = {
        name: next(base.__name__ for base in cls.__bases__ if issubclass(base, DFlashEvalError))
        for name, cls in CLASSES.items()
        if cls is not DFlashEvalError
    }
    assert len(actual) > 15
    assert drawn_tree() == actual


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_each_error_says_when_it_is_raised_and_how_the_command_ends(name: str) -> None:
    cls = CLASSES[name]
    assert re.match(r"(Raised when|Base of) .*\.$", cls.__doc__ or "")
    assert cls.exit_status == (1 if name in ENDS_WITH_1 else 2)


@pytest.mark.parametrize(("name", "builtin"), BUILTINS.items(), ids=BUILTINS)
def test_an_error_is_also_the_matching_builtin(name: str, builtin: type[Exception]) -> None:
    assert issubclass(CLASSES[name], builtin)


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_an_error_crosses_processes_with_type_and_message(name: str) -> None:
    error = CLASSES[name]("fc.weight reads 5 layers")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is CLASSES[name]
    assert str(copy) == "fc.weight reads 5 layers"


@pytest.mark.parametrize(
    ("text", "line"),
    [("one\n  two\t three ", "one two three"), ("", "InputError"), (" \n ", "InputError")],
    ids=["many lines", "no text", "only blanks"],
)
def test_a_message_is_shown_as_one_line(text: str, line: str) -> None:
    assert one_line(errors.InputError(text)) == line
