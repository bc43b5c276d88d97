"""A target run layer by layer over all transcripts: every layer's weights are read once, one layer is resident.

transformers' own forward pass prepares what its layers get: masks, rotary tables, inputs of its own kind. So it
is run, with every decoder layer replaced by a recorder that hands its input on and keeps the arguments; what the
recorder kept is then given to the real layer. That is the same sequence of operations on the same numbers, bit
for bit, as long as nothing happens between the layers, which `layer_probe` tries out before any layer is read.

    step   -1           0 .. depth-1                depth
    state  embeddings   after that decoder layer    after the final norm, the head's input
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dflash_core.target import runtime
from dflash_core.target.bare_model import CannotSplit
from dflash_core.target.layer_calls import Arguments, Call, Recorder, Stop, replaced
from dflash_core.target.layer_probe import Probe
from dflash_core.target.layer_scratch import EMBEDDINGS, LayerScratch
from dflash_core.target.layer_weights import LayerWeights

_PROBE_TOKENS = 6


class LayerMajor:
    """Runs the steps of a target over transcripts."""

    def __init__(self, weights: LayerWeights, sequences: Sequence[Sequence[int]], *, arguments_bytes: int) -> None:
        """Load what lies beside the layers and try out whether the model can be split.

        Args:
            weights: the model without weights.
            sequences: token ids of each transcript.
            arguments_bytes: memory that masks and other arguments may take; beyond, they are made anew per layer.

        Raises:
            CannotSplit: something happens between the layers.
        """
        self.weights = weights
        self._sequences = [torch.tensor([list(sequence)]) for sequence in sequences]
        self._recorders = [Recorder(layer) for layer in weights.layers]
        self._arguments = Arguments(arguments_bytes)
        weights.load_outer()
        weights.decoder.layers = nn.ModuleList(self._recorders)
        self._norm = weights.decoder.norm
        with torch.inference_mode():
            probe = Probe(weights.model, self._recorders, self._norm, weights.head)
            structure = probe.examine(self._sequences[0][:, :_PROBE_TOKENS])
            weights.want_rows([token for sequence in sequences for token in sequence])
        for recorder in self._recorders:
            recorder.answer = structure.wrap
        self.passes_state = structure.passes_state
        """Layers are given something that they may write into for later ones to read."""

    @property
    def has_shared_state(self) -> bool:
        """Tell whether layers passed something on beside the residual stream: the run cannot be taken up from here."""
        return self._arguments.has_shared_state

    @torch.inference_mode()
    def run_embeddings(self, scratch: LayerScratch, on_transcript: Callable[[], None]) -> None:
        """Write the embeddings of every transcript: step -1."""
        for index in range(len(self._sequences)):
            calls = self._record(index)
            self._arguments.keep(index, calls)
            inputs = self._recorders[0].inputs
            assert inputs is not None
            scratch.write(index, inputs)
            on_transcript()
        scratch.finish(EMBEDDINGS)

    @torch.inference_mode()
    def run_layer(self, layer: int, scratch: LayerScratch, on_transcript: Callable[[], None]) -> None:
        """Run one decoder layer on every transcript; `scratch` must hold the step before."""
        assert scratch.finished == layer - 1, (scratch.finished, layer)
        with self.weights.loaded_layer(layer) as module:
            for index in range(len(self._sequences)):
                calls = self._arguments.find(index)
                if calls is None:
                    calls = self._record(index)
                    self._arguments.keep(index, calls)
                call = self._arguments.with_shared_state(index, calls[layer])
                output = module(scratch.read(index), *call.args, **call.kwargs)
                scratch.write(index, output[0] if isinstance(output, tuple) else output)
                on_transcript()
        scratch.finish(layer, can_resume=not self.has_shared_state)

    @torch.inference_mode()
    def run_norm(self, scratch: LayerScratch, on_transcript: Callable[[], None]) -> None:
        """Apply the final norm to every transcript: step `depth`."""
        assert scratch.finished == self.weights.depth - 1, scratch.finished
        for index in range(len(self._sequences)):
            scratch.write(index, self._norm(scratch.read(index)))
            on_transcript()
        scratch.finish(self.weights.depth)

    @torch.inference_mode()
    def logits(self, final_RD: Tensor, ids_R: Tensor) -> Tensor:
        """Return logits_RV of the head's loaded slice, soft-capped or scaled by the model's own code.

        The model's forward pass runs with the given rows put in place of its final norm's result.
        """
        with replaced(self._norm, lambda *_: final_RD[None]):
            output = self.weights.model(input_ids=ids_R[None], use_cache=False)
        logits: Tensor = output.logits[0]
        return logits

    def _record(self, index: int) -> list[Call]:
        """Run the model's forward pass up to the final norm and return what each layer was given."""
        if index not in self._arguments.counted:
            runtime.count_forward_pass()
            self._arguments.counted.add(index)
        self._run_to_norm(self._sequences[index])
        calls = [recorder.call for recorder in self._recorders]
        for recorder in self._recorders:
            recorder.call = None
        return [call for call in calls if call is not None]

    def _run_to_norm(self, ids_1T: Tensor) -> None:
        def stop(*_: Any) -> Tensor:
            raise Stop

        with replaced(self._norm, stop):
            try:
                self.weights.model(input_ids=ids_1T, use_cache=False)
            except Stop:
                return
        raise CannotSplit("its final norm is not called")
