"""Whether a model's layers can be run one after the other outside its forward pass with the same result.

That holds where each layer reads what the one before returned and nothing else that depends on it. It is tried out
on a few tokens without any layer's weights: recorders return marked values, and every input, every argument and
the shape of what the head reads must be as expected.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dflash_core.errors import DFlashEvalError
from dflash_core.target.bare_model import CannotSplit
from dflash_core.target.layer_calls import Call, Recorder, Stop, is_same, passes_state, replaced

Wrap = Callable[[Tensor], Any]
_MARKS = (1.0, -3.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Structure:
    """How a model's layers are connected."""

    wrap: Wrap
    """Hidden states to what a layer returns: the tensor itself, or a tuple."""
    passes_state: bool
    """Layers are given something that they may write into for later ones to read."""


class Probe:
    """Runs a model whose layers are recorders."""

    def __init__(self, model: Any, recorders: Sequence[Recorder], norm: nn.Module, head: nn.Linear) -> None:
        self._model = model
        self._recorders = recorders
        self._norm = norm
        self._head = head

    def examine(self, ids_1T: Tensor) -> Structure:
        """Return how the layers are connected.

        Raises:
            CannotSplit: they are no chain, or what they are given depends on their results.
        """
        try:
            for wrap in (lambda hidden: hidden, lambda hidden: (hidden,)):
                calls = self._calls_of_chain(ids_1T, wrap)
                if calls is not None and self._head_reads_every_row(ids_1T):
                    return Structure(wrap=wrap, passes_state=any(passes_state(call) for call in calls))
        except (CannotSplit, DFlashEvalError):
            raise
        except Exception as error:  # whatever a model's own code does with values that it does not expect
            text = " ".join(str(error).split())[:200]
            raise CannotSplit(f"its forward pass does not run without its layers: {text}") from error
        raise CannotSplit("its layers do not form a chain, or what they are given depends on their results")

    def _calls_of_chain(self, ids_1T: Tensor, wrap: Wrap) -> list[Call] | None:
        """Return what the layers are given where each reads what the one before returned, else None."""
        runs = [self._run_marked(ids_1T, wrap, mark) for mark in _MARKS]
        if any(run is None for run in runs):
            return None
        one, other = (run or [] for run in runs)
        return one if all(is_same(a, b) for a, b in zip(one, other, strict=True)) else None

    def _run_marked(self, ids_1T: Tensor, wrap: Wrap, mark: float) -> list[Call] | None:
        """Have layer i return the mark times i + 1, and return the arguments if all read what was returned."""
        returned: list[Tensor] = []
        is_chain = True

        def read(hidden: Tensor) -> None:
            nonlocal is_chain
            is_chain &= not returned or (hidden.shape == returned[-1].shape and torch.equal(hidden, returned[-1]))

        def answer(hidden: Tensor) -> Any:
            read(hidden)
            marked = torch.full_like(hidden, mark * (len(returned) + 1))
            returned.append(marked.clone())
            return wrap(marked)

        def stop(hidden: Tensor, *_: Any) -> Tensor:
            read(hidden)
            raise Stop

        for recorder in self._recorders:
            recorder.answer, recorder.call = answer, None
        try:
            with replaced(self._norm, stop):
                self._model(input_ids=ids_1T, use_cache=False)
        except Stop:
            calls = [recorder.call for recorder in self._recorders if recorder.call is not None]
            return calls if is_chain and len(calls) == len(returned) == len(self._recorders) else None
        except (TypeError, IndexError, AttributeError, ValueError, RuntimeError):
            return None  # a layer that should have returned a tuple, or should not have
        return None

    def _head_reads_every_row(self, ids_1T: Tensor) -> bool:
        """Tell whether the head reads as many rows as the final norm returns."""
        seen: list[Tensor] = []

        def catch(hidden: Tensor, *_: Any) -> Tensor:
            seen.append(hidden)
            raise Stop

        rows = torch.zeros(1, ids_1T.shape[1], self._head.in_features, dtype=self._head.weight.dtype)
        with replaced(self._norm, lambda *_: rows), replaced(self._head, catch), suppress(Stop):
            self._model(input_ids=ids_1T, use_cache=False)
        return len(seen) == 1 and seen[0].shape == rows.shape
