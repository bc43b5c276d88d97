"""Looking facts up in a draft config: where each was found, and one line for what is missing or malformed."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from dflash_core.errors import DraftConfigError

_KIND_NAMES = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "keys and values",
    str: "a text",
}
_MAY_BE_ZERO = {"mask_token_id", "markov_rank"}
OF_TRAINING = "the checkpoint's own training args"


class FactReader:
    """Looks facts up in a draft config and notes where each was found.

    Args:
        config: the draft config, or the part of it that holds these facts.
        where: the file's name in messages.
        prefix: the path of that part inside the file, with a dot at its end.
        defaults: values that the writer of such files leaves out where they are its own defaults.
        defaults_of: whose defaults those are.
        training: what the checkpoint's own training settings state; asked where the config is silent.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        where: str,
        *,
        prefix: str = "",
        defaults: Mapping[str, Any] | None = None,
        defaults_of: str = "",
        training: Mapping[str, Any] | None = None,
    ) -> None:
        self.where = where
        self.prefix = prefix
        self.top = config
        nested = config.get("dflash_config", {})
        if not isinstance(nested, Mapping):
            raise DraftConfigError(f"{where}: dflash_config must hold keys and values, found {type(nested).__name__}")
        self.nested = nested
        self.sources: dict[str, str] = {}
        self._defaults = defaults or {}
        self._defaults_of = defaults_of
        self._training = training or {}

    def stated(self, key: str, *, nested: bool = False) -> dict[str, Any]:
        """Return the places in the file that state a key, dflash_config first, and what each says; null says nothing.

        Raises:
            DraftConfigError: both places state it and disagree.
        """
        places = {}
        if nested and self.nested.get(key) is not None:
            places[f"{self.prefix}dflash_config.{key}"] = self.nested[key]
        if self.top.get(key) is not None:
            places[f"{self.prefix}{key}"] = self.top[key]
        values = list(places.values())
        if len(values) == 2 and values[0] != values[1]:
            raise DraftConfigError(
                f"{self.where}: dflash_config.{key} = {values[0]!r} contradicts {key} = {values[1]!r}; remove one"
            )
        return places

    def find(self, key: str, kind: type, *, nested: bool = False) -> Any:
        """Return the value of a key, which must be of a type, or None.

        Under `nested` it is looked for in dflash_config first, then at the top.

        Raises:
            DraftConfigError: both places state it and disagree, or it is of another type.
        """
        places = self.stated(key, nested=nested)
        if places:
            self.sources[key] = f"{self.where}: {next(iter(places))}"
            return self.as_kind(f"{self.prefix}{key}", next(iter(places.values())), kind)
        if key in self._defaults:
            self.sources[key] = f"default of {self._defaults_of}"
            return self._defaults[key]
        return None

    def need(self, key: str, kind: type, *, nested: bool = False) -> Any:
        """Return the value of a key that must be there, of a type, and above zero where it is a count or size.

        Raises:
            DraftConfigError: it is missing or malformed.
        """
        value = self.find(key, kind, nested=nested)
        if value is None:
            value = self._of_training(key)
        if value is None:
            at = f"dflash_config.{key} or {key}" if nested else f"{self.prefix}{key}"
            raise DraftConfigError(
                f"{self.where} lacks {at}, which the weights do not tell; add it to the draft config"
            )
        if value <= 0 and key not in _MAY_BE_ZERO:
            raise DraftConfigError(f"{self.where}: {self.prefix}{key} = {value!r}, expected a number above 0")
        return value

    def training_numbers(self, key: str) -> list[int] | None:
        """Return the whole numbers that the checkpoint's own training settings state for a key, or None."""
        stated = self._training.get(key)
        values = None if stated is None else numbers(stated)
        if not values or not all(isinstance(value, int) and not isinstance(value, bool) for value in values):
            return None
        return values

    def as_kind(self, key: str, value: Any, kind: type) -> Any:
        """Return a value as a type; a whole number counts as a float, true and false only as bool.

        Raises:
            DraftConfigError: it is of another type.
        """
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        is_finite = not isinstance(value, float) or math.isfinite(value)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool) or not is_finite:
            raise DraftConfigError(f"{self.where}: {key} = {value!r}, expected {_KIND_NAMES[kind]}")
        return value

    def _of_training(self, key: str) -> int | None:
        stated = self.training_numbers(key)
        if key not in ("block_size", "mask_token_id") or stated is None or len(stated) != 1:
            return None
        self.sources[key] = f"{OF_TRAINING}: {key}"
        return stated[0]


def numbers(value: Any) -> list[Any]:
    """Return one number or a list of them as a list; a command line's text such as "1,14,27" as what it spells."""
    if isinstance(value, str):
        return [int(number) for number in re.findall(r"-?\d+", value)]
    return list(value) if isinstance(value, list | tuple) else [value]


def agreed(reader: FactReader, statements: Mapping[str, Any], meaning: str) -> Any:
    """Return what all statements about one fact say, or None where there is none.

    Args:
        reader: names the file.
        statements: place to the value it states, in one common meaning.
        meaning: what the fact is, for the message.

    Raises:
        DraftConfigError: two of them contradict.
    """
    places = list(statements)
    for place in places[1:]:
        if statements[place] != statements[places[0]]:
            raise DraftConfigError(
                f"{reader.where}: {places[0]} contradicts {place}: {meaning} would be {statements[places[0]]!r} by the "
                f"one and {statements[place]!r} by the other; keep the one that the drafter was trained with"
            )
    return statements[places[0]] if places else None
