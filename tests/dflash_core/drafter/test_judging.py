"""The head is asked about little, and the answer is that of asking about everything."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dflash_core.drafter import head as head_module
from dflash_core.drafter import judging
from dflash_core.drafter.head import Head, Rows
from dflash_core.drafter.judging import Blocks, Judgement

VOCAB = 6


def plain_judgement(logits_KV: Tensor, reference: Sequence[int], available: int) -> tuple[int, int]:
    """Return accepted drafts and the rank of the target's token at the first miss, from all logits."""
    for slot in range(1, available + 1):
        row = logits_KV[slot].tolist()
        token = reference[slot - 1]
        if row.index(max(row)) != token:
            return slot - 1, sum(value >= row[token] for value in row)
    return available, 0


def judge_blocks(head: Head, hidden_AKD: Tensor, reference_AP: Tensor, available_A: Tensor) -> Judgement:
    """Judge blocks whose row p predicts position anchor + p; the anchors' own tokens do not matter."""
    anchor_A = torch.zeros_like(available_A)
    return judging.judge_blocks(head, Blocks(hidden_AKD[:, 1:], anchor_A, reference_AP, available_A))


class TestJudging:
    def drafter(self, **facts: Any) -> Any:
        spec = SimpleNamespace(**({"output_multiplier": 1.0, "final_logit_softcapping": None} | facts))
        return SimpleNamespace(spec=spec, device=torch.device("cpu"), dtype=torch.float32)

    @settings(max_examples=150, deadline=None)
    @given(
        num_anchors=st.integers(1, 5),
        num_slots=st.integers(1, 5),
        seed=st.integers(0, 10**6),
        rows_at_once=st.sampled_from([1, 2, 100]),
        rows_per_call=st.sampled_from([1, 4, 96]),
        data=st.data(),
    )
    def test_asking_only_what_matters_equals_asking_everything(
        self, num_anchors: int, num_slots: int, seed: int, rows_at_once: int, rows_per_call: int, data: st.DataObject
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        hidden = torch.randint(-3, 4, (num_anchors, num_slots, 4), generator=generator).float()
        head = Head(torch.randint(-2, 3, (VOCAB, 4), generator=generator).float(), self.drafter())
        head._rows_at_once = rows_at_once
        logits = head.logits(hidden.flatten(0, 1)).view(num_anchors, num_slots, VOCAB)
        best = logits.argmax(dim=-1)[:, 1:]
        noise = torch.randint(0, VOCAB, best.shape, generator=generator)
        reference = torch.where(torch.rand(best.shape, generator=generator) < 0.7, best, noise)
        available = [data.draw(st.integers(0, num_slots - 1)) for _ in range(num_anchors)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(judging, "ROWS_PER_CALL", rows_per_call)
            patch.setattr(head_module, "RANKED_ELEMENTS", VOCAB * rows_at_once)
            judged = judge_blocks(head, hidden, reference, torch.tensor(available, dtype=torch.long))
        expected = [plain_judgement(logits[row], reference[row].tolist(), available[row]) for row in range(num_anchors)]
        assert list(zip(judged.accepted_A.tolist(), judged.miss_rank_A.tolist(), strict=True)) == expected

    def test_the_rank_of_the_targets_token_by_hand(self) -> None:
        """Slot 1 is right; slot 2 chose token 3 where the target says 0, the third best."""
        logits = torch.tensor([[0.0, 0, 0, 0, 0, 0], [0, 9, 0, 0, 0, 0], [5, 1, 7, 8, 2, 3], [9, 0, 0, 0, 0, 0]])
        head = Head(torch.eye(VOCAB), self.drafter())
        judged = judge_blocks(head, logits[None], torch.tensor([[1, 0, 0]]), torch.tensor([3]))
        assert (judged.accepted_A.tolist(), judged.miss_rank_A.tolist()) == ([1], [3])

    @pytest.mark.parametrize(
        ("rows_per_call", "expected"),
        [(1, [3, 1, 1]), (6, [5, 1]), (96, [7])],
        ids=["slot by slot", "two slots of each block, then the last of one", "all inside the text at once"],
    )
    def test_the_head_is_not_asked_after_a_miss_nor_ever_beyond_the_text(
        self, monkeypatch: pytest.MonkeyPatch, rows_per_call: int, expected: list[int]
    ) -> None:
        """Three blocks: all three drafts right, the first wrong, and one whose text ends after one draft."""
        monkeypatch.setattr(judging, "ROWS_PER_CALL", rows_per_call)
        head = Head(torch.eye(VOCAB), self.drafter())
        asked: list[int] = []
        logits = head.logits

        def noting(rows: Tensor) -> Tensor:
            asked.append(len(rows))
            return logits(rows)

        monkeypatch.setattr(head, "logits", noting)
        hidden = torch.nn.functional.one_hot(torch.tensor([[0, 1, 2, 3], [0, 5, 2, 3], [0, 1, 2, 3]]), VOCAB).float()
        reference = torch.tensor([[1, 2, 3], [1, 2, 3], [1, 0, 0]])
        judged = judge_blocks(head, hidden, reference, torch.tensor([3, 3, 1]))
        assert judged.accepted_A.tolist() == [3, 0, 1]
        assert asked == expected

    @given(st.integers(0, 10**6), st.floats(0.01, 3.0), st.none() | st.floats(10.0, 50.0))
    def test_scaling_and_soft_capping_leave_the_choice_alone(
        self, seed: int, multiplier: float, cap: float | None
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        weight, hidden = torch.randn(VOCAB, 8, generator=generator), torch.randn(5, 8, generator=generator)
        plain = Head(weight, self.drafter())
        changed = Head(weight, self.drafter(output_multiplier=multiplier, final_logit_softcapping=cap))
        assert torch.equal(changed.choose(Rows(hidden)), plain.choose(Rows(hidden)))
        expected = plain.logits(hidden).double() * multiplier
        if cap is not None:
            expected = cap * torch.tanh(expected / cap)
        torch.testing.assert_close(changed.logits(hidden).double(), expected, atol=1e-4, rtol=1e-4)

    @pytest.mark.parametrize("rows_at_once", [1, 3, 100])
    def test_the_choice_does_not_depend_on_the_slices(self, rows_at_once: int) -> None:
        head = Head(torch.randn(VOCAB, 8, generator=torch.Generator().manual_seed(0)), self.drafter())
        hidden = torch.randn(7, 8, generator=torch.Generator().manual_seed(1))
        expected = (hidden @ head._weight_VD.T).argmax(dim=1)
        head._rows_at_once = rows_at_once
        assert torch.equal(head.choose(Rows(hidden)), expected)
        assert head.choose(Rows(hidden[:0])).tolist() == []
