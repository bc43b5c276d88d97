"""Plain values that lie beside the weights, and the names in a pickle that no checkpoint needs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from dflash_core.checkpoints.pickle_values import Inert
from dflash_core.checkpoints.values import Facts

MAX_FACTS = 2000
MAX_LIST_ITEMS = 1024
MAX_TEXT = 4096
MAX_DEPTH = 3

# Parts of a checkpoint that hold state of the training, not facts about the drafter.
TRAINING_STATE = re.compile(
    r"^(optim|sched|lr_sched|scaler|grad_scaler|rng|random|.*_rng|.*optimizer.*|.*scheduler.*)", re.I
)

_ORDINARY = re.compile(
    r"""^(
      torch\._utils\._rebuild_\w+ | torch\._tensor\._rebuild_from_type_v2 | torch\.Size | torch\.device | torch\.Tensor
    | torch\.(storage\.)?\w+Storage | torch\.(float|bfloat|complex|int|uint|q?u?int|bool|long|half|double)\w*
    | torch\.nn\.(parameter\.)?(Parameter|Buffer) | torch\.serialization\._get_layout
    | collections\.(OrderedDict|defaultdict|deque|Counter)
    | argparse\.Namespace | types\.SimpleNamespace
    | pathlib\.(Pure)?(Posix|Windows)?Path | pathlib\._local\.(Pure)?(Posix|Windows)?Path
    | numpy\.(dtype|ndarray|\w+\d+|bool_?) | numpy\._?core\.(multiarray\.(scalar|_reconstruct)|numeric\._frombuffer)
    | numpy\.dtypes\.\w+ | numpy\.random\._pickle\.__\w+_ctor
    | _codecs\.encode | copyreg\._reconstructor | copy_reg\._reconstructor
    | (builtins|__builtin__)\.(object|set|frozenset|list|dict|tuple|slice|range)
    | (builtins|__builtin__)\.(int|float|complex|str|bytes|bytearray|bool)
    | datetime\.(datetime|date|time|timedelta|timezone)
    )$""",
    re.VERBOSE,
)


def odd_names(names: Iterable[str]) -> tuple[str, ...]:
    """Return the classes and functions that ordinary checkpoints do not name, sorted."""
    return tuple(sorted(name for name in names if not _ORDINARY.match(name)))


def collect_facts(root: Mapping[Any, Any]) -> Facts:
    """Return the plain values of a checkpoint's dict, those of nested dicts and objects dotted.

    `{"step": 3, "args": Namespace(block_size=8)}` gives `{"step": 3, "args.block_size": 8}`. State of
    the optimizer, scheduler and random generators is left out.
    """
    facts: Facts = {}
    _collect(root, "", 1, facts)
    return facts


def step_of(facts: Facts) -> int | None:
    """Return the training step that the content states, if it does."""
    for key in ("global_step", "step"):
        value = facts.get(key)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


def _collect(holder: Mapping[Any, Any], prefix: str, depth: int, facts: Facts) -> None:
    for key, value in holder.items():
        if not isinstance(key, str) or len(key) > 200 or TRAINING_STATE.match(key):
            continue
        if len(facts) >= MAX_FACTS:
            return
        nested = value.state if isinstance(value, Inert) else value
        if _is_plain(value) or (
            isinstance(value, list | tuple) and len(value) <= MAX_LIST_ITEMS and all(map(_is_plain, value))
        ):
            facts[prefix + key] = list(value) if isinstance(value, tuple) else value
        elif isinstance(nested, dict) and depth < MAX_DEPTH:
            _collect(nested, f"{prefix}{key}.", depth + 1, facts)


def _is_plain(value: Any) -> bool:
    if isinstance(value, int):
        return value.bit_length() <= 64
    return isinstance(value, float) or (isinstance(value, str) and len(value) <= MAX_TEXT)
