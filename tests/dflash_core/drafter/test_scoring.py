"""Scoring: the head is asked little and says the same, and rows and walks are what a plain loop gives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_core import progress
from dflash_core.acceptance import walk
from dflash_core.drafter import judging, scoring
from dflash_core.drafter.footprint import USUAL, Slicing
from dflash_core.drafter.head import Head
from dflash_core.drafter.model import Drafter
from dflash_core.drafter.scoring import score_transcripts
from dflash_core.errors import DoesNotFit
from dflash_core.results.records import BLOCK_SCHEMA
from dflash_core.store import Store
from dflash_core.target.agreement import TIE_MARGIN
from dflash_core.target.head import load_embedding_and_head
from dflash_core.target.hidden_states import extract_hidden_states
from dflash_core.target.runtime import load_model
from dflash_core.target.transcripts import RenderedPrompt, Transcript, generate
from tests.support import tiny
from tests.support.scripted_drafter import VOCAB, Row, ScriptedDrafter, SmallDevice, score, transcript

TOKENS = st.integers(0, VOCAB - 1)


def plain_rows(
    response: Sequence[int], script: Sequence[Sequence[int]], block_size: int, limit: int, alignment: str
) -> list[Row]:
    """Return one row per anchor by the plainest loop."""
    rows: list[Row] = []
    for index in range(len(response) - 1):
        drafted = min(block_size - (alignment != "anchor_shifted"), limit - index - 1)
        available = min(drafted, len(response) - 1 - index)
        accepted = 0
        while accepted < available and script[index][accepted] == response[index + 1 + accepted]:
            accepted += 1
        emitted = min(accepted + 1, len(response) - 1 - index)
        rows.append({
            "anchor_index": index,
            "num_drafted": drafted,
            "num_available": available,
            "num_accepted_drafts": accepted,
            "num_emitted_tokens": emitted,
        })  # fmt: skip
    index = step = 0
    while index < len(response) - 1:
        rows[index]["walk_step"] = step
        index, step = index + rows[index]["num_emitted_tokens"], step + 1
    return rows


@st.composite
def scripted(draw: st.DrawFn) -> tuple[list[Transcript], ScriptedDrafter, int]:
    """Draw transcripts, a drafter that is right more often than not, and the limit of the responses."""
    block_size = draw(st.integers(1, 5))
    alignment = draw(st.sampled_from(["same_position", "anchor_shifted", "shifted_short"]))
    num_drafts = walk.num_drafts(block_size, alignment)
    limit = draw(st.integers(1, 9))
    transcripts, script = [], []
    for number in range(draw(st.integers(1, 4))):
        response = draw(st.lists(TOKENS, max_size=limit))
        transcripts.append(transcript(number, draw(st.integers(1, 3)), response))
        endless = [*response, *([0] * (block_size + 1))]
        following = [endless[index + 1 : index + 1 + num_drafts] for index in range(len(response))]
        script.append([
            [token if draw(st.integers(0, 3)) else draw(TOKENS) for token in tokens]
            for tokens in following
        ])  # fmt: skip
    prompts = [len(one.prompt_ids) for one in transcripts]
    return transcripts, ScriptedDrafter(script, prompts, block_size=block_size, row_alignment=alignment), limit


class TestScoring:
    @settings(max_examples=150, deadline=None)
    @given(scripted())
    def test_rows_of_every_anchor_are_those_of_a_plain_loop(
        self, drawn: tuple[list[Transcript], ScriptedDrafter, int]
    ) -> None:
        transcripts, drafter, limit = drawn
        block_size = drafter.spec.block_size
        rows = score(drafter, transcripts, anchors="all", block_size=block_size, limit=limit)
        expected = [
            {"prompt_id": one.id, "walk_step": None} | row
            for number, one in enumerate(transcripts)
            for row in plain_rows(
                one.response_ids, drafter.script[number], block_size, limit, drafter.spec.row_alignment
            )
        ]
        keys = list(expected[0]) if expected else []
        assert [{key: row[key] for key in keys} for row in rows] == expected
        assert all(row["is_on_walk"] == (row["walk_step"] is not None) for row in rows)
        assert all(set(row) == set(BLOCK_SCHEMA) for row in rows)

    @settings(max_examples=200, deadline=None)
    @given(scripted(), st.sampled_from([0, 2, 24, 10**6]), st.sampled_from([1, 3, 256]), st.sampled_from([1, 4, 96]))
    def test_the_walk_alone_gives_the_same_rows_however_far_it_drafts_ahead(
        self, drawn: tuple[list[Transcript], ScriptedDrafter, int], free_blocks: int, anchors_at_once: int, rows: int
    ) -> None:
        transcripts, drafter, limit = drawn
        block_size = drafter.spec.block_size
        every = score(drafter, transcripts, anchors="all", block_size=block_size, limit=limit)
        drafter.drafted.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(scoring, "_FREE_BLOCKS", free_blocks)
            patch.setattr(judging, "ROWS_PER_CALL", rows)
            slicing = Slicing(num_anchors=anchors_at_once)
            taken = score(drafter, transcripts, anchors="walk", block_size=block_size, limit=limit, slicing=slicing)
        assert taken == [row for row in every if row["is_on_walk"]]
        visited = {(int(row["prompt_id"][1:]), row["anchor_index"]) for row in taken}
        assert visited <= set(drafter.drafted)
        assert all(index < len(transcripts[number].response_ids) - 1 for number, index in drafter.drafted)
        if free_blocks == 0:
            assert sorted(drafter.drafted) == sorted(visited), "without a look ahead it drafts nowhere else"

    @pytest.mark.parametrize("anchors", ["walk", "all"])
    def test_a_drafter_that_is_always_right_fills_whole_blocks(self, anchors: str) -> None:
        response = [1, 2, 3, 4, 5, 1, 2, 3, 4]
        script = [[*response, 0, 0, 0][index + 1 : index + 4] for index in range(9)]
        drafter = ScriptedDrafter([script], [2], block_size=4)
        rows = score(drafter, [transcript(0, 2, response)], anchors=anchors, block_size=4, limit=20)
        taken = [row for row in rows if row["is_on_walk"]]
        assert [row["num_emitted_tokens"] for row in taken] == [4, 4]
        assert [row["num_accepted_drafts"] for row in taken] == [3, 3]
        assert {row["miss_rank"] for row in rows} == {None}

    @pytest.mark.parametrize(("alignment", "slots"), [("same_position", [3, 3, 2]), ("anchor_shifted", [3, 3, 3])])
    def test_blocks_near_the_limit_have_the_slots_of_their_rule(
        self, alignment: walk.RowAlignment, slots: list[int]
    ) -> None:
        drafter = ScriptedDrafter([[[0] * 3] * 4], [2], block_size=3, row_alignment=alignment)
        score(drafter, [transcript(0, 2, [1, 2, 3, 4])], anchors="all", block_size=3, limit=4)
        assert drafter.slots == {2 + index: count for index, count in enumerate(slots)}

    def test_responses_of_no_token_and_of_one_have_no_block(self) -> None:
        """The first token is the target's own; nothing is drafted after the last."""
        transcripts = [transcript(0, 2, []), transcript(1, 1, [3]), transcript(2, 1, [3, 4])]
        drafter = ScriptedDrafter([[], [[0]], [[0], [0]]], [2, 1, 1], block_size=2)
        for anchors in ("walk", "all"):
            rows = score(drafter, transcripts, anchors=anchors, block_size=2, limit=8)
            assert [(row["prompt_id"], row["anchor_index"]) for row in rows] == [("p2", 0)]

    def test_tokens_after_the_stop_token_are_never_counted(self) -> None:
        """Response a, stop and a block of 6: four of the five drafts lie beyond the text, and match nothing."""
        drafter = ScriptedDrafter([[[5, 0, 0, 0, 0], []]], [1], block_size=6)
        (row,) = score(drafter, [transcript(0, 1, [1, 5])], anchors="walk", block_size=6, limit=64)
        assert (row["num_drafted"], row["num_available"]) == (5, 1)
        assert (row["num_accepted_drafts"], row["num_emitted_tokens"]) == (1, 1)

    @pytest.mark.parametrize("group_tokens", [1, 12, 10_000])
    @pytest.mark.parametrize("anchors", ["walk", "all"])
    def test_groups_of_transcripts_give_the_same_rows(self, group_tokens: int, anchors: str) -> None:
        generator = torch.Generator().manual_seed(1)
        responses = [torch.randint(0, VOCAB, (length,), generator=generator).tolist() for length in (7, 1, 5, 9)]
        script = [
            [[*response, 0, 0][index + 1 : index + 3] for index in range(len(response))] for response in responses
        ]
        script[2][1] = [9 % VOCAB, 0]
        transcripts = [transcript(number, number + 1, response) for number, response in enumerate(responses)]
        margins = torch.rand(sum(one.num_tokens for one in transcripts), generator=generator) * 3 * TIE_MARGIN
        drafter = ScriptedDrafter(script, [1, 2, 3, 4], block_size=3)

        def rows(slicing: Slicing) -> list[Row]:
            return score(drafter, transcripts, margins, anchors=anchors, block_size=3, limit=9, slicing=slicing)

        expected = rows(USUAL)
        assert rows(Slicing(group_tokens=group_tokens, num_anchors=2)) == expected
        assert {row["is_near_tie"] for row in expected} == {True, False}, (
            "margins are taken at each transcript's own place"
        )

    @pytest.mark.parametrize("anchors", ["walk", "all"])
    def test_progress_rises_to_the_total(self, anchors: str) -> None:
        transcripts = [transcript(number, 1, [1, 2, 3, 4, 5]) for number in range(3)]
        drafter = ScriptedDrafter([[[0]] * 5] * 3, [1, 1, 1], block_size=2)
        told: list[tuple[str, float, float]] = []
        with progress.listening(lambda *report: told.append(report)):
            slicing = Slicing(group_tokens=8)
            score(drafter, transcripts, anchors=anchors, block_size=2, limit=9, slicing=slicing)
        assert {stage for stage, _, _ in told} == {"run_drafter"}
        assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)
        assert told[0][1] > 0, "told of work that is done"
        assert told[-1][1:] == (12, 12)


