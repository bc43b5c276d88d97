"""Logits of the same weights by speculators and SpecForge themselves: ours agree to fp32 rounding."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_core.acceptance import walk
from dflash_core.drafter.head import Head, Rows, SelectorHead, make_head
from dflash_core.drafter.model import Anchors, Drafter
from dflash_core.drafter.spec import DrafterSpec, read_drafter_spec
from dflash_core.target.model_config import read_model_config
from tests.golden import foreign_drafters as golden

DOCUMENT = json.loads(golden.PATH.read_text(encoding="utf-8"))
CASES = [(package, name) for package in ("speculators", "specforge") for name in DOCUMENT[package]]
TARGET = read_model_config(
    {"hidden_size": golden.HIDDEN, "num_hidden_layers": golden.DEPTH, "vocab_size": golden.VOCAB}
)
CLOSE = {"atol": 1e-4, "rtol": 1e-5}
"""Logits of up to 20 that went through steep softmaxes: the order of sums moves most by 1e-6, one by 5e-5."""


class Ours:
    """Our reading and our rows of one case."""

    def __init__(self, package: str, name: str) -> None:
        self.case: dict[str, Any] = DOCUMENT[package][name]
        shapes = dict(self.case["shapes"])
        weights = golden.weights_for(shapes)
        num_drafted = self.case["config"].get("draft_vocab_size", golden.VOCAB)
        if num_drafted != golden.VOCAB:
            _, weights["d2t"] = golden.maps()
            shapes["d2t"] = [num_drafted]
        self.spec: DrafterSpec = read_drafter_spec(self.case["config"], shapes, TARGET, where="config.json")
        embedding, head = golden.tables(num_drafted)
        self.drafter = Drafter(self.spec, weights, embedding, device=torch.device("cpu"), dtype=torch.float32)
        self.head: Head = make_head(head, self.drafter, weights)
        position_A = torch.tensor(golden.ANCHORS)
        anchors = Anchors(position_A, golden.tokens()[position_A], torch.full_like(position_A, golden.BLOCK))
        (self.hidden_AKD,) = self.drafter.draft_hidden(
            [self.drafter.read_context(golden.features())], [anchors], golden.BLOCK
        )
        # Row j of a block predicts anchor + j or + j + 1; the token before that is the text's own.
        shift = walk.first_row(self.spec.row_alignment)
        place_AK = position_A[:, None] + torch.arange(golden.BLOCK) - shift
        self.before_AK = golden.tokens()[place_AK.clamp(min=position_A[:, None])]

    def rows(self) -> Rows:
        side = self.head.side(self.hidden_AKD, self.before_AK)
        return Rows(self.hidden_AKD.flatten(0, 1), None if side is None else side.flatten(0, 1))

    def expected(self, what: str) -> Tensor:
        return torch.tensor(self.case[what]).flatten(0, 1)


@pytest.mark.parametrize(("package", "name"), CASES)
def test_logits_agree_to_rounding(package: str, name: str) -> None:
    ours = Ours(package, name)
    assert ours.spec.target_layer_ids == golden.TAPS
    rows = ours.rows()
    found = ours.head.logits(rows.hidden_RD) if ours.spec.proposal_rule == "dflash2" else ours.head.scores(rows)
    expected = ours.expected("logits")
    assert float(expected.std()) > 1, "numbers that could differ"
    torch.testing.assert_close(found, expected, **CLOSE)
    if ours.spec.proposal_rule != "dflash2":
        own = expected.argmax(dim=1)
        in_target = own if ours.spec.draft_vocab_size is None else golden.target_of_draft()[own]
        assert torch.equal(ours.head.choose(rows), in_target)


def test_the_selectors_scores_agree_to_rounding() -> None:
    ours = Ours("speculators", "dflash2")
    assert isinstance(ours.head, SelectorHead)
    _, token_RC, score_RC = ours.head.candidates(ours.rows())
    expected_tokens, expected_scores = ours.expected("candidates"), ours.expected("scores")
    for found, scores, tokens, wanted in zip(token_RC, score_RC, expected_tokens, expected_scores, strict=True):
        mine = dict(zip(found.tolist(), scores.tolist(), strict=True))
        theirs = dict(zip(tokens.tolist(), wanted.tolist(), strict=True))
        assert mine == pytest.approx(theirs, abs=1e-4)
    best = expected_tokens.gather(1, expected_scores.argmax(dim=1, keepdim=True))[:, 0]
    assert torch.equal(ours.head.choose(ours.rows()), best)
    unary = ours.expected("logits").argmax(dim=1)
    assert not torch.equal(best, unary), "the selector overrules the head somewhere"


@pytest.mark.parametrize(("package", "name"), [case for case in CASES if "confidence" in DOCUMENT[case[0]][case[1]]])
def test_confidences_agree_to_rounding(package: str, name: str) -> None:
    ours = Ours(package, name)
    found = ours.head.confidence(ours.hidden_AKD, ours.before_AK)
    assert ours.spec.has_confidence_head
    assert found is not None
    torch.testing.assert_close(found.flatten(), ours.expected("confidence"), **CLOSE)


def test_the_cases_are_all_there_and_of_all_kinds() -> None:
    assert set(DOCUMENT["speculators"]) == set(golden.SPECULATORS)
    assert set(DOCUMENT["specforge"]) == set(golden.SPECFORGE)
    specs = [Ours(package, name).spec for package, name in CASES]
    assert {spec.proposal_rule for spec in specs} == {"argmax", "dflash2", "dspark"}
    assert {spec.markov_head_type for spec in specs} == {None, "vanilla", "gated", "rnn"}
    assert {spec.row_alignment for spec in specs} == {"same_position", "anchor_shifted"}
    assert {spec.window_rule for spec in specs} == {"row", "anchor"}
    assert {spec.is_causal[0] for spec in specs if spec.windows[0]} == {True, False}
