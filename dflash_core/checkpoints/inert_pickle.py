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
from typing import Any, ClassVar, NoReturn, Protocol

from dflash_core.checkpoints.pickle_values import MAX_NAME_CHARS, GlobalName, Inert, as_key, stand_in, storage_of
from dflash_core.errors import CheckpointCorrupt, DFlashEvalError, UnsupportedCheckpoint

MAX_PICKLE_BYTES = 64 << 20
# A pickle of a drafter with its optimizer needs some ten thousand; a sampler's state a million.
MAX_STEPS = 5_000_000
# Elements that understood calls and states may copy: a value that is named once can be used often.
MAX_COPIED = 8 << 20
MAX_NAMES = 10_000


@dataclass(frozen=True, slots=True)
class InertPickle:
    """What a pickle holds."""

    root: Any
    global_names: frozenset[str]
    """Every class and function it names."""
    persistent_ids: tuple[Any, ...] = ()
    """What it holds in place of storages, in the order in which they are named."""


class PickleStream(Protocol):
    """A file whose position is where the next pickle begins; it raises errors of its own where it ends."""

    def read(self, size: int, /) -> bytes:
        """Return the next bytes."""

    def readline(self) -> bytes:
        """Return the next bytes up to the end of a line."""


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
    return _read(_InertUnpickler(io.BytesIO(data), len(data)), where)


def read_inert_from(stream: PickleStream, *, where: str) -> InertPickle:
    """Read one pickle from where a stream stands, and leave it standing behind that pickle.

    The stream says how much may be read; its errors are passed on.

    Raises:
        UnsupportedCheckpoint: it is longer than a checkpoint's pickle may be.
        CheckpointCorrupt: it is no whole pickle.
    """
    reader = _InertUnpickler(stream, MAX_PICKLE_BYTES)
    held = _read(reader, where)
    if reader.is_inside_frame():
        raise CheckpointCorrupt(f"{where}: a frame of its pickle goes on behind the pickle's end; was it damaged?")
    return held


def _read(reader: _InertUnpickler, where: str) -> InertPickle:
    try:
        root = reader.load()
    except DFlashEvalError:  # the file's own
        raise
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
    return InertPickle(
        root=root, global_names=frozenset(map(str, reader.seen)), persistent_ids=tuple(reader.persistent_ids)
    )


class _TooLong(Exception):
    pass


class _InertUnpickler(pickle._Unpickler):
    """Runs the opcodes of a pickle on inert values."""

    pop_mark: Callable[[], list[Any]]
    memo: dict[int, Any]

    def __init__(self, file: PickleStream, max_bytes: int) -> None:
        # Python 2 wrote text as bytes; torch reads them as UTF-8.
        super().__init__(file, encoding="utf-8", errors="surrogateescape")
        self._max_bytes = max_bytes
        self._copied = 0
        self.seen: set[GlobalName] = set()
        self.persistent_ids: list[Any] = []

    def load(self) -> Any:
        """Return the value of the pickle."""
        self._unframer = pickle._Unframer(self._file_read, self._file_readline)  # type: ignore[attr-defined]
        self.read, self.readinto, self.readline = self._unframer.read, self._unframer.readinto, self._unframer.readline
        self.metastack: list[Any] = []
        self.stack: list[Any] = []
        self.append = self.stack.append
        self.proto = 0
        dispatch, costs = self.dispatch, _COSTS
        left = MAX_STEPS
        try:
            while left > 0:
                code = self.read(1)
                if not code:
                    raise EOFError("it ends early")
                left -= costs[code[0]]
                dispatch[code[0]](self)
        except pickle._Stop as stop:  # type: ignore[attr-defined]
            return stop.value
        raise _TooLong

    def is_inside_frame(self) -> bool:
        """Tell whether bytes were read ahead that the pickle did not use."""
        frame = self._unframer.current_frame
        return frame is not None and bool(frame.read(1))

    def find_class(self, module: str, name: str) -> GlobalName:
        """Return the name; nothing is looked up."""
        if len(module) + len(name) > MAX_NAME_CHARS:
            raise pickle.UnpicklingError(f"a name of {len(module) + len(name)} characters")
        found = GlobalName(str(module), str(name))
        self.seen.add(found)
        if len(self.seen) > MAX_NAMES:
            raise _TooLong
        return found

    def get_extension(self, code: int) -> NoReturn:
        """Refuse codes that stand for whatever this process registered."""
        raise pickle.UnpicklingError(f"extension code {code}")

    def persistent_load(self, pid: Any) -> Any:
        """Return a reference to a storage record."""
        self.persistent_ids.append(pid)
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
            owner.update(map(as_key, values))
        else:
            _extend(owner, values)

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        _set_items(self.stack[-1], [key, value])

    def load_setitems(self) -> None:
        pairs = self.pop_mark()
        _set_items(self.stack[-1], pairs)

    def load_dict(self) -> None:
        made: dict[Any, Any] = {}
        _set_items(made, self.pop_mark())
        self.append(made)

    def load_frozenset(self) -> None:
        items = self.pop_mark()
        self.append(frozenset(map(as_key, items)))

    def load_put(self) -> None:
        index = int(self.readline())
        if not 0 <= index <= MAX_STEPS:
            raise pickle.UnpicklingError(f"a memo index of {index.bit_length()} bits")
        self.memo[index] = self.stack[-1]

    def load_bytearray8(self) -> None:
        (size,) = struct.unpack("<Q", self.read(8))
        if size > self._max_bytes:
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
            pickle.DICT[0]: load_dict,
            pickle.PUT[0]: load_put,
            pickle.FROZENSET[0]: load_frozenset,
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
        target[as_key(key)] = value


# Steps count by the memory that they leave behind, in units of some 40 bytes.
_COSTS = [1] * 256
for _codes, _cost in (
    (pickle.EMPTY_SET + pickle.FROZENSET, 6),
    (pickle.REDUCE + pickle.NEWOBJ + pickle.NEWOBJ_EX + pickle.OBJ + pickle.INST, 6),
    (pickle.PERSID + pickle.BINPERSID, 6),
    (pickle.MARK + pickle.EMPTY_DICT + pickle.EMPTY_LIST + pickle.DICT + pickle.LIST, 3),
    (pickle.SHORT_BINUNICODE + pickle.BINUNICODE + pickle.BINUNICODE8 + pickle.UNICODE, 2),
    (pickle.SHORT_BINSTRING + pickle.BINSTRING + pickle.STRING, 2),
    (pickle.PUT + pickle.BINPUT + pickle.LONG_BINPUT + pickle.MEMOIZE, 3),
):
    for _code in _codes:
        _COSTS[_code] = _cost