class TestNearTies:
    """Response t0..t4 after a prompt of 2; margin n belongs to the target's choice of token n + 1."""

    def rows(self, margins: list[float], script: list[list[int]]) -> dict[int, bool]:
        drafter = ScriptedDrafter([script], [2], block_size=3)
        rows = score(
            drafter, [transcript(0, 2, [1, 2, 3, 4, 5])], torch.tensor(margins), anchors="all", block_size=3, limit=9
        )
        return {row["anchor_index"]: row["is_near_tie"] for row in rows}

    RIGHT = [[2, 3], [3, 4], [4, 5], [5, 0], [0, 0]]
    WRONG = [[0, 0]] * 5

    @pytest.mark.parametrize(
        ("place", "wrong", "right"),
        [
            (1, [], []),  # chose t0, the prefill's token: no block decided it
            (2, [0], [0]),  # chose t1: the first draft of anchor 0
            (3, [1], [0, 1]),  # chose t2: the bonus or second draft of 0, the first of 1
            (4, [2], [0, 1, 2]),  # chose t3: the bonus of a whole block at 0
            (5, [3], [1, 2, 3]),  # chose t4: the last of the text
            (6, [], []),
        ],
    )
    def test_a_block_is_flagged_when_a_choice_that_decided_it_was_close(
        self, place: int, wrong: list[int], right: list[int]
    ) -> None:
        margins = [math.inf] * 7
        margins[place] = TIE_MARGIN / 2
        assert [anchor for anchor, tie in self.rows(margins, self.WRONG).items() if tie] == wrong
        assert [anchor for anchor, tie in self.rows(margins, self.RIGHT).items() if tie] == right

    @pytest.mark.parametrize("group_tokens", [1, 10_000])
    def test_margins_belong_to_the_transcript_at_whose_place_they_stand(self, group_tokens: int) -> None:
        """Texts of 2 + 3, 1 + 0, 1 + 2 and 3 + 2 tokens; the close choice is the third text's only one."""
        transcripts = [
            transcript(0, 2, [1, 2, 3]),
            transcript(1, 1, []),
            transcript(2, 1, [1, 2]),
            transcript(3, 3, [1, 2]),
        ]
        drafter = ScriptedDrafter([[[0]] * 3, [], [[0]] * 2, [[0]] * 2], [2, 1, 1, 3], block_size=2)
        margins = torch.full((14,), math.inf)
        margins[5 + 1 + 1] = 0.0
        slicing = Slicing(group_tokens=group_tokens)
        rows = score(drafter, transcripts, margins, anchors="walk", block_size=2, limit=9, slicing=slicing)
        assert [(row["prompt_id"], row["anchor_index"]) for row in rows if row["is_near_tie"]] == [("p2", 0)]

    @pytest.mark.parametrize(
        ("margin", "is_tie"), [(TIE_MARGIN * 1.01, False), (TIE_MARGIN * 0.99, True), (0.0, True), (-5.0, True)]
    )
    def test_the_margin_decides_and_a_choice_against_the_target_is_a_tie(self, margin: float, is_tie: bool) -> None:
        assert self.rows([math.inf, math.inf, margin, *[math.inf] * 4], self.WRONG)[0] is is_tie


