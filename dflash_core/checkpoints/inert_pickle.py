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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, NoReturn

from dflash_core.checkpoints.dtypes import BY_NAME, BY_STORAGE, ElementType
from dflash_core.errors import CheckpointCorrupt, UnsupportedCheckpoint

MAX_PICKLE_BYTES = 64 << 20
# A pickle of a drafter with its optimizer needs some ten thousand; a sampler's state a million.
MAX_STEPS = 5_000_000
# Elements that understood calls and states may copy: a value that is named once can be used often.
MAX_COPIED = 64 << 20
MAX_DIMS = 16


@dataclass(frozen=True, slots=True)
class GlobalName:
    """The name of a class or function; only ever a name."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(slots=True, eq=False)
class Inert:
    """An object that was not built: the name it would have been built by, and what it was given."""

    made_by: str
    args: tuple[Any, ...] = ()
    state: dict[Any, Any] = field(default_factory=dict)
    items: list[Any] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class StorageRef:
    """A block of elements in a record of its own."""

    key: str
    element: ElementType
    num_elements: int


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor that was not loaded: a strided view of a storage, in elements."""

    storage: StorageRef
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    element: ElementType


@dataclass(frozen=True, slots=True)
class RefusedTensor:
    """A tensor of a kind that is not read."""

    reason: str


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


class _InertUnpickler(pickle._Unpickler):  # type: ignore[misc,name-defined]
    """Runs the opcodes of a pickle on inert values."""

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
        if not isinstance(pid, tuple) or len(pid) < 5 or pid[0] != "storage":
            return Inert("persistent id", (pid,))
        _, storage_type, key, _, num_elements = pid[:5]
        element = BY_STORAGE.get(storage_type.name) if isinstance(storage_type, GlobalName) else None
        if element is None or not isinstance(key, str) or not _is_count(num_elements):
            return Inert("storage of an unknown type", pid)
        return StorageRef(key, element, num_elements)

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
        return _call(function, args)

    def _charge(self, *values: Any) -> None:
        self._copied += sum(len(value) for value in values if isinstance(value, str | bytes | list | tuple | dict))
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

    dispatch = dict(pickle._Unpickler.dispatch)  # type: ignore[attr-defined]
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


def _call(function: Any, args: tuple[Any, ...]) -> Any:
    """Return what stands for `function(*args)`."""
    if not isinstance(function, GlobalName):
        return Inert(f"a call of {type(function).__name__}", args)
    name = str(function)
    understand = UNDERSTOOD.get(name)
    if understand is not None:
        understood = understand(*args)
        return Inert(name, args) if understood is None else understood
    if function.module == "torch._utils" and function.name.startswith("_rebuild"):
        return RefusedTensor(f"built by {name}")
    return Inert(name, args)


# What is understood. Each returns None where the arguments are not those that torch writes.


def _tensor(*args: Any) -> TensorRef | RefusedTensor | None:
    """`_rebuild_tensor(storage, offset, size, stride)` and `_v2`, which adds flags and metadata."""
    if len(args) < 4:
        return None
    return _strided(args[:4], None, args[6] if len(args) > 6 else None)


def _tensor_v3(*args: Any) -> TensorRef | RefusedTensor | None:
    """`_rebuild_tensor_v3`: of an untyped storage, with the element type named."""
    if len(args) < 7 or not isinstance(args[6], GlobalName):
        return None
    element = BY_NAME.get(args[6].name)
    if element is None:
        return RefusedTensor(f"of type {args[6]}")
    return _strided(args[:4], element, args[7] if len(args) > 7 else None)


def _strided(view: tuple[Any, ...], element: ElementType | None, metadata: Any) -> TensorRef | RefusedTensor | None:
    storage, offset, shape, strides = view
    if not isinstance(storage, StorageRef):
        return RefusedTensor("without a storage of its own") if isinstance(storage, Inert) else None
    shapes_are_counts = all(isinstance(part, tuple) and all(map(_is_count, part)) for part in (shape, strides))
    if not _is_count(offset) or not shapes_are_counts or not len(shape) == len(strides) <= MAX_DIMS:
        return RefusedTensor("of an impossible shape")
    if isinstance(metadata, dict) and any(metadata.values()):
        return RefusedTensor(f"with metadata {sorted(map(str, metadata))}")
    return TensorRef(storage, offset, shape, strides, element or storage.element)


def _subclass(*args: Any) -> Any:
    """`_rebuild_from_type_v2(function, type, args, state)`: a plain tensor or parameter, else refused."""
    if len(args) < 3 or not isinstance(args[1], GlobalName) or not isinstance(args[2], tuple):
        return None
    if str(args[1]) not in PLAIN_TENSOR_CLASSES:
        return RefusedTensor(f"of class {args[1]}")
    return _call(args[0], args[2])


def _mapping(*args: Any) -> dict[Any, Any] | None:
    """Return an OrderedDict, defaultdict or Counter as a plain dict."""
    given = args[-1] if args else []
    if isinstance(given, dict):
        return given
    if isinstance(given, list) and all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in given):
        return {key: value for key, value in given}
    return {}


def _path(*args: Any) -> str | None:
    return str(PurePosixPath(*args)) if all(isinstance(part, str) for part in args) else None


def _encoded(*args: Any) -> bytes | None:
    """`_codecs.encode(text, 'latin1')`: how old protocols write bytes."""
    if len(args) == 2 and isinstance(args[0], str) and args[1] in ("latin1", "latin-1"):
        return args[0].encode("latin-1")
    return None


def _numpy_scalar(*args: Any) -> int | float | bool | None:
    """`numpy...scalar(dtype, bytes)` of a number."""
    if len(args) != 2 or not isinstance(args[0], Inert) or not isinstance(args[1], bytes) or not args[0].args:
        return None
    code = NUMPY_CODES.get(str(args[0].args[0]))
    if code is None or struct.calcsize(code) != len(args[1]):
        return None
    order = ">" if any(isinstance(item, tuple) and ">" in item for item in args[0].items) else "<"
    value = struct.unpack(order + code, args[1])[0]
    return value if isinstance(value, int | float | bool) else None


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


NUMPY_CODES = dict(zip("i1 i2 i4 i8 u1 u2 u4 u8 f2 f4 f8 b1".split(), "bhiqBHIQefd?", strict=True))
PLAIN_TENSOR_CLASSES = frozenset(
    {"torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.Parameter", "torch.nn.parameter.Buffer"}
)
UNDERSTOOD: Mapping[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_parameter": lambda *args: args[0] if args else None,
    "torch._utils._rebuild_parameter_with_state": lambda *args: args[0] if args else None,
    "torch._tensor._rebuild_from_type_v2": _subclass,
    "torch.Size": lambda *args: tuple(args[0]) if len(args) == 1 and isinstance(args[0], list | tuple) else None,
    "collections.OrderedDict": _mapping,
    "collections.defaultdict": lambda *args: _mapping(*args[1:]),
    "collections.Counter": _mapping,
    **{f"pathlib.{name}": _path for name in ("Path", "PosixPath", "PurePath", "PurePosixPath")},
    "_codecs.encode": _encoded,
    "numpy.core.multiarray.scalar": _numpy_scalar,
    "numpy._core.multiarray.scalar": _numpy_scalar,
}
