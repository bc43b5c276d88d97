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
MAX_NAME_CHARS = 1000
MAX_KEY_CHARS = 1000
# Longer integers have hashes that a file can choose to be all the same.
MAX_KEY_BITS = 60


@dataclass(frozen=True, slots=True)
class GlobalName:
    """The name of a class or function; only ever a name."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(slots=True, eq=False, repr=False)
class Inert:
    """An object that was not built: the name it would have been built by, and what it was given."""

    made_by: str
    args: tuple[Any, ...] = ()
    state: dict[Any, Any] = field(default_factory=dict)
    items: list[Any] = field(default_factory=list)

    def __repr__(self) -> str:
        # What it was given can be nested without bounds.
        return f"<{self.made_by}>"


@dataclass(frozen=True, slots=True)
class StorageRef:
    """A block of elements in a record of its own."""

    key: str
    element: ElementType
    num_elements: int
    view: tuple[int, int] | None = None
    """(first element, elements) of the part that is meant, in files of torch before 0.4."""


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


def as_key(value: Any) -> Any:
    """Return a value as the key of a dict: itself where it is hashed and compared in no time.

    Tuples are not: nested ones take for ever, and a file can choose many with the same hash. Nor is
    text that is no Unicode and so could not be printed.
    """
    if isinstance(value, str):
        is_quick = len(value) <= MAX_KEY_CHARS and is_unicode(value)
    elif isinstance(value, bytes):
        is_quick = len(value) <= MAX_KEY_CHARS
    elif isinstance(value, int):
        is_quick = value.bit_length() <= MAX_KEY_BITS
    else:
        is_quick = value is None or isinstance(value, float | GlobalName | Inert)
    return value if is_quick else Inert("a key", (value,))


def is_unicode(text: str) -> bool:
    """Tell whether a text can be encoded; a pickle can hold halves of surrogate pairs."""
    return text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text)


def storage_of(pid: Any) -> StorageRef | GlobalName | Inert:
    """Return the reference to a record that torch.save writes in place of a storage.

    Files of torch before 1.6 also write the class of a module in this way, with its source code.
    """
    if isinstance(pid, tuple) and len(pid) == 4 and pid[0] == "module" and isinstance(pid[1], GlobalName):
        return pid[1]
    if not isinstance(pid, tuple) or len(pid) < 5 or pid[0] != "storage":
        kind = "a storage named as text, as pickle protocol 0 does," if isinstance(pid, str) else "a persistent id"
        return Inert(kind, (pid,))
    _, storage_type, key, _, num_elements = pid[:5]
    element = BY_STORAGE.get(storage_type.name) if isinstance(storage_type, GlobalName) else None
    if element is None or not isinstance(key, str) or not _is_count(num_elements):
        return Inert(f"a {storage_type}" if isinstance(storage_type, GlobalName) else "an unknown storage", pid)
    return StorageRef(key, element, num_elements, _storage_view(pid[5]) if len(pid) > 5 else None)


def _storage_view(metadata: Any) -> tuple[int, int] | None:
    """Return (first element, elements) of `(key of the view, offset, size)`."""
    if isinstance(metadata, tuple) and len(metadata) == 3 and all(map(_is_count, metadata[1:])):
        return metadata[1], metadata[2]
    # What is no view can hold no tensor.
    return None if metadata is None else (0, 0)


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
        return RefusedTensor(f"in {storage.made_by}") if isinstance(storage, Inert) else None
    are_shapes = all(
        isinstance(part, tuple) and len(part) <= MAX_DIMS and all(map(_is_count, part)) for part in (shape, strides)
    )
    if not _is_count(offset) or not are_shapes or len(shape) != len(strides):
        return RefusedTensor("of an impossible shape")
    flags = sorted(str(key)[:40] for key, value in metadata.items() if value) if isinstance(metadata, dict) else []
    if flags:
        return RefusedTensor(f"with metadata {flags[:3]}")
    return TensorRef(storage, offset, shape, strides, element or storage.element)


def _subclass(*args: Any) -> Any:
    """`_rebuild_from_type_v2(function, type, args, state)`: a plain tensor or parameter, else refused."""
    if len(args) < 3 or not isinstance(args[1], GlobalName) or not isinstance(args[2], tuple):
        return None
    if str(args[1]) not in PLAIN_TENSOR_CLASSES:
        return RefusedTensor(f"of class {args[1]}")
    if not isinstance(args[0], GlobalName) or args[0].module != "torch._utils":
        return RefusedTensor("built by something else than torch")
    return stand_in(args[0], args[2])


def _mapping(*args: Any) -> dict[Any, Any] | None:
    """Return an OrderedDict, defaultdict or Counter as a plain dict."""
    given = args[-1] if args else []
    if isinstance(given, dict):
        return given
    if isinstance(given, list) and all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in given):
        return {as_key(key): value for key, value in given}
    return {}


def _attribute(*args: Any) -> GlobalName | None:
    """`getattr(class, name)`: how old protocols name a class inside another one."""
    if len(args) != 2 or not isinstance(args[0], GlobalName) or not isinstance(args[1], str):
        return None
    name = f"{args[0].name}.{args[1][:MAX_NAME_CHARS]}"
    return GlobalName(args[0].module, name) if len(name) <= MAX_NAME_CHARS else None


def _reconstructed(*args: Any) -> Inert | None:
    """`copyreg._reconstructor(class, base, state)`: how old protocols make an empty object."""
    return Inert(str(args[0]), args[1:]) if args and isinstance(args[0], GlobalName) else None


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
    dtype, state = args[0].args[0], args[0].items[-1] if args[0].items else None
    code = NUMPY_CODES.get(dtype) if isinstance(dtype, str) else None
    if code is None or struct.calcsize(code) != len(args[1]):
        return None
    order = ">" if isinstance(state, tuple) and state[1:2] == (">",) else "<"
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
    **{f"{module}.getattr": _attribute for module in ("builtins", "__builtin__")},
    **{f"{module}._reconstructor": _reconstructed for module in ("copyreg", "copy_reg")},
    "numpy.core.multiarray.scalar": _numpy_scalar,
    "numpy._core.multiarray.scalar": _numpy_scalar,
}
