"""What the objects in a pickle become when nothing in it is run, and how torch's own are understood."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from dflash_core.checkpoints.dtypes import BY_NAME, BY_STORAGE, ElementType

MAX_DIMS = 16
MAX_SCALAR_BYTES = 16
MAX_PATH_CHARS = 4096


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


def storage_of(pid: Any) -> StorageRef | Inert:
    """Return the reference to a record that torch.save writes in place of a storage."""
    if not isinstance(pid, tuple) or len(pid) < 5 or pid[0] != "storage":
        return Inert("persistent id", (pid,))
    _, storage_type, key, _, num_elements = pid[:5]
    element = BY_STORAGE.get(storage_type.name) if isinstance(storage_type, GlobalName) else None
    if element is None or not isinstance(key, str) or not _is_count(num_elements):
        return Inert("storage of an unknown type", pid)
    return StorageRef(key, element, num_elements)


def stand_in(function: Any, args: tuple[Any, ...]) -> Any:
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
    return stand_in(args[0], args[2])


def _mapping(*args: Any) -> dict[Any, Any] | None:
    """Return an OrderedDict, defaultdict or Counter as a plain dict."""
    given = args[-1] if args else []
    if isinstance(given, dict):
        return given
    if isinstance(given, list) and all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in given):
        return {key: value for key, value in given}
    return {}


def _path(*args: Any) -> str | None:
    if not all(isinstance(part, str) for part in args) or sum(map(len, args)) > MAX_PATH_CHARS:
        return None
    return str(PurePosixPath(*args))


def _encoded(*args: Any) -> bytes | None:
    """`_codecs.encode(text, 'latin1')`: how old protocols write bytes; those of a number are enough."""
    if len(args) == 2 and isinstance(args[0], str) and len(args[0]) <= MAX_SCALAR_BYTES and args[1] == "latin1":
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


# struct's letters for numpy's number types.
NUMPY_CODES = {
    **{"i1": "b", "i2": "h", "i4": "i", "i8": "q"},
    **{"u1": "B", "u2": "H", "u4": "I", "u8": "Q"},
    **{"f2": "e", "f4": "f", "f8": "d", "b1": "?"},
}
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
