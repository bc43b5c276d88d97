"""Reading a pickle without running it: nothing in it is imported, called or instantiated.

A pickle is a program for a small stack machine that may call any function by name. This reader runs
the machine but has no functions: every global is a mere name, a call of it is a record of the call.
A few names are understood and turned into inert values of our own: torch's tensor builders
(`TensorRef`), containers, paths and numpy scalars.

The pure Python `pickle._Unpickler` is the base because its steps can be overridden one by one and
its memo is a dict; the C one allocates by an index that the pickle chooses.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

from dflash_core.checkpoints.pickle_values import GlobalName, Inert, StorageRef, stand_in, storage_of
from dflash_core.errors import CheckpointCorrupt, UnsupportedCheckpoint

MAX_PICKLE_BYTES = 64 << 20
# A pickle of a drafter with its optimizer needs some ten thousand; a sampler's state a million.
MAX_STEPS = 5_000_000
# Elements that understood calls and states may copy: a value that is named once can be used often.
MAX_COPIED = 8 << 20


@dataclass(frozen=True, slots=True)
class InertPickle:
    """What a pickle holds."""

    root: Any
    global_names: frozenset[str]
    """Every class and function it names."""


def read_inert(data: bytes, *, where: str) -> InertPickle:
    """Read a pickle of torch.save without running anything in it.

    Args:
        data: the pickle.
        where: the file, for messages.

    Raises:
        UnsupportedCheckpoint: it is larger or longer than a checkpoint's pickle may be.
        CheckpointCorrupt: it is no whole pickle.
    """
    if len(data) > MAX_PICKLE_BYTES:
        raise UnsupportedCheckpoint(f"{where}: its pickle has {len(data)} bytes, at most {MAX_PICKLE_BYTES} are read")
    reader = _InertUnpickler(data)
    try:
        root = reader.load()
    except _TooLong as error:
        raise UnsupportedCheckpoint(
            f"{where}: its pickle takes more than {MAX_STEPS} steps, or copies more than {MAX_COPIED} elements; "
            "no checkpoint of a drafter needs that"
        ) from error
    except (MemoryError, RecursionError) as error:
        raise CheckpointCorrupt(f"{where}: its pickle asks for more memory than it has bytes") from error
    except Exception as error:  # whatever a malformed program makes the machine trip over
        detail = f"{type(error).__name__}: {error}"
        raise CheckpointCorrupt(
            f"{where}: its pickle cannot be read ({detail[:200]}); was the file damaged?"
        ) from error
    return InertPickle(root=root, global_names=frozenset(map(str, reader.seen)))


class _TooLong(Exception):
    pass


class _InertUnpickler(pickle._Unpickler):
    """Runs the opcodes of a pickle on inert values."""

    pop_mark: Callable[[], list[Any]]

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._num_bytes = len(data)
        self._copied = 0
        self.seen: set[GlobalName] = set()

    def load(self) -> Any:
        """Return the value of the pickle."""
        self._unframer = pickle._Unframer(self._file_read, self._file_readline)  # type: ignore[attr-defined]
        self.read, self.readinto, self.readline = self._unframer.read, self._unframer.readinto, self._unframer.readline
        self.metastack: list[Any] = []
        self.stack: list[Any] = []
        self.append = self.stack.append
        self.proto = 0
        dispatch = self.dispatch
        try:
            for _ in range(MAX_STEPS):
                code = self.read(1)
                if not code:
                    raise EOFError("it ends early")
                dispatch[code[0]](self)
        except pickle._Stop as stop:  # type: ignore[attr-defined]
            return stop.value
        raise _TooLong

    def find_class(self, module: str, name: str) -> GlobalName:
        """Return the name; nothing is looked up."""
        found = GlobalName(str(module), str(name))
        self.seen.add(found)
        return found

    def get_extension(self, code: int) -> NoReturn:
        """Refuse codes that stand for whatever this process registered."""
        raise pickle.UnpicklingError(f"extension code {code}")

    def persistent_load(self, pid: Any) -> StorageRef | Inert:
        """Return a reference to a storage record."""
        return storage_of(pid)

    # Steps that would call something.

    def load_reduce(self) -> None:
        args = self.stack.pop()
        self.stack[-1] = self._made(self.stack[-1], args)

    def load_newobj(self) -> None:
        args = self.stack.pop()
        self.stack[-1] = self._made(self.stack[-1], args)

    def load_newobj_ex(self) -> None:
        kwargs, args = self.stack.pop(), self.stack.pop()
        made = self._made(self.stack[-1], args)
        if isinstance(made, Inert) and isinstance(kwargs, dict):
            self._charge(kwargs)
            made.state.update(kwargs)
        self.stack[-1] = made

    def _instantiate(self, klass: Any, args: Any) -> None:
        self.append(self._made(klass, tuple(args)))

    def _made(self, function: Any, args: Any) -> Any:
        args = args if isinstance(args, tuple) else (args,)
        self._charge(args, *args)
        return stand_in(function, args)

    def _charge(self, *values: Any) -> None:
        self._copied += sum(len(value) for value in values if isinstance(value, list | tuple | dict))
        if self._copied > MAX_COPIED:
            raise _TooLong

    def load_build(self) -> None:
        state = self.stack.pop()
        owner = self.stack[-1]
        if not isinstance(owner, Inert):
            return
        parts = state if isinstance(state, tuple) and len(state) == 2 else (state,)
        if not all(part is None or isinstance(part, dict) for part in parts):
            owner.items.append(state)
            return
        self._charge(*parts)
        for part in parts:
            owner.state.update(part or {})

    # Steps that change a container: only containers of our own are changed.

    def load_append(self) -> None:
        value = self.stack.pop()
        _extend(self.stack[-1], [value])

    def load_appends(self) -> None:
        values = self.pop_mark()
        _extend(self.stack[-1], values)

    def load_additems(self) -> None:
        values = self.pop_mark()
        owner = self.stack[-1]
        if isinstance(owner, set):
            owner.update(value for value in values if isinstance(value, str | int | float | bytes | tuple))
        else:
            _extend(owner, values)

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        _set_items(self.stack[-1], [key, value])

    def load_setitems(self) -> None:
        pairs = self.pop_mark()
        _set_items(self.stack[-1], pairs)

    def load_bytearray8(self) -> None:
        (size,) = struct.unpack("<Q", self.read(8))
        if size > self._num_bytes:
            raise pickle.UnpicklingError(f"a bytearray of {size} bytes")
        self.append(bytearray(self.read(size)))

    dispatch: ClassVar[Any] = dict(pickle._Unpickler.dispatch)
    dispatch.update(
        {
            pickle.REDUCE[0]: load_reduce,
            pickle.NEWOBJ[0]: load_newobj,
            pickle.NEWOBJ_EX[0]: load_newobj_ex,
            pickle.BUILD[0]: load_build,
            pickle.APPEND[0]: load_append,
            pickle.APPENDS[0]: load_appends,
            pickle.ADDITEMS[0]: load_additems,
            pickle.SETITEM[0]: load_setitem,
            pickle.SETITEMS[0]: load_setitems,
            pickle.BYTEARRAY8[0]: load_bytearray8,
        }
    )


def _extend(owner: Any, values: list[Any]) -> None:
    if isinstance(owner, list):
        owner.extend(values)
    elif isinstance(owner, Inert):
        owner.items.extend(values)
    else:
        raise pickle.UnpicklingError(f"items appended to a {type(owner).__name__}")


def _set_items(owner: Any, pairs: list[Any]) -> None:
    target = owner.state if isinstance(owner, Inert) else owner
    if not isinstance(target, dict) or len(pairs) % 2:
        raise pickle.UnpicklingError(f"items set on a {type(owner).__name__}")
    for key, value in zip(pairs[::2], pairs[1::2], strict=True):
        target[key] = value
