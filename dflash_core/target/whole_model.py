"""The way for models that cannot be split: the whole target in memory, one forward pass per transcript."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dflash_core import progress
from dflash_core.target.choices import Choices, HeadSlice, Rows, judge, judged_places, num_choosable
from dflash_core.target.loading import Target
from dflash_core.target.runtime import decoder_of, load_model


@dataclass(frozen=True, kw_only=True, slots=True)
class Taken:
    """What one run took; a list holds one tensor per transcript."""

    layers: dict[int, list[Tensor]]
    final: list[Tensor]
    choices: Choices


@torch.inference_mode()
def run(
    target: Target,
    sequences: Sequence[Sequence[int]],
    lengths: Sequence[tuple[int, int]],
    *,
    layers: Sequence[int],
    compute_dtype: str,
    store_dtype: torch.dtype,
    stage: str,
) -> Taken:
    """Run the whole target over every transcript and keep some layers, the final states and its choices.

    Args:
        target: the model.
        sequences: token ids of each transcript.
        lengths: prompt and response tokens of each.
        layers: 0-based decoder layers.
        compute_dtype: of the forward pass.
        store_dtype: of the states that are kept.
        stage: named in progress reports.

    Raises:
        DoesNotFit: the model needs more memory than is available; nothing was loaded.
    """
    model = load_model(target, compute_dtype)
    decoder = decoder_of(model)
    limit = num_choosable(target)
    kept: dict[int, list[Tensor]] = {layer: [] for layer in layers}
    final: list[Tensor] = []
    judged: list[Choices] = []
    hooks = [decoder.layers[layer].register_forward_hook(_keeper(kept[layer], store_dtype)) for layer in layers]
    total, done = sum(map(len, sequences)), 0
    try:
        for number, (sequence, (num_prompt, num_response)) in enumerate(zip(sequences, lengths, strict=True)):
            ids_T = torch.tensor(sequence)
            normed: list[Tensor] = []
            hook = decoder.norm.register_forward_hook(_keeper(normed, None))
            try:
                # All rows: some models leave out of their last layers what no logits were asked for.
                output = model(input_ids=ids_T[None], use_cache=False)
            finally:
                hook.remove()
            final.append(normed[-1].to(store_dtype))
            places = judged_places([(num_prompt, num_response)])
            judged.append(_judge(output.logits[0], ids_T, places, limit))
            done += len(sequence)
            progress.report(stage, done, total, f"transcript {number + 1} of {len(sequences)}", unit="tokens")
    finally:
        for hook in hooks:
            hook.remove()
    choices = Choices(
        chosen=torch.cat([one.chosen for one in judged]),
        margin=torch.cat([one.margin for one in judged]),
        rank=torch.cat([one.rank for one in judged]),
        log_probability=torch.cat([one.log_probability for one in judged]),
    )
    return Taken(layers=kept, final=final, choices=choices.spread(judged_places(lengths), total))


def _judge(logits_TV: Tensor, ids_T: Tensor, places: Tensor, limit: int) -> Choices:
    """Judge one transcript from logits that are there already: they stand for the rows that the head would be asked."""
    num_tokens = min(logits_TV.shape[1], limit)
    piece = HeadSlice(0, num_tokens, lambda logits_RV, _ids: logits_RV[:, :num_tokens].clone())

    def rows(numbers: Tensor) -> Rows:
        some = places[numbers]
        return Rows(logits_TV[some], ids_T[some], ids_T[some + 1])

    return judge(lambda: iter([piece]), rows, len(places))


def _keeper(kept: list[Tensor], dtype: torch.dtype | None) -> Any:
    def keep(_module: Any, _inputs: Any, output: Any) -> None:
        hidden_1TD = output[0] if isinstance(output, tuple) else output
        # copy: later layers may add into the same memory.
        kept.append(hidden_1TD[0].to(dtype or hidden_1TD.dtype, copy=True))

    return keep
