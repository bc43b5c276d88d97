"""What decoder layers are given beside the residual stream: recorded from the model's forward pass, and kept."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dflash_core.target.stored_tensors import bytes_of

_SHARED_BYTES = 1024
"""Tensors from this size on are kept once where two transcripts of one length have the same."""


class Stop(Exception):  # noqa: N818 - a signal
    """Raised inside a model's forward pass where what follows is not needed."""


@dataclass(frozen=True, slots=True)
class Call:
    """What a layer was given beside its input."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


class Recorder(nn.Module):
    """Stands in for a decoder layer: keeps its arguments and returns what it is told to."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        # A tuple hides it from torch: its parameters are not the recorder's.
        self._real = (layer,)
        self.inputs: Tensor | None = None
        self.call: Call | None = None
        self.answer: Callable[[Tensor], Any] = lambda hidden: hidden

    def __getattr__(self, name: str) -> Any:
        """Pass on what the model asks of its layers, such as `layer_type`."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_real"][0], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Keep the arguments; return the input, or what was set."""
        if args:
            hidden, args = args[0], args[1:]
        else:
            hidden = kwargs.pop("hidden_states")
        self.inputs = hidden
        self.call = Call(args, kwargs)
        return self.answer(hidden)


class Arguments:
    """What the layers of each transcript are given, kept while it takes little memory, else made anew."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._kept: dict[int, list[Call]] | None = {}
        self._shared: dict[Any, Tensor] = {}
        self._storages: dict[int, int] = {}
        self._state: dict[tuple[int, str], Any] = {}
        self.counted: set[int] = set()

    @property
    def has_shared_state(self) -> bool:
        """Tell whether any layer wrote something for later ones to read, such as keys and values."""
        return any(len(state) > 0 for state in self._state.values())

    def find(self, index: int) -> list[Call] | None:
        """Return the arguments of a transcript, or None where they must be made."""
        return None if self._kept is None else self._kept.get(index)

    def keep(self, index: int, calls: list[Call]) -> None:
        """Keep a transcript's arguments, or forget all where they have become too large."""
        for call in calls:
            for name, value in call.kwargs.items():
                if isinstance(value, MutableMapping):
                    # Of one transcript all layers share it; what one writes a later one reads.
                    self._state.setdefault((index, name), value)
        if self._kept is None:
            return
        memo: dict[int, Tensor] = {}
        kept = [
            Call(tuple(self._share(value, memo) for value in call.args), self._share(dict(call.kwargs), memo))
            for call in calls
        ]
        self._kept[index] = kept
        if sum(self._storages.values()) > self._limit_bytes:
            self._kept = None
            self._shared.clear()

    def with_shared_state(self, index: int, call: Call) -> Call:
        """Return a call with the transcript's own shared state in it."""
        changed = {name: self._state[index, name] for name in call.kwargs if (index, name) in self._state}
        return Call(call.args, {**call.kwargs, **changed}) if changed else call

    def _share(self, value: Any, memo: dict[int, Tensor]) -> Any:
        if isinstance(value, Tensor):
            return self._share_tensor(value, memo)
        if type(value) in (list, tuple):
            return type(value)(self._share(item, memo) for item in value)
        if type(value) is dict:
            return {key: self._share(item, memo) for key, item in value.items()}
        return value

    def _share_tensor(self, value: Tensor, memo: dict[int, Tensor]) -> Tensor:
        if id(value) in memo:
            return memo[id(value)]
        storage = value.untyped_storage()
        shared = value
        if value.is_contiguous() and storage.nbytes() == value.numel() * value.dtype.itemsize >= _SHARED_BYTES:
            content = hashlib.blake2b(bytes_of(value), digest_size=16).digest()
            shared = self._shared.setdefault((value.shape, value.dtype, content), value)
        memo[id(value)] = shared
        self._storages[shared.untyped_storage().data_ptr()] = shared.untyped_storage().nbytes()
        return shared


@contextmanager
def replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Have a module compute something else inside the block."""
    module.forward = forward
    try:
        yield
    finally:
        del module.forward


def is_same(one: Any, other: Any) -> bool:
    """Compare two arguments; what cannot be compared is taken as equal where the types are."""
    if isinstance(one, Call) and isinstance(other, Call):
        return is_same(list(one.args), list(other.args)) and is_same(dict(one.kwargs), dict(other.kwargs))
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(is_same(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, Mapping):
        return set(one) == set(other) and all(is_same(one[key], other[key]) for key in one)
    return one == other if isinstance(one, bool | int | float | str | None) else True


def passes_state(call: Call) -> bool:
    """Tell whether a layer is given something that it may write into."""
    return any(isinstance(value, MutableMapping) for value in call.kwargs.values())
