"""Hostile pickles, read in a process of their own that notes what Python is asked to do meanwhile.

Run as `python hostile_pickles.py inert` (this project's reader) or `pickle` (Python's own, which
shows that the watch sees what it should). One line each: name, outcome, seconds, events.
"""

from __future__ import annotations

import pickle
import resource
import struct
import sys
import time
from collections.abc import Callable
from typing import Any

from dflash_core.checkpoints.facts import collect_facts, odd_names
from dflash_core.checkpoints.inert_pickle import read_inert
from dflash_core.checkpoints.torch_file import find_weights
from dflash_core.errors import DFlashEvalError

# Beyond what the process has after its imports.
MEMORY_LIMIT = 500 << 20
SECONDS_LIMIT = 120
TOUCH = b"X\x0a\x00\x00\x00touch evil"


def text(value: str) -> bytes:
    """Return the opcode that pushes a text."""
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def laughs(levels: int, width: int = 10, *, tuples: bool = False) -> bytes:
    """Return opcodes that push a list or tuple of width ** levels elements, all the same few objects."""
    begin, end = (b"(", b"t") if tuples else (b"(", b"l")
    program = begin + b"K\x01" * width + end + b"r\0\0\0\0"
    for level in range(levels):
        program += b"0" + begin + (b"j" + struct.pack("<I", level)) * width + end + b"r" + struct.pack("<I", level + 1)
    return program


def tensor(offset: bytes, shape: bytes, strides: bytes, count: bytes = b"K\x0a", more: bytes = b"") -> bytes:
    """Return a whole pickle of `{"fc.weight": tensor}`."""
    storage = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + count + b"tQ"
    made = b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + offset + shape + strides + b"\x89}" + more + b"tR"
    return b"\x80\x02}" + text("fc.weight") + made + b"s."


GETATTR_CHAIN = (
    b"cbuiltins\ngetattr\n(cbuiltins\n__import__\n(" + text("os") + b"tR" + text("system") + b"tR(" + TOUCH + b"tR."
)
MANY = 100_000
# Programs that Python's own unpickler can be shown with: each would do something at once.
CALLS = ("reduce", "inst", "obj", "stack_global", "getattr_chain", "eval", "exec", "import", "open")


