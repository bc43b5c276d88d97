"""Out of memory in spite of a plan: half at once from then on, said in the log, and the same numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_core.drafter.extra_metrics import ExtraMetrics, ExtraSettings
from dflash_core.drafter.head import make_head
from dflash_core.drafter.model import Anchors, Drafter, LayerContext
from dflash_core.drafter.scoring import score_transcripts
from dflash_core.drafter.slices import Slices
from dflash_core.drafter.spec import expected_shapes
from dflash_core.errors import DoesNotFit
from dflash_core.target.transcripts import Transcript
from tests.support.drafter_specs import small_spec

SPEC = small_spec(vocab_size=40, block_size=4)
TEXTS = ((30, 17), (5, 21))
SETTINGS = ExtraSettings(sweep_block_sizes=(2,), recall_ks=(1, 3), tree_budgets=(4,))


class Cramped(Drafter):
    """A drafter on a device that has room for some tokens and some blocks at once."""

    tokens = blocks = 10**6

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.tried: list[tuple[str, int]] = []

    def _read_part(self, features_TF: Tensor, contexts: Sequence[LayerContext], first: int) -> None:
        self._take("tokens", len(features_TF))
        super()._read_part(features_TF, contexts, first)

    def draft_hidden(self, contexts: Any, anchors: Sequence[Anchors], num_slots: int) -> list[Tensor]:
        self._take("blocks", sum(len(one.position_A) for one in anchors))
        return super().draft_hidden(contexts, anchors, num_slots)

    def _take(self, what: str, count: int) -> None:
        self.tried.append((what, count))
        if count > getattr(self, what):
            raise torch.OutOfMemoryError("CUDA out of memory")


def score(
    *, tokens: int = 10**6, blocks: int = 10**6, rows_of_logits: int = 10**6
) -> tuple[Cramped, list[dict[str, Any]], dict[str, Any]]:
    generator = torch.Generator().manual_seed(3)
    weights = {name: 0.2 * torch.randn(shape, generator=generator) for name, shape in expected_shapes(SPEC).items()}
    table = torch.randn(40, 64, generator=generator)
    texts = [
        Transcript(
            id=f"p{number}",
            prompt_ids=(3,) * num_prompt,
            response_ids=tuple(torch.randint(40, (num_response,), generator=generator).tolist()),
            stop_reason="stop",
        )
        for number, (num_prompt, num_response) in enumerate(TEXTS)
    ]
    features = [torch.randn(one.num_tokens, 3 * 64, generator=generator) for one in texts]
    drafter = Cramped(SPEC, weights, table, device=torch.device("cpu"), dtype=torch.float32)
    drafter.tokens, drafter.blocks = tokens, blocks
    head = make_head(table, drafter, weights)
    logits_of = head.logits

    def logits(hidden_RD: torch.Tensor) -> torch.Tensor:
        if len(hidden_RD) > rows_of_logits:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return logits_of(hidden_RD)

    head.logits = logits  # type: ignore[method-assign]
    extras = ExtraMetrics(head, SETTINGS)
    rows = score_transcripts(
        drafter,
        head,
        texts,
        features.__getitem__,
        torch.ones(sum(one.num_tokens for one in texts)),
        block_size=4,
        max_new_tokens=21,
        anchors="all",
        extras=extras,
    )
    return drafter, rows, extras.rows()


def test_with_little_room_for_tokens_and_blocks_the_numbers_are_the_same(caplog: pytest.LogCaptureFixture) -> None:
    _, rows, extras = score()
    drafter, cramped_rows, cramped_extras = score(tokens=12, blocks=3)
    assert cramped_rows == rows
    assert cramped_extras == extras
    assert drafter.context_tokens == 11, "47, 23, 11"
    told = [record.getMessage() for record in caplog.records]
    assert told[:2] == [
        "out of memory with 47 tokens at once; going on with 23",
        "out of memory with 23 tokens at once; going on with 11",
    ]
    assert any("blocks at once" in message for message in told)
    too_many = [pair for pair in drafter.tried if pair[1] > getattr(drafter, pair[0])]
    # Tokens twice; blocks of the main walk 36, 18, 9, 4; of the extras their own: 36 on the way to 2, or less.
    assert len(too_many) <= 2 + 4 + 6, "what did not fit is halved and not tried again"


def test_with_little_room_for_logits_each_block_is_counted_once() -> None:
    _, rows, extras = score()
    assert score(rows_of_logits=3)[1:] == (rows, extras), "3 rows are one block"
    with pytest.raises(DoesNotFit, match="no room for a single block"):
        score(rows_of_logits=2)


@pytest.mark.parametrize(("room", "what"), [({"tokens": 0}, "token"), ({"blocks": 0}, "block")])
def test_without_room_for_a_single_one_it_says_so(room: dict[str, int], what: str) -> None:
    with pytest.raises(DoesNotFit, match=f"no room for a single {what} beside the drafter and the context"):
        score(**room)


def test_halving_counts_from_what_was_tried() -> None:
    """A pass may hold fewer blocks than are allowed at once: half of those is what has a chance."""
    slices = Slices(num_anchors=256)
    slices.halve(30, torch.OutOfMemoryError("x"))
    assert (slices.num_anchors, slices.num_halvings) == (15, 1)
    with pytest.raises(DoesNotFit):
        slices.halve(1, torch.OutOfMemoryError("x"))