@pytest.fixture(scope="module")
def rows_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("real")
    target = tiny.write_tiny_target(folder / "target", "qwen3")
    generator = torch.Generator().manual_seed(2)
    prompts = [
        RenderedPrompt(
            id=f"p{number}", prompt_ids=tuple(torch.randint(8, 150, (6 + number,), generator=generator).tolist())
        )
        for number in range(3)
    ]
    transcripts = generate(load_model(target, "float32"), prompts, stop_token_ids=[], max_new_tokens=40, batch_size=3)
    spec, weights = tiny.random_weights(tiny.draft_config(target), target)
    states = extract_hidden_states(
        Store(folder / "store"),
        target,
        transcripts,
        spec.target_layer_ids,
        compute_dtype="float32",
        store_dtype="float32",
    )
    vectors = load_embedding_and_head(target)

    def rows(anchors: str, slicing: Slicing = USUAL) -> list[Row]:
        drafter = Drafter(
            spec,
            weights,
            vectors.embedding_VD,
            device=torch.device("cpu"),
            dtype=torch.float32,
            score_elements=slicing.score_elements,
            context_tokens=slicing.context_tokens,
        )
        return score_transcripts(
            drafter,
            Head(vectors.head_VD, drafter, logits_elements=slicing.logits_elements),
            transcripts,
            lambda index: tiny.features_of(spec, transcripts, states, index),
            states.load_margins(),
            block_size=8,
            max_new_tokens=40,
            anchors=anchors,
            slicing=slicing,
        )

    return rows


