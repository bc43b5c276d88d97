"""Making stored states: the target runs layer by layer over all transcripts, or whole where that is not the same.

Each part is published as soon as its step is done, so that what a killed run finished is never computed again;
the residual stream between is kept by `layer_scratch`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from dflash_core import progress
from dflash_core.store import Artifact, Store
from dflash_core.target import whole_model
from dflash_core.target.agreement import judge_agreement
from dflash_core.target.bare_model import CannotSplit
from dflash_core.target.choices import Choices, HeadSlice, Rows, judge, judged_places, num_choosable
from dflash_core.target.extraction_plan import ExtractionPlan, check_plan, make_extraction_plan
from dflash_core.target.layer_major import LayerMajor
from dflash_core.target.layer_scratch import EMBEDDINGS, LayerScratch
from dflash_core.target.layer_weights import LayerWeights
from dflash_core.target.loading import Target
from dflash_core.target.parts import CHOICES, FINAL, Part, part_name
from dflash_core.target.runtime import DTYPES
from dflash_core.target.state_files import read_tensors, write_rows
from dflash_core.target.transcripts import Transcript

_WEIGHTS_PER_WIDTH_SQUARED = 12
"""Of a decoder layer, roughly: what the head costs in layers, for the time left."""


class Extraction:
    """One run of a target over its transcripts."""

    def __init__(
        self,
        store: Store,
        target: Target,
        transcripts: Sequence[Transcript],
        *,
        kind: str,
        keys: Mapping[Part, str],
        compute_dtype: str,
        store_dtype: str,
    ) -> None:
        self._store = store
        self._target = target
        self._sequences = [[*one.prompt_ids, *one.response_ids] for one in transcripts]
        self._lengths = [(len(one.prompt_ids), len(one.response_ids)) for one in transcripts]
        self._kind = kind
        self._keys = keys
        self._compute_dtype = compute_dtype
        self._store_dtype = store_dtype
        self._made: dict[Part, Artifact] = {}
        self._warnings: list[str] = []
        self._method = "layer by layer"
        self._began = time.monotonic()

    def make(self, missing: Sequence[Part], run: str) -> dict[Part, Artifact]:
        """Make and publish some parts; the caller keeps other processes out.

        Args:
            missing: parts that the store lacks.
            run: key of what an interrupted run leaves.
        """
        try:
            weights = LayerWeights(self._target, self._compute_dtype)
            plan = make_extraction_plan(weights, self._sequences, self._compute_dtype)
            check_plan(plan, self._target.name, self._compute_dtype, self._store.root)
            layer_major = LayerMajor(weights, self._sequences, arguments_bytes=plan.argument_bytes)
        except CannotSplit as error:
            self._run_whole(missing, str(error))
            return self._made
        with self._store.unfinished(self._kind, run) as folder:
            width, dtype = self._target.config.hidden_size, DTYPES[self._compute_dtype]
            lengths = [len(sequence) for sequence in self._sequences]
            with LayerScratch(folder, lengths, width, dtype) as scratch:
                self._run_layers(layer_major, scratch, plan, missing)
        return self._made

    def _run_layers(
        self, layer_major: LayerMajor, scratch: LayerScratch, plan: ExtractionPlan, missing: Sequence[Part]
    ) -> None:
        depth = layer_major.weights.depth
        steps = {part: part if isinstance(part, int) else depth for part in missing}
        self._begin(layer_major, scratch, min(steps.values()), depth)
        clock = _Clock(self._kind, self._sequences, depth, scratch.finished, max(steps.values()))
        while True:
            step = scratch.finished
            for part in missing:
                if steps[part] == step and part != CHOICES:
                    self._publish_states(part, scratch)
            if step == max(steps.values()):
                break
            following = EMBEDDINGS if step is None else step + 1
            on_transcript = clock.starting(following)
            if following == EMBEDDINGS:
                layer_major.run_embeddings(scratch, on_transcript)
            elif following < depth:
                layer_major.run_layer(following, scratch, on_transcript)
            else:
                layer_major.run_norm(scratch, on_transcript)
        if CHOICES in missing:
            self._publish_choices(self._judge(layer_major, scratch, plan, clock))

    def _begin(self, layer_major: LayerMajor, scratch: LayerScratch, first: int, depth: int) -> None:
        """Start from the last step at or before the first missing one that is there: left by a killed run, or stored.

        A stored state counts only where storing it lost nothing, and nothing else goes from layer to layer.
        """
        if scratch.finished is not None and scratch.finished > first:
            scratch.forget()
        stored, computed = DTYPES[self._store_dtype], DTYPES[self._compute_dtype]
        if torch.promote_types(stored, computed) != stored or layer_major.passes_state:
            return
        least = EMBEDDINGS if scratch.finished is None else scratch.finished
        for step in range(first if first == depth else first - 1, least, -1):
            part: Part = FINAL if step == depth else step
            found = self._store.find(self._kind, self._keys[part])
            if found is None:
                continue
            (hidden_TD,) = read_tensors(found.file(f"{part_name(part)}.safetensors"), "hidden")
            start = 0
            for index, sequence in enumerate(self._sequences):
                scratch.write(index, hidden_TD[start : start + len(sequence)][None])
                start += len(sequence)
            scratch.finish(step)
            return

    def _judge(self, layer_major: LayerMajor, scratch: LayerScratch, plan: ExtractionPlan, clock: _Clock) -> Choices:
        """Ask the head, slice by slice, about every place whose next token is part of a response."""
        weights = layer_major.weights
        vocabulary = min(weights.num_head_rows, num_choosable(self._target))
        places = judged_places(self._lengths)
        ids_T = torch.tensor([token for sequence in self._sequences for token in sequence])

        def slices() -> Iterator[HeadSlice]:
            for first in range(0, vocabulary, plan.head_rows):
                last = min(first + plan.head_rows, vocabulary)
                weights.load_head_slice(first, last)
                yield HeadSlice(first, last, layer_major.logits)
            weights.free_head()

        def rows(numbers: Tensor) -> Rows:
            some = places[numbers]
            return Rows(scratch.gather(some), ids_T[some], ids_T[some + 1])

        num_slices = -(-vocabulary // plan.head_rows)
        on_rows = clock.starting_head(len(places) * num_slices, vocabulary / weights.num_head_rows, weights)
        return judge(slices, rows, len(places), on_rows=on_rows).spread(places, len(ids_T))

    def _run_whole(self, missing: Sequence[Part], why: str) -> None:
        self._method = "whole model"
        self._warnings.append(f"target {self._target.name!r} was held in memory as a whole, for {why}")
        taken = whole_model.run(
            self._target,
            self._sequences,
            self._lengths,
            layers=[part for part in missing if isinstance(part, int)],
            compute_dtype=self._compute_dtype,
            store_dtype=DTYPES[self._store_dtype],
            stage=self._kind,
        )
        for part in missing:
            if part == CHOICES:
                self._publish_choices(taken.choices)
            else:
                self._publish(part, taken.final if part == FINAL else taken.layers[int(part)])

    def _publish_states(self, part: Part, scratch: LayerScratch) -> None:
        self._publish(part, lambda: (scratch.read(index)[0] for index in range(len(self._sequences))))

    def _publish(self, part: Part, rows: Callable[[], Iterator[Tensor]] | Sequence[Tensor]) -> None:
        num_tokens, width = sum(map(len, self._sequences)), self._target.config.hidden_size
        dtype = DTYPES[self._store_dtype]

        def write(folder: Path) -> dict[str, Any]:
            parts = rows() if callable(rows) else rows
            write_rows(folder / f"{part_name(part)}.safetensors", "hidden", (num_tokens, width), dtype, parts)
            return self._meta(part, num_tokens) | {
                "store_dtype": self._store_dtype,
                "convention": "residual, before the next norm" if isinstance(part, int) else "after the final norm",
                "width": width,
            }

        self._made[part] = self._store.build(self._kind, self._keys[part], write)

    def _publish_choices(self, choices: Choices) -> None:
        agreement = judge_agreement(choices, self._lengths)

        def write(folder: Path) -> dict[str, Any]:
            names = ("margin", "chosen", "rank", "log_probability")
            save_file({name: getattr(choices, name) for name in names}, folder / f"{CHOICES}.safetensors")
            return self._meta(CHOICES, len(choices.margin)) | {
                "num_judged": agreement.num_tokens,
                "num_not_greedy": agreement.num_tokens - agreement.num_greedy,
                "num_near_ties": agreement.num_near_ties,
                "warnings": [*self._warnings, *([agreement.warning] if agreement.warning else [])],
            }

        self._made[CHOICES] = self._store.build(self._kind, self._keys[CHOICES], write)

    def _meta(self, part: Part, num_tokens: int) -> dict[str, Any]:
        return {
            "part": part,
            "compute_dtype": self._compute_dtype,
            "num_tokens": num_tokens,
            "method": self._method,
            # Of the run up to here: about what it takes to have this part again.
            "seconds": round(time.monotonic() - self._began, 3),
        }


class _Clock:
    """Reports how far a run is, in tokens times layers; the head counts as the layers that it costs."""

    def __init__(
        self, stage: str, sequences: Sequence[Sequence[int]], depth: int, finished: int | None, last: int
    ) -> None:
        self._stage = stage
        self._lengths = [len(sequence) for sequence in sequences]
        self._depth = depth
        begin = 0 if finished is None else finished + 1
        self._total = float(sum(self._lengths) * max(0, min(last, depth - 1) + 1))
        self._done = float(sum(self._lengths) * min(begin, depth))

    def starting(self, step: int) -> Callable[[], None]:
        """Return what is to be called after every transcript of a step."""
        done = iter(range(1, len(self._lengths) + 1))
        is_layer = 0 <= step < self._depth
        name = f"layer {step + 1} of {self._depth}" if is_layer else ("embeddings" if step < 0 else "final norm")

        def on_transcript() -> None:
            number = next(done)
            if is_layer:
                self._done += self._lengths[number - 1]
            detail = f"{name}, transcript {number} of {len(self._lengths)}"
            self._tell(self._done, detail)

        return on_transcript

    def _tell(self, done: float, detail: str) -> None:
        """Report in layers; a layer over all transcripts is as much as they have tokens."""
        progress.report(self._stage, done, self._total, detail, unit="layers", per_unit=max(1, sum(self._lengths)))

    def starting_head(self, num_rows: int, share: float, weights: LayerWeights) -> Callable[[int], None]:
        """Return what is to be called with the rows of each block that the head was asked about."""
        width = weights.target.config.hidden_size
        layers = weights.num_head_rows * share / (_WEIGHTS_PER_WIDTH_SQUARED * width)
        worth = layers * sum(self._lengths) / max(num_rows, 1)
        before, self._total = self._done, self._total + num_rows * worth
        asked = 0

        def on_rows(count: int) -> None:
            nonlocal asked
            asked += count
            self._tell(before + asked * worth, "the target's choices")

        return on_rows