def programs() -> dict[str, Callable[[], bytes]]:
    """Return the programs by name, each made when it is asked for."""
    modulus = (1 << 61) - 1
    long_int = b"\x8b" + struct.pack("<i", 8 << 20) + b"\x7f" * (8 << 20)
    return {
        # Calls.
        "reduce": lambda: b"cos\nsystem\n(" + TOUCH + b"tR.",
        "inst": lambda: b"(" + TOUCH + b"ios\nsystem\n.",
        "obj": lambda: b"(cos\nsystem\n" + TOUCH + b"o.",
        "stack_global": lambda: b"\x80\x04\x8c\x02os\x8c\x06system\x93" + TOUCH + b"\x85R.",
        "newobj": lambda: b"\x80\x02csubprocess\nPopen\n(]" + TOUCH + b"atR.",
        "newobj_ex": lambda: b"\x80\x04csubprocess\nPopen\n)}" + text("args") + b"]" + text("true") + b"as\x92.",
        "getattr_chain": lambda: GETATTR_CHAIN,
        "eval": lambda: b"cbuiltins\neval\n(" + text("__import__('os').system('touch evil')") + b"tR.",
        "exec": lambda: b"cbuiltins\nexec\n(" + text("import os; os.system('touch evil')") + b"tR.",
        "import": lambda: b"cimportlib\nimport_module\n(" + text("antigravity") + b"tR.",
        "torch_load": lambda: b"ctorch\nload\n(" + text("evil.pt") + b"tR.",
        "open": lambda: b"cio\nopen\n(" + text("evil") + text("w") + b"tR.",
        "apply": lambda: b"cfunctools\nreduce\n(cos\nsystem\n]" + TOUCH + b"a" + text("x") + b"tR.",
        "code": lambda: b"ctypes\nFunctionType\n(ctypes\nCodeType\n(K\x00tR}tR)R.",
        "unknown_module": lambda: b"cno_such_module.deep\nThing\n)R.",
        "module_with_effects": lambda: b"cthis\ns\n.",
        "reconstructor": lambda: b"ccopyreg\n_reconstructor\n(cos\nsystem\ncbuiltins\nobject\nNtR(" + TOUCH + b"tR.",
        "call_of_a_call": lambda: b"cos\nsystem\n" + (b"(" + TOUCH + b"tR") * 100 + b".",
        "decoder": lambda: b"c_codecs\nencode\n(" + text("x" * 12) + text("zlib") + b"tR.",
        "subclass": lambda: (
            b"ctorch._tensor\n_rebuild_from_type_v2\n(cos\nsystem\nctorch\nTensor\n(" + TOUCH + b"tNtR."
        ),
        # Changing what is there.
        "build_on_a_function": lambda: b"\x80\x02cos\nsystem\n}" + text("__code__") + b"K\x01sb.",
        "build_on_a_class": lambda: b"\x80\x02cbuiltins\nobject\n}" + text("__init__") + b"K\x01sb.",
        "build_of_slots": lambda: (
            b"\x80\x02cm\nC\n)\x81}" + text("__class__") + b"cos\nsystem\nsbN}" + text("made_by") + b"K\x01s\x86b."
        ),
        "setitem_on_a_function": lambda: b"cos\nsystem\n" + text("a") + b"K\x01s.",
        "append_to_a_function": lambda: b"cos\nsystem\n(K\x01e.",
        "additems_to_a_list": lambda: b"\x80\x04](K\x01\x90.",
        "extension_1": lambda: b"\x80\x02\x82\x01.",
        "extension_2": lambda: b"\x80\x02\x83\x01\x00.",
        "extension_4": lambda: b"\x80\x02\x84\x01\x00\x00\x00.",
        "buffers": lambda: b"\x80\x05\x97\x98.",
        "text_id": lambda: b"Pos.system\n.",
        "id": lambda: b"\x80\x02cos\nsystem\n(" + TOUCH + b"tRQ.",
        # Sizes.
        "memo_index": lambda: b"\x80\x02Nr\xff\xff\xff\x7f.",
        "memo_text": lambda: b"N" + b"p" + b"9" * 4000 + b"\n.",
        "bytearray": lambda: b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b".",
        "bytes": lambda: b"\x80\x04\x8e" + struct.pack("<Q", 1 << 60) + b".",
        "unicode": lambda: b"\x80\x04\x8d" + struct.pack("<Q", 1 << 60) + b".",
        "long": lambda: b"\x80\x02\x8b\xff\xff\xff\x7f.",
        "negative_long": lambda: b"\x80\x02\x8b\xff\xff\xff\xff.",
        "frame": lambda: b"\x80\x04\x95" + struct.pack("<Q", (1 << 63) - 1) + b"N.",
        "shape": lambda: tensor(b"K\x00", b"(" + b"K\x01" * 100_000 + b"t", b"(K\x01t"),
        "huge_shape": lambda: tensor(b"K\x00", b"(\x8a\x08" + b"\xff" * 7 + b"\x0f" + b"t", b"(K\x01t"),
        "negative_stride": lambda: tensor(b"K\x00", b"(K\x04t", b"(J\xff\xff\xff\xfft"),
        "negative_offset": lambda: tensor(b"J\xff\xff\xff\xff", b"(K\x04t", b"(K\x01t"),
        "huge_count": lambda: tensor(b"K\x00", b"(K\x04t", b"(K\x01t", b"\x8a\x08" + b"\xff" * 7 + b"\x0f"),
        "odd_count": lambda: tensor(b"K\x00", b"(K\x04t", b"(K\x01t", b"]"),
        # Memory.
        "sets": lambda: b"(" + b"\x8f" * (9 * MANY) + b"t.",
        "marks": lambda: b"(" * (17 * MANY) + b".",
        "objects": lambda: b"cm\nC\nq\0(" + b"h\0)\x81" * (7 * MANY) + b"t.",
        "memos": lambda: b"N" + b"\x94" * (17 * MANY) + b".",
        "texts": lambda: b"(" + b"\x8c\x02\xc4\x80" * (26 * MANY) + b"t.",
        "ids": lambda: b"N" + b"2Q" * (8 * MANY) + b"0.",
        "wide_text": lambda: b"X" + struct.pack("<I", 48 << 20) + "😀".encode() + b"a" * ((48 << 20) - 4) + b".",
        # Time.
        "deep_lists": lambda: b"(" * 100_000 + b"l" * 100_000 + b".",
        "deep_tuples": lambda: b")" + b"\x85" * (5 * MANY) + b".",
        "deep_objects": lambda: b"\x80\x02cm\nC\nq\0" + b"h\0" * MANY + b")\x81" + b"\x85\x81" * MANY + b".",
        "laughs": lambda: b"}" + text("args") + laughs(60) + b"s.",
        "laughing_root": lambda: laughs(60) + b".",
        "laughing_key": lambda: b"}" + laughs(60, tuples=True) + b"K\x01s.",
        "laughing_keys_of_old": lambda: b"(" + laughs(60, tuples=True) + b"K\x01d.",
        "laughing_pair": lambda: b"ccollections\nOrderedDict\n(](" + laughs(60, tuples=True) + b"K\x01tatR.",
        "laughing_set": lambda: b"\x80\x04\x8f(" + laughs(60, tuples=True) + b"\x90.",
        "laughing_frozenset": lambda: b"\x80\x04(" + laughs(60, tuples=True) + b"\x91.",
        "laughing_dtype": lambda: (
            b"cnumpy._core.multiarray\nscalar\n(cnumpy\ndtype\n(" + laughs(60) + b"tR\x80\x03C\x08" + bytes(8) + b"tR."
        ),
        "laughing_flags": lambda: tensor(
            b"K\x00", b"(K\x04t", b"(K\x01t", more=b"}" + laughs(60, tuples=True) + b"K\x01s"
        ),
        "laughing_size": lambda: b"ctorch\nSize\n(" + laughs(60) + b"tR.",
        "same_hash": lambda: (
            b"}(" + b"".join(b"\x8a\x0b" + (i * modulus).to_bytes(11, "little") + b"N" for i in range(1, MANY)) + b"u."
        ),
        "same_hash_memo": lambda: b"N" + b"".join(b"p%d\n" % (i * modulus) for i in range(1, MANY)) + b".",
        "long_key": lambda: long_int + b"r\0\0\0\0}" + b"j\0\0\0\0Ns" * MANY + b".",
        "long_text_key": lambda: (
            text("a" * (8 << 20))
            + b"r\0\0\0\0"
            + text("a" * (8 << 20))
            + b"r\1\0\0\0}"
            + b"j\0\0\0\0Nsj\1\0\0\0Ns" * MANY
            + b"."
        ),
        "long_name": lambda: b"c" + b"m" * (8 << 20) + b"\nf\nr\0\0\0\0" + b"j\0\0\0\0)R0" * MANY + b".",
        "copied_pairs": lambda: (
            b"]("
            + b"".join(b"J" + struct.pack("<i", i) + b"N\x86" for i in range(20_000))
            + b"er\0\0\0\0"
            + b"ccollections\nOrderedDict\nj\0\0\0\0\x85R0" * 10_000
            + b"."
        ),
        "copied_inside": lambda: (
            b"]("
            + b"".join(b"J" + struct.pack("<i", i) + b"N\x86" for i in range(20_000))
            + b"er\0\0\0\0ctorch\nTensor\nr\1\0\0\0ccollections\nOrderedDict\nr\2\0\0\0"
            + b"ctorch._tensor\n_rebuild_from_type_v2\nr\3\0\0\0"
            + b"j\3\0\0\0(j\2\0\0\0j\1\0\0\0(j\0\0\0\0tNtR0" * 20_000
            + b"."
        ),
        "copied_state": lambda: (
            b"}("
            + b"".join(b"J" + struct.pack("<i", i) + b"N" for i in range(20_000))
            + b"ur\0\0\0\0cm\nC\nr\1\0\0\0"
            + b"j\1\0\0\0)\x81j\0\0\0\0b0" * 20_000
            + b"."
        ),
        "dtype_state": lambda: (
            b"cnumpy\ndtype\n("
            + text("f8")
            + b"tR("
            + b"K\x01" * 100_000
            + b"tbr\0\0\0\0cnumpy._core.multiarray\nscalar\nr\1\0\0\0"
            + b"j\1\0\0\0(j\0\0\0\0C\x08aaaaaaaatR0" * 100_000
            + b"."
        ),
        "often_named_dict": lambda: (
            b"}("
            + b"".join(text(f"a{i}") + b"]" for i in range(30_000))
            + b"ur\0\0\0\0}("
            + b"".join(text(f"b{i}") + b"j\0\0\0\0" for i in range(30_000))
            + b"u."
        ),
        "loop": lambda: b"}r\0\0\0\0" + text("self") + b"j\0\0\0\0s" + text("again") + b"j\0\0\0\0s.",
        "text_number": lambda: b"I" + b"9" * (1 << 20) + b"\n.",
        "text_long": lambda: b"L" + b"9" * (1 << 20) + b"L\n.",
        "text_float": lambda: b"F" + b"x" * (1 << 20) + b"\n.",
        # Damage.
        "nothing": lambda: b"",
        "cut_off": lambda: b"\x80\x02}q\x00(X\x05\x00",
        "no_mark": lambda: b"t.",
        "empty_stack": lambda: b"R.",
        "unknown_opcode": lambda: b"\xff.",
        "bad_text": lambda: b"X\x01\x00\x00\x00\xff.",
    }


