"""Plain values that lie beside the weights, and the names in a pickle that no checkpoint needs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from dflash_core.checkpoints.pickle_values import Inert, is_unicode
from dflash_core.checkpoints.values import Facts

MAX_FACTS = 2000
MAX_LIST_ITEMS = 1024
MAX_TEXT = 4096
MAX_ALL_TEXT = 1 << 20
MAX_DEPTH = 5
SETTINGS = frozenset({"args", "config", "hparams", "hyper_parameters", "training_args"})
"""Where what a trainer was asked to do lies, not how far it got."""
MAX_VISITS = 200_000

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
    | numpy\.dtypes\.\w+ | numpy\.random\.\w+\.\w+
    | _codecs\.encode | copyreg\._reconstructor | copy_reg\._reconstructor
    | (builtins|__builtin__)\.(object|set|frozenset|list|dict|tuple|slice|x?range|Ellipsis)
    | (builtins|__builtin__)\.(int|long|float|complex|str|bytes|bytearray|bool)
    | omegaconf\.[\w.]+ | typing\.\w+
    | datetime\.(datetime|date|time|timedelta|timezone)
    )$""",
    re.VERBOSE,
)


def odd_names(names: Iterable[str]) -> tuple[str, ...]:
    """Return the classes and functions that ordinary checkpoints do not name, sorted."""
    return tuple(sorted(name for name in names if not _ORDINARY.match(name)))


def collect_facts(root: Mapping[Any, Any]) -> Facts:
    """Return the plain values of a checkpoint's dict, those of nested dicts and objects dotted.

    `{"step": 3, "args": Namespace(block_size=8)}` gives `{"step": 3, "args.block_size": 8}`. Members of
    enums give their values, configs of OmegaConf theirs. State of the optimizer, scheduler and random
    generators is left out.
    """
    collector = _Collector()
    collector.collect(root, "", (id(root),))
    return collector.facts


def step_of(facts: Facts) -> int | None:
    """Return the training step that the content states, if it does."""
    for key in ("global_step", "step"):
        value = facts.get(key)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    # Distributed checkpoints keep the path to each value: `app.global_step`, `train_state.step`.
    for key in ("global_step", "step"):
        values = {
            value
            for name, value in facts.items()
            if name.rpartition(".")[2] == key and type(value) is int and name.partition(".")[0] not in SETTINGS
        }
        if len(values) == 1:
            return values.pop()
    return None


class _Collector:
    """Walks nested dicts and objects; what is named often or holds itself is walked within bounds."""

    def __init__(self) -> None:
        self.facts: Facts = {}
        self._visits_left = MAX_VISITS
        self._chars_left = MAX_ALL_TEXT

    def collect(self, holder: Mapping[Any, Any], prefix: str, above: tuple[int, ...]) -> None:
        for key, value in holder.items():
            self._visits_left -= 1
            if len(self.facts) >= MAX_FACTS or self._visits_left < 0:
                return
            if not isinstance(key, str) or len(key) > 200 or TRAINING_STATE.match(key):
                continue
            value = _unwrapped(value)
            nested = value.state if isinstance(value, Inert) else value
            plain = self._plain(value)
            if plain is not None:
                self.facts[prefix + key] = plain
            elif isinstance(nested, dict) and len(above) < MAX_DEPTH and id(nested) not in above:
                self.collect(nested, f"{prefix}{key}.", (*above, id(nested)))

    def _plain(self, value: Any) -> Any:
        """Return a plain value or a list of them, or None for anything else and for what is too long."""
        if not isinstance(value, list | tuple):
            return value if _is_plain(value) and self._has_room([value]) else None
        if len(value) > MAX_LIST_ITEMS:
            return None
        self._visits_left -= len(value)
        values = [_unwrapped(item) for item in value]
        return values if all(map(_is_plain, values)) and self._has_room(values) else None

    def _has_room(self, values: Iterable[Any]) -> bool:
        self._chars_left -= sum(len(value) for value in values if isinstance(value, str))
        return self._chars_left >= 0


def _unwrapped(value: Any) -> Any:
    """Return the value inside an enum's member, a device or a node of OmegaConf; anything else as it is."""
    for _ in range(2):  # a node can hold a member of an enum
        if not isinstance(value, Inert):
            return value
        if value.made_by.startswith("omegaconf.") and ("_val" in value.state or "_content" in value.state):
            value = value.state["_val"] if "_val" in value.state else value.state["_content"]
        elif len(value.args) == 1 and not value.state and not value.items and _is_class(value.made_by):
            value = value.args[0]
    return value


def _is_class(name: str) -> bool:
    """Tell whether a name is that of a class by its capital; `torch.device` is one without."""
    return name == "torch.device" or name.rpartition(".")[2].lstrip("_")[:1].isupper()


def _is_plain(value: Any) -> bool:
    if isinstance(value, int):
        return value.bit_length() <= 64
    return isinstance(value, float) or (isinstance(value, str) and len(value) <= MAX_TEXT and is_unicode(value))
