"""Element types by the names that torch, safetensors and torch's storages give them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ElementType:
    """One element type."""

    name: str
    """As torch says it, for example `bfloat16`."""
    code: str
    """As a safetensors header says it, for example `BF16`."""
    itemsize: int
    """Bytes per element."""


def _types(*rows: tuple[str, str, int]) -> tuple[ElementType, ...]:
    return tuple(ElementType(name=name, code=code, itemsize=itemsize) for name, code, itemsize in rows)


# In the order in which the safetensors library writes tensors of different types (0.8: by its own
# rank, highest first), so that a file written here is byte for byte the one it would write.
ELEMENT_TYPES = _types(
    ("uint64", "U64", 8),
    ("int64", "I64", 8),
    ("float64", "F64", 8),
    ("complex64", "C64", 8),
    ("float32", "F32", 4),
    ("uint32", "U32", 4),
    ("int32", "I32", 4),
    ("bfloat16", "BF16", 2),
    ("float16", "F16", 2),
    ("uint16", "U16", 2),
    ("int16", "I16", 2),
    ("float8_e8m0fnu", "F8_E8M0", 1),
    ("float8_e4m3fn", "F8_E4M3", 1),
    ("float8_e5m2", "F8_E5M2", 1),
    ("int8", "I8", 1),
    ("uint8", "U8", 1),
    ("bool", "BOOL", 1),
)
BY_NAME = {element.name: element for element in ELEMENT_TYPES}
BY_CODE = {element.code: element for element in ELEMENT_TYPES}
WRITE_RANK = {element.name: rank for rank, element in enumerate(ELEMENT_TYPES)}

BY_STORAGE = {
    "DoubleStorage": BY_NAME["float64"],
    "FloatStorage": BY_NAME["float32"],
    "HalfStorage": BY_NAME["float16"],
    "BFloat16Storage": BY_NAME["bfloat16"],
    "LongStorage": BY_NAME["int64"],
    "IntStorage": BY_NAME["int32"],
    "ShortStorage": BY_NAME["int16"],
    "CharStorage": BY_NAME["int8"],
    "ByteStorage": BY_NAME["uint8"],
    "BoolStorage": BY_NAME["bool"],
    "ComplexFloatStorage": BY_NAME["complex64"],
    "UntypedStorage": BY_NAME["uint8"],
}
"""Names of torch's storage classes; an UntypedStorage counts bytes."""

WEIGHT_TYPES = ("float32", "bfloat16", "float16", "float64")
"""Element types that a drafter's tensors may have; anything else is quantised or no weight."""