def read_all_of_it(data: bytes) -> None:
    """Do with a pickle all that is done with that of a checkpoint."""
    held = read_inert(data, where="hostile.pt")
    odd_names(held.global_names)
    collect_facts(held.root if isinstance(held.root, dict) else {})
    find_weights(held.root, "hostile.pt")


def main(how: str) -> None:
    """Read all programs and print what came of each."""
    events: list[str] = []
    is_watching = False

    def watch(event: str, args: tuple[Any, ...]) -> None:
        # find_weights asks for the id() of dicts, which touches nothing.
        if not is_watching or event == "builtins.id":
            return
        events.append(event)
        if how == "pickle" and event != "pickle.find_class":
            raise PermissionError(f"not run here: {event}")

    sys.addaudithook(watch)
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY_LIMIT, now + MEMORY_LIMIT))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS_LIMIT, SECONDS_LIMIT))
    for name, make in programs().items():
        if how == "pickle" and name not in CALLS:
            continue
        data = make()
        events.clear()
        started = time.monotonic()
        is_watching = True
        try:
            (read_all_of_it if how == "inert" else pickle.loads)(data)
            outcome = "read"
        except (DFlashEvalError, PermissionError) as error:
            outcome = type(error).__name__
        finally:
            is_watching = False
        print(name, outcome, f"{time.monotonic() - started:.2f}", *events, sep="\t", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
