"""Looking facts up in a nested `config.json`: the innermost level that states one holds, contradictions are noted."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from dflash_core.errors import TargetError

NESTED_SECTIONS = (
    "text_config",
    "thinker_config.text_config",
    "language_config",
    "llm_config",
    "transformer_layer_config",
)
"""Where the text model may be nested; the last one is how the `speculators` library nests a drafter."""

LARGEST_COUNT = 2**48
LARGEST_NUMBER = 1e30


class LevelReader:
    """Looks facts up level by level and remembers where they came from.

    Args:
        data: the file, parsed.
        where: its name in messages.
        keys: for each fact, the key paths inside one level that may state it, the usual one first.
    """

    def __init__(self, data: Mapping[str, Any], where: str, keys: Mapping[str, Sequence[str]]) -> None:
        self.where = where
        self.levels = [(f"{name}.", part) for name in NESTED_SECTIONS if isinstance(part := at(data, name), Mapping)]
        self.levels.append(("", data))
        self.sources: dict[str, str] = {}
        self.conflicts: list[str] = []
        self._keys = keys

    def find(self, field: str, convert: Callable[[Any], Any]) -> Any:
        """Return the first usable value of a fact, innermost level first, or None."""
        taken = None
        for path, raw in self.stated(field):
            value = convert(raw)
            if value is None:
                self.conflicts.append(f"{path} = {short(raw)} cannot be used as {field}")
            elif taken is None:
                taken, self.sources[field] = value, path
            elif value != taken:
                self.conflicts.append(
                    f"{path} = {short(raw)} contradicts {self.sources[field]} = {short(taken)}, which holds"
                )
        return taken

    def require_count(self, field: str) -> int:
        """Return a count that no model is without.

        Raises:
            TargetError: no level states it, or only as something that is no count.
        """
        value = self.find(field, as_count)
        if isinstance(value, int):
            return value
        unusable = [f"{path} = {short(raw)}" for path, raw in self.stated(field)]
        if unusable:
            raise TargetError(f"{self.where}: {', '.join(unusable)}, expected a whole number above 0")
        looked_for = [prefix + key for prefix, _ in self.levels for key in self._keys[field]]
        raise TargetError(
            f"{self.where} does not state {self._keys[field][0]}: looked for {', '.join(looked_for)}; "
            "add it where the library's default was meant"
        )

    def stated(self, field: str, *, outer_first: bool = False) -> Iterator[tuple[str, Any]]:
        """Yield key path and value of every place that states a fact; null states nothing."""
        for prefix, values in self.levels[::-1] if outer_first else self.levels:
            for key in self._keys[field]:
                raw = at(values, key)
                if raw is not None:
                    yield prefix + key, raw

    def is_null(self, field: str) -> bool:
        """Return whether a level names a fact and says null, which is not silence."""
        return any(values.get(key, 0) is None for _, values in self.levels for key in self._keys[field])

    def first_text(self, key: str, *, field: str | None = None, outer_first: bool = False) -> str | None:
        """Return the first level's text under a key (of a list, its first entry) and note its source."""
        for prefix, values in self.levels[::-1] if outer_first else self.levels:
            value = values.get(key)
            if isinstance(value, list) and value:
                value = value[0]
            if isinstance(value, str) and value:
                self.sources[field or key] = prefix + key
                return value
        return None


def at(values: Mapping[str, Any], dotted: str) -> Any:
    """Return the value at a dotted key path, or None."""
    found: Any = values
    for key in dotted.split("."):
        if not isinstance(found, Mapping):
            return None
        found = found.get(key)
    return found


def as_count(value: Any) -> int | None:
    """Return a whole number above 0; a list with one value per layer counts when all are equal."""
    if isinstance(value, list) and value and isinstance(value[0], int) and all(item == value[0] for item in value):
        value = value[0]
    is_count = isinstance(value, int) and not isinstance(value, bool) and 0 < value < LARGEST_COUNT
    return value if is_count else None


def as_number(value: Any) -> float | None:
    """Return a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < LARGEST_NUMBER:
        return None
    return float(value)


def as_truth(value: Any) -> bool | None:
    """Return true or false."""
    return value if isinstance(value, bool) else None


def as_dtype(value: Any) -> str | None:
    """Return a dtype's name without a leading `torch.`."""
    return value.removeprefix("torch.") if isinstance(value, str) and value else None


def as_names(value: Any) -> tuple[str, ...] | None:
    """Return a list of names."""
    is_names = isinstance(value, list) and bool(value) and all(isinstance(item, str) for item in value)
    return tuple(value) if is_names else None


def as_token_ids(value: Any) -> tuple[int, ...] | None:
    """Return one token id, or several in a list, as an ascending tuple."""
    items = value if isinstance(value, list) else [value]
    if not items or not all(
        isinstance(item, int) and not isinstance(item, bool) and 0 <= item < LARGEST_COUNT for item in items
    ):
        return None
    return tuple(sorted(set(items)))


def short(value: Any) -> str:
    """Return a value as it may stand in a one-line message, however long or deep it is."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= LARGEST_COUNT:
        return "a number beyond all sizes"
    return " ".join(reprlib.repr(value).split())
