"""Chances at temperatures above 0: against sums in float64, and against the official accept/reject rule, sampled."""

from __future__ import annotations

import itertools
import math

import dflash.model as official
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dflash_core.acceptance.sampled import RULES, RowLogits, chances, expected_accepted

TEMPERATURES = (0.3, 1.0, 1.7)


def random_rows(seed: int, *, num_rows: int = 5, num_tokens: int = 9, spread: float = 2.0) -> RowLogits:
    generator = torch.Generator().manual_seed(seed)
    reference_R = torch.randint(num_tokens, (num_rows,), generator=generator)
    return RowLogits(
        target_RV=torch.randn(num_rows, num_tokens, generator=generator) * spread,
        draft_RU=torch.randn(num_rows, num_tokens, generator=generator) * spread,
        reference_R=reference_R,
        own_reference_R=reference_R,
    )


def plain(rows: RowLogits, temperature: float, row: int) -> tuple[list[float], list[float]]:
    """Return p and q of one row, in float64, both in the target's numbering."""
    p = torch.softmax(rows.target_RV[row].double() / temperature, dim=-1).tolist()
    own = torch.softmax(rows.draft_RU[row].double() / temperature, dim=-1).tolist()
    q = [0.0] * len(p)
    numbering = range(len(own)) if rows.target_of_U is None else rows.target_of_U.tolist()
    for token, chance in zip(numbering, own, strict=True):
        q[token] = chance
    return p, q


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(TEMPERATURES))
def test_both_rules_equal_plain_sums(seed: int, temperature: float) -> None:
    rows = random_rows(seed)
    one_hot, drawn = (chances(rows, temperature)[rule] for rule in RULES)
    for row, token in enumerate(rows.reference_R.tolist()):
        p, q = plain(rows, temperature, row)
        draft = max(range(len(q)), key=q.__getitem__)
        assert float(one_hot.accepted_R[row]) == pytest.approx(p[draft], rel=1e-5)
        assert float(one_hot.follows_R[row]) == pytest.approx(p[token] if draft == token else 0.0, rel=1e-5)
        assert float(drawn.accepted_R[row]) == pytest.approx(sum(map(min, p, q)), rel=1e-5)
        assert float(drawn.follows_R[row]) == pytest.approx(min(p[token], q[token]), rel=1e-5, abs=1e-9)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6))
def test_a_reduced_vocabulary_is_looked_up_in_the_targets(seed: int) -> None:
    """The drafter knows 4 of 9 tokens, in its own order; the text may hold others."""
    full = random_rows(seed)
    target_of_U = torch.tensor([7, 2, 5, 0])
    own_of_V = torch.full((9,), -1)
    own_of_V[target_of_U] = torch.arange(4)
    rows = full._replace(
        draft_RU=full.draft_RU[:, :4], own_reference_R=own_of_V[full.reference_R], target_of_U=target_of_U
    )
    one_hot, drawn = (chances(rows, 1.0)[rule] for rule in RULES)
    for row, token in enumerate(rows.reference_R.tolist()):
        p, q = plain(rows, 1.0, row)
        draft = max(range(len(q)), key=q.__getitem__)
        assert float(one_hot.accepted_R[row]) == pytest.approx(p[draft], rel=1e-5)
        assert float(drawn.accepted_R[row]) == pytest.approx(sum(map(min, p, q)), rel=1e-5)
        assert float(drawn.follows_R[row]) == pytest.approx(min(p[token], q[token]), rel=1e-5, abs=1e-9)
        assert float(one_hot.follows_R[row]) == pytest.approx(p[token] if draft == token else 0.0, rel=1e-5)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(TEMPERATURES), st.sampled_from(RULES))
def test_following_is_a_part_of_being_accepted_and_both_are_chances(seed: int, temperature: float, rule: str) -> None:
    found = chances(random_rows(seed, spread=8.0), temperature)[rule]  # type: ignore[arg-type]
    assert (found.follows_R >= 0).all()
    assert (found.follows_R <= found.accepted_R).all()
    assert (found.accepted_R <= 1).all()


def test_a_drafter_that_is_the_target_is_always_accepted_when_it_draws_and_less_when_it_does_not() -> None:
    rows = random_rows(3)
    rows = rows._replace(draft_RU=rows.target_RV)
    torch.testing.assert_close(chances(rows, 1.0)["sampled"].accepted_R, torch.ones(5, dtype=torch.float64))
    p_best_R = torch.softmax(rows.target_RV.double(), dim=-1).amax(dim=-1)
    torch.testing.assert_close(chances(rows, 1.0)["one_hot"].accepted_R, p_best_R, rtol=1e-5, atol=0)


def test_cold_chances_are_the_greedy_rule() -> None:
    """Towards temperature 0 the draft is accepted exactly where it is the target's arg-max."""
    rows = random_rows(4, num_rows=40, num_tokens=4)
    hits = (rows.target_RV.argmax(-1) == rows.draft_RU.argmax(-1)).double()
    for rule in RULES:
        torch.testing.assert_close(chances(rows, 1e-3)[rule].accepted_R, hits, rtol=0, atol=1e-3)


