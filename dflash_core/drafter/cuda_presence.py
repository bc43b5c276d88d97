"""Whether torch could see a CUDA device at all: importing it only to hear that there is none takes two seconds.

It may say yes where there is none, never no where torch would see one. No is said of a torch that was built for the
CPU alone, and of one built for CUDA where the driver's library cannot be loaded, which is how torch's own CUDA
runtime finds devices, and no device file of it is there either.
"""

from __future__ import annotations

import ctypes
import re
import sys
from importlib.util import find_spec
from pathlib import Path

_BUILT_FOR = re.compile(r"^(cuda|hip)\b[^=\n]*= *(.+?) *$", re.MULTILINE)
_DEVICE_FILES = ("dev/nvidia*", "dev/nvhost*", "dev/nvmap", "dev/nvgpu", "dev/dxg", "proc/driver/nvidia")


def may_have_cuda(root: Path = Path("/")) -> bool:
    """Return False only where `torch.cuda.is_available()` would be False.

    Args:
        root: of the file system that holds `dev` and `proc`.
    """
    if "torch" in sys.modules or not sys.platform.startswith("linux"):
        return True
    built_for = _built_for()
    if built_for is None or built_for["hip"] != "None":
        return True
    return built_for["cuda"] != "None" and (_has_device_file(root) or _has_driver())


def _built_for() -> dict[str, str] | None:
    """Return what torch's own `version.py` says of `cuda` and `hip`; None where it does not say both."""
    found = find_spec("torch")
    if found is None or found.origin is None:
        return None
    try:
        text = (Path(found.origin).parent / "version.py").read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None
    said = dict(_BUILT_FOR.findall(text))
    return said if said.keys() == {"cuda", "hip"} else None


def _has_device_file(root: Path) -> bool:
    return any(next(root.glob(pattern), None) is not None for pattern in _DEVICE_FILES)


def _has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True