class TestRealDrafter:
    """A random drafter on a random target: it hits by chance alone."""

    def test_its_acceptance_length_is_near_one(self, rows_of: Any) -> None:
        """With 160 tokens a hit has odds of about 1 in 160, so one in some 100 blocks is likely and ten are not."""
        emitted = [row["num_emitted_tokens"] for row in rows_of("walk")]
        assert len(emitted) > 90
        assert 1.0 <= sum(emitted) / len(emitted) < 1.1

    def test_the_targets_token_is_ranked_all_over_the_vocabulary(self, rows_of: Any) -> None:
        ranks = [row["miss_rank"] for row in rows_of("all") if row["miss_rank"] is not None]
        assert min(ranks) >= 2, "rank 1 is no miss"
        assert max(ranks) <= tiny.VOCAB
        assert 50 < sum(ranks) / len(ranks) < 110, "no better than chance, which is 80"

    def test_slices_and_groups_change_no_row(self, rows_of: Any) -> None:
        expected = rows_of("all")
        few = Slicing(group_tokens=1, num_anchors=5, score_elements=1000, logits_elements=500, context_tokens=7)
        assert rows_of("all", few) == expected
        assert rows_of("walk", few) == [row for row in expected if row["is_on_walk"]]


def test_an_unknown_mode_or_block_size_is_a_mistake_of_the_caller(tmp_path: Path) -> None:
    drafter = ScriptedDrafter([[[0]]], [1], block_size=2)
    with pytest.raises(AssertionError):
        score(drafter, [transcript(0, 1, [1, 2])], anchors="some", block_size=2, limit=4)
    for block_size in (0, 3):
        with pytest.raises(AssertionError):
            score(drafter, [transcript(0, 1, [1, 2])], anchors="all", block_size=block_size, limit=4)


@pytest.mark.parametrize("anchors", ["walk", "all"])
@settings(max_examples=40, deadline=None)
@given(scripted(), st.integers(1, 6))
def test_a_device_with_little_room_gives_the_same_rows(
    anchors: str, script: tuple[list[Transcript], ScriptedDrafter, int], room: int
) -> None:
    transcripts, drafter, limit = script
    size = drafter.spec.block_size
    small = SmallDevice(drafter, room)
    expected = score(drafter, transcripts, anchors=anchors, block_size=size, limit=limit)
    assert score(small, transcripts, anchors=anchors, block_size=size, limit=limit) == expected
    too_many = [number for number in small.tried if number > room]
    assert len(too_many) <= 9, "what did not fit is halved and never tried again"


def test_a_device_without_room_for_one_block_says_so(caplog: pytest.LogCaptureFixture) -> None:
    transcripts = [transcript(0, 2, [1, 2, 3, 4, 5, 6])]
    drafter = ScriptedDrafter([[[0]] * 6], [2], block_size=2)
    with pytest.raises(DoesNotFit, match="no room for a single block"):
        score(SmallDevice(drafter, 0), transcripts, anchors="all", block_size=2, limit=9)
    assert "going on with" in caplog.text