def monte_carlo(rows: RowLogits, temperature: float, rule: str, num_runs: int) -> list[int]:
    """Run the official rule on fixed distributions and return the accepted drafts of each run."""
    p_1RV = official._sampling_probs(rows.target_RV[None], temperature)
    # One more row: what the bonus after a whole block is drawn from.
    p_1RV = torch.cat([p_1RV, p_1RV[:, -1:]], dim=1)
    q_1RV = official._sampling_probs(rows.draft_RU[None], temperature)
    draft_1R = rows.draft_RU.argmax(-1)[None]
    if rule == "one_hot":
        q_1RV = torch.zeros_like(q_1RV).scatter(-1, draft_1R[..., None], 1.0)
    counts = []
    for _ in range(num_runs):
        drafts = draft_1R if rule == "one_hot" else official._sample_probs(q_1RV)
        counts.append(official._rejection_sample(drafts, p_1RV, q_1RV)[0])
    return counts


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_the_official_rule_sampled_on_fixed_distributions_accepts_as_much(rule: str, temperature: float) -> None:
    """Where p and q do not depend on what was accepted, the product is exact: 4 standard errors, 4000 runs."""
    torch.manual_seed(11)
    rows = random_rows(8, num_rows=4)
    rows = rows._replace(draft_RU=rows.target_RV + 0.5 * rows.draft_RU)
    found = chances(rows, temperature)[rule]  # type: ignore[arg-type]
    expected = expected_accepted(found.accepted_R[None], found.follows_R[None], torch.tensor([4]))
    counts = torch.tensor(monte_carlo(rows, temperature, rule, 4000), dtype=torch.float64)
    error = float(counts.std()) / math.sqrt(len(counts))
    assert float(counts.mean()) == pytest.approx(float(expected.teacher_forced_A), abs=4 * error)
    first = (counts >= 1).double()
    assert float(first.mean()) == pytest.approx(float(expected.first_A), abs=4 * float(first.std()) / math.sqrt(4000))
    assert 0.3 < float(expected.teacher_forced_A) < 3.5


class TestExpectedAccepted:
    def test_a_block_counted_by_hand(self) -> None:
        accepted = torch.tensor([[0.5, 0.8, 0.9]], dtype=torch.float64)
        follows = torch.tensor([[0.4, 0.0, 0.9]], dtype=torch.float64)
        found = expected_accepted(accepted, follows, torch.tensor([3]))
        assert float(found.first_A) == 0.5
        assert float(found.teacher_forced_A) == pytest.approx(0.5 + 0.4 + 0.36)
        assert float(found.at_least_A) == pytest.approx(0.5 + 0.4 * 0.8)

    @given(st.integers(0, 10**6), st.integers(0, 4))
    def test_it_equals_plain_products_and_positions_beyond_the_text_add_nothing(
        self, seed: int, available: int
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        accepted = torch.rand(1, 4, generator=generator, dtype=torch.float64)
        follows = accepted * torch.rand(1, 4, generator=generator, dtype=torch.float64)
        a, m = accepted[0].tolist(), follows[0].tolist()
        found = expected_accepted(accepted, follows, torch.tensor([available]))
        whole = sum(math.prod(a[: place + 1]) for place in range(available))
        least = sum(math.prod(m[:place]) * a[place] for place in range(available))
        assert float(found.teacher_forced_A) == pytest.approx(whole, abs=1e-12)
        assert float(found.at_least_A) == pytest.approx(least, abs=1e-12)
        assert float(found.first_A) == (a[0] if available else 0.0)
        assert float(found.first_A) <= float(found.at_least_A) + 1e-12
        assert float(found.at_least_A) <= float(found.teacher_forced_A) + 1e-12 <= available + 1e-9

    def test_no_blocks_and_no_positions_are_counted(self) -> None:
        empty = torch.zeros(0, 3, dtype=torch.float64)
        assert [tensor.tolist() for tensor in expected_accepted(empty, empty, torch.zeros(0))] == [[], [], []]
        none = torch.zeros(2, 0, dtype=torch.float64)
        assert [one.tolist() for one in expected_accepted(none, none, torch.zeros(2))] == [[0.0, 0.0]] * 3


def next_distributions(path: tuple[int, ...], which: int) -> Tensor:
    """Return what a made-up model says after some tokens: another distribution after every text."""
    seed = which + 2 * sum((token + 1) * 7**place for place, token in enumerate(path))
    return torch.randn(4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 1.5


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("seed", range(6))
def test_at_least_bounds_the_free_running_loop_and_the_first_position_is_its_own(rule: str, seed: int) -> None:
    """A target whose choice depends on the text, three independent rows of drafts; every path is listed."""
    generator = torch.Generator().manual_seed(seed)
    draft_RU = torch.randn(3, 4, generator=generator) * 1.5
    text: tuple[int, ...] = ()
    for _ in range(3):
        text = (*text, int(next_distributions(text, seed).argmax()))
    target_RV = torch.stack([next_distributions(text[:place], seed) for place in range(3)])
    rows = RowLogits(target_RV, draft_RU, torch.tensor(text), torch.tensor(text))
    found = chances(rows, 1.0)[rule]  # type: ignore[arg-type]
    expected = expected_accepted(found.accepted_R[None], found.follows_R[None], torch.tensor([3]))

    q = torch.softmax(draft_RU.double(), dim=-1)
    if rule == "one_hot":
        q = torch.nn.functional.one_hot(draft_RU.argmax(-1), 4).double()
    free, on_text = 0.0, 0.0
    for length in (1, 2, 3):
        for path in itertools.product(range(4), repeat=length):
            # The chance that these are the drafts and that all of them are accepted.
            chance = math.prod(
                min(float(torch.softmax(next_distributions(path[:place], seed), -1)[token]), float(q[place, token]))
                for place, token in enumerate(path)
            )
            free += chance
            on_text += chance if path[:-1] == text[: length - 1] else 0.0
    assert float(expected.at_least_A) == pytest.approx(on_text, rel=1e-5)
    assert on_text <= free + 1e-12
