"""Looking facts up in a draft config: where each was found, and one line for what is missing or malformed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dflash_core.errors import DraftConfigError

_KIND_NAMES = {int: "a whole number", float: "a number", bool: "true or false", list: "a list", dict: "keys and values"}
_MAY_BE_ZERO = {"mask_token_id"}


class FactReader:
    """Looks facts up in a draft config and notes where each was found."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self.where = where
        self.top = config
        nested = config.get("dflash_config", {})
        if not isinstance(nested, Mapping):
            raise DraftConfigError(f"{where}: dflash_config must hold keys and values, found {type(nested).__name__}")
        self.nested = nested
        self.sources: dict[str, str] = {}

    def find(self, key: str, kind: type, *, nested: bool = False) -> Any:
        """Return the value of a key, which must be of a type, or None.

        Under `nested` it is looked for in dflash_config first, then at the top.

        Raises:
            DraftConfigError: both places state it and disagree, or it is of another type.
        """
        places = {}
        if nested and self.nested.get(key) is not None:
            places[f"dflash_config.{key}"] = self.nested[key]
        if self.top.get(key) is not None:
            places[key] = self.top[key]
        values = list(places.values())
        if len(values) == 2 and values[0] != values[1]:
            raise DraftConfigError(
                f"{self.where}: dflash_config.{key} = {values[0]!r} contradicts {key} = {values[1]!r}; remove one"
            )
        if not values:
            return None
        self.sources[key] = f"{self.where}: {next(iter(places))}"
        return self.as_kind(key, values[0], kind)

    def need(self, key: str, kind: type, *, nested: bool = False) -> Any:
        """Return the value of a key that must be there, of a type, and above zero where it is a count or size.

        Raises:
            DraftConfigError: it is missing or malformed.
        """
        value = self.find(key, kind, nested=nested)
        if value is None:
            at = f"dflash_config.{key} or {key}" if nested else key
            raise DraftConfigError(
                f"{self.where} lacks {at}, which the weights do not tell; add it to the draft config"
            )
        if value <= 0 and key not in _MAY_BE_ZERO:
            raise DraftConfigError(f"{self.where}: {key} = {value!r}, expected a number above 0")
        return value

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
