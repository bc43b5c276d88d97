"""The rules of proposing: judged all rows at once or walked row by row they are one; what counts as a hit; ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dflash_core.drafter import judging
from dflash_core.drafter.footprint import Slicing
from dflash_core.drafter.head import Head, Rows, make_head
from dflash_core.drafter.judging import Blocks, judge_blocks
from dflash_core.drafter.model import Anchors, Drafter
from dflash_core.drafter.scoring import score_transcripts
from dflash_core.drafter.spec import DrafterSpec, read_drafter_spec
from dflash_core.errors import UnsupportedCheckpoint
from dflash_core.target.model_config import read_model_config
from dflash_core.target.transcripts import Transcript
from tests.support import official as scenes
from tests.support.official import SELECTOR, Scene

WIDTH, VOCAB, RANK = 5, 9, 3
CPU = torch.device("cpu")
KEPT = torch.tensor([0, 2, 3, 5, 8])
RULES: dict[str, dict[str, Any]] = {
    "argmax": {},
    "argmax, reduced": {"draft_vocab_size": len(KEPT)},
    "dflash2": {"proposal_rule": "dflash2", "selector_rank": RANK, "selector_top_k": 3},
    "vanilla": {"proposal_rule": "dspark", "markov_rank": RANK, "markov_head_type": "vanilla"},
    "gated": {"proposal_rule": "dspark", "markov_rank": RANK, "markov_head_type": "gated"},
    "rnn": {"proposal_rule": "dspark", "markov_rank": RANK, "markov_head_type": "rnn"},
    "rnn, reduced": {
        "proposal_rule": "dspark",
        "markov_rank": RANK,
        "markov_head_type": "rnn",
        "draft_vocab_size": len(KEPT),
    },
}


class Facts:
    """What a head reads of a drafter."""

    def __init__(self, **changes: Any) -> None:
        self.spec = DrafterSpec(
            **{
                "hidden_size": WIDTH,
                "num_layers": 1,
                "num_heads": 1,
                "num_kv_heads": 1,
                "head_dim": 2,
                "intermediate_size": 4,
                "vocab_size": VOCAB,
                "rms_norm_eps": 1e-6,
                "rope": {},
                "max_position_embeddings": 64,
                "block_size": 5,
                "mask_token_id": 0,
                "target_layer_ids": (1,),
                "is_causal": (False,),
                "windows": (None,),
                "input_embedding_scale": 1.0,
                "output_multiplier": 1.0,
                "final_logit_softcapping": None,
                **changes,
            }
        )
        self.device = CPU
        self.dtype = torch.float32


def random_head(rule: str, generator: torch.Generator, *, dtype: torch.dtype = torch.float32) -> Head:
    def number(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    facts: Any = Facts(**RULES[rule])
    facts.dtype = dtype
    num_drafted = facts.spec.draft_vocab_size or VOCAB
    tensors = {
        "candidate_selector.predecessor_codebook": number(VOCAB, RANK),
        "candidate_selector.successor_codebook": number(VOCAB, RANK),
        "candidate_selector.hidden_projection.weight": number(RANK, WIDTH),
        "markov_head.markov_w1.weight": number(VOCAB, RANK),
        "markov_head.markov_w2.weight": number(num_drafted, RANK),
        "confidence_head.proj.weight": number(1, WIDTH + RANK),
        "confidence_head.proj.bias": number(1),
    }
    if facts.spec.markov_head_type == "gated":
        tensors["markov_head.gate_proj.weight"] = number(RANK, WIDTH + RANK)
        tensors["markov_head.gate_proj.bias"] = number(RANK)
    if facts.spec.markov_head_type == "rnn":
        tensors["markov_head.joint_proj.weight"] = number(3 * RANK, WIDTH + 2 * RANK)
        tensors["markov_head.joint_proj.bias"] = number(3 * RANK)
    if facts.spec.draft_vocab_size:
        tensors["d2t"] = KEPT - torch.arange(len(KEPT))
    return make_head(number(num_drafted, WIDTH), facts, tensors)


class TestJudgingAllRowsAtOnce:
    @pytest.mark.parametrize("rule", RULES)
    @settings(max_examples=40, deadline=None)
    @given(
        seed=st.integers(0, 10**6),
        num_anchors=st.integers(1, 6),
        num_drafts=st.integers(0, 5),
        rows_per_call=st.sampled_from([1, 4, 96]),
        rows_at_once=st.sampled_from([1, 2, 100]),
        data=st.data(),
    )
    def test_it_counts_what_the_walk_row_by_row_counts(
        self, rule: str, seed: int, num_anchors: int, num_drafts: int, rows_per_call: int, rows_at_once: int, data: Any
    ) -> None:
        """The walk goes on from its own drafts, right or wrong; the texts agree with it up to a drawn place."""
        generator = torch.Generator().manual_seed(seed)
        head = random_head(rule, generator)
        head._rows_at_once = rows_at_once
        hidden = torch.randn(num_anchors, num_drafts, WIDTH, generator=generator)
        anchors = torch.randint(0, VOCAB, (num_anchors,), generator=generator)
        texts = torch.randint(0, VOCAB, (num_anchors, num_drafts), generator=generator)
        walked = [head.propose(rows, int(anchor)) for rows, anchor in zip(hidden, anchors, strict=True)]
        for number, drafts in enumerate(walked):
            agreed = data.draw(st.integers(0, num_drafts))
            texts[number, :agreed] = torch.tensor(drafts[:agreed], dtype=torch.long)
        available = [data.draw(st.integers(0, num_drafts)) for _ in range(num_anchors)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(judging, "ROWS_PER_CALL", rows_per_call)
            judged = judge_blocks(head, Blocks(hidden, anchors, texts, torch.tensor(available)))
        for number, drafts in enumerate(walked):
            text = texts[number, : available[number]].tolist()
            accepted = 0
            while accepted < len(text) and drafts[accepted] == text[accepted]:
                accepted += 1
            assert int(judged.accepted_A[number]) == accepted
            rank = int(judged.miss_rank_A[number])
            assert (rank == 0) == (accepted == len(text)), "a rank where something was missed"
            assert rank != 1, "the best is no miss"

    @pytest.mark.parametrize("rule", ["dflash2", "vanilla", "gated", "rnn"])
    def test_the_token_before_matters(self, rule: str) -> None:
        """Or these rules would have been compared with the plain one."""
        head = random_head(rule, torch.Generator().manual_seed(3))
        hidden = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(4))
        assert len({tuple(head.propose(hidden, anchor)) for anchor in range(VOCAB)}) > 1

    def test_what_comes_after_the_first_miss_does_not_matter(self) -> None:
        head = random_head("rnn", torch.Generator().manual_seed(3))
        hidden = torch.randn(1, 5, WIDTH, generator=torch.Generator().manual_seed(4))
        drafts = torch.tensor([head.propose(hidden[0], 1)])
        drafts[0, 2] = (drafts[0, 2] + 1) % VOCAB
        found = set()
        for last in range(VOCAB):
            drafts[0, 3:] = last
            judged = judge_blocks(head, Blocks(hidden, torch.tensor([1]), drafts, torch.tensor([5])))
            found.add((int(judged.accepted_A), int(judged.miss_rank_A)))
        assert len(found) == 1
        assert found.pop()[0] == 2


@pytest.mark.parametrize("rule", RULES)
def test_rules_compute_in_the_dtype_of_the_drafter(rule: str) -> None:
    """In bf16 too, and nearly the same: what is looked up and what is projected have one dtype."""
    wide = random_head(rule, torch.Generator().manual_seed(3))
    narrow = random_head(rule, torch.Generator().manual_seed(3), dtype=torch.bfloat16)
    hidden = torch.randn(1, 4, WIDTH, generator=torch.Generator().manual_seed(4))
    before = torch.tensor([[1, 2, 3, 4]])
    found = []
    for head, rows in ((wide, hidden), (narrow, hidden.bfloat16())):
        side = head.side(rows, before)
        scores = head.scores(Rows(rows[0], None if side is None else side[0]))
        assert scores.dtype == rows.dtype
        assert len(head.propose(rows[0], 1)) == 4
        found.append(scores.float().topk(2, dim=1).values)
    torch.testing.assert_close(found[0], found[1], atol=0.15, rtol=0.05)


class TestRanks:
    def test_the_selectors_candidates_come_first_then_the_rest_by_logit(self) -> None:
        """Logits 8 7 6 5 4 ...; of the three candidates the selector puts token 2 first and token 0 last."""
        facts: Any = Facts(**RULES["dflash2"])
        codes = torch.zeros(VOCAB, RANK)
        codes[:3, 0] = torch.tensor([-9.0, 0.0, 9.0])
        head = make_head(
            torch.eye(VOCAB, WIDTH),
            facts,
            {
                "candidate_selector.predecessor_codebook": torch.ones(VOCAB, RANK),
                "candidate_selector.successor_codebook": codes,
                "candidate_selector.hidden_projection.weight": torch.cat(
                    [torch.ones(1, WIDTH) / 30, torch.zeros(2, 5)]
                ),
            },
        )
        hidden = torch.tensor([[8.0, 7, 6, 5, 4]])
        side = head.side(hidden[None], torch.zeros(1, 1, dtype=torch.long))
        assert side is not None
        ranks = {}
        for token in range(VOCAB):
            hit, rank = head.compare(Rows(hidden, side[0]), torch.tensor([token]))
            assert bool(hit) == (token == 2)
            ranks[token] = int(rank)
        assert ranks == {2: 1, 1: 2, 0: 3, 3: 4, 4: 5, 5: 9, 6: 9, 7: 9, 8: 9}, "equal logits share the last place"
        assert head.choose(Rows(hidden, side[0])).tolist() == [2]
        assert head.scores(Rows(hidden, side[0])).argmax() == 2

    def test_a_token_that_cannot_be_proposed_is_a_miss_behind_all_that_can(self) -> None:
        head = random_head("argmax, reduced", torch.Generator().manual_seed(0))
        hidden = torch.randn(20, WIDTH, generator=torch.Generator().manual_seed(1))
        outside = [token for token in range(VOCAB) if token not in KEPT.tolist()]
        for token in outside:
            hit, rank = head.compare(Rows(hidden), torch.full((20,), token))
            assert not hit.any()
            assert (rank == len(KEPT) + 1).all()


class TestReducedVocabulary:
    def test_d2t_is_added_to_a_tokens_own_number(self) -> None:
        facts: Any = Facts(draft_vocab_size=3)
        head = make_head(torch.eye(3, WIDTH), facts, {"d2t": torch.tensor([1, 4, 6])})
        hidden = torch.eye(3, WIDTH)
        assert head.choose(Rows(hidden)).tolist() == [1, 5, 8]
        hit, rank = head.compare(Rows(hidden), torch.tensor([1, 4, 8]))
        assert hit.tolist() == [True, False, True], "4 is an offset here, no token"
        assert rank.tolist() == [1, 4, 1]

    @pytest.mark.parametrize(
        ("d2t", "named"),
        [([1, 4, 7], "1 tokens outside"), ([-1, 0, 0], "1 tokens outside"), ([1, 0, 0], "1 to a token twice")],
    )
    def test_what_is_no_map_is_refused(self, d2t: list[int], named: str) -> None:
        facts: Any = Facts(draft_vocab_size=3)
        with pytest.raises(UnsupportedCheckpoint, match=named):
            make_head(torch.eye(3, WIDTH), facts, {"d2t": torch.tensor(d2t)})

    def test_without_a_head_over_it_the_drafter_is_refused(self) -> None:
        facts: Any = Facts(draft_vocab_size=3)
        with pytest.raises(UnsupportedCheckpoint, match="draft_vocab_size = 3, but .* no lm_head.weight"):
            make_head(torch.eye(VOCAB, WIDTH), facts, {"d2t": torch.tensor([1, 4, 6])})


class TestConfidence:
    def test_it_reads_the_row_and_the_token_before_it(self) -> None:
        head = random_head("vanilla", torch.Generator().manual_seed(0))
        hidden = torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(1))
        before = torch.tensor([[1, 2, 3], [4, 5, 6]])
        found = head.confidence(hidden, before)
        assert found is not None
        w = {name: tensor.double() for name, tensor in head._tensors.items()}
        for block in range(2):
            for place in range(3):
                code = w["markov_head.markov_w1.weight"][before[block, place]]
                read = torch.cat([hidden[block, place].double(), code])
                expected = torch.sigmoid(w["confidence_head.proj.weight"] @ read + w["confidence_head.proj.bias"])
                assert float(found[block, place]) == pytest.approx(float(expected), abs=1e-6)

    def test_a_drafter_without_the_head_has_none(self) -> None:
        facts: Any = Facts()
        head = make_head(torch.eye(VOCAB, WIDTH), facts, {})
        assert head.confidence(torch.zeros(1, 1, WIDTH), torch.zeros(1, 1, dtype=torch.long)) is None


CONFIGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dflash": ({}, {}),
    "dflash2": (SELECTOR, {"is_causal": True}),
    "dspark": ({"projector_type": "dspark", "markov_rank": 6, "markov_head_type": "rnn"}, {}),
    "jetspec": ({"causal_head": True, "draft_shift": True}, {}),
}


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("rules")
    return scenes.make_scene(folder, scenes.write_target(folder / "target", "llama", scale=8.0))


@pytest.mark.parametrize("name", CONFIGS)
class TestWholeDrafters:
    def drafter(self, scene: Scene, name: str) -> scenes.Trained:
        nested, changes = CONFIGS[name]
        config = scenes.z_lab_config(scene.target, nested=nested, **changes)
        return scenes.Trained(scene, config, scenes.random_tensors(config, scene.target))

    def test_random_weights_stay_near_one(self, scene: Scene, name: str) -> None:
        emitted = [length for walk in self.drafter(scene, name).walks().values() for length in walk]
        assert len(emitted) > 90
        assert 1.0 <= sum(emitted) / len(emitted) < 1.1

    def test_what_stands_at_and_after_an_anchor_changes_no_draft(self, scene: Scene, name: str) -> None:
        """The later tokens in another order: their states change place, and no bit of the drafts changes."""
        one = self.drafter(scene, name)
        features = one.features(0)
        place = len(features) - 12
        order = torch.cat([torch.arange(place), place + torch.randperm(12, generator=torch.Generator().manual_seed(2))])
        anchors = Anchors(torch.tensor([place, len(features) - 1]), torch.tensor([5, 6]), torch.tensor([8, 8]))
        before, after = (
            one.drafter.draft_hidden([one.drafter.read_context(read)], [anchors], 8)[0]
            for read in (features, features[order])
        )
        assert torch.equal(before[0], after[0])
        assert not torch.equal(before[1], after[1]), "the second anchor sees them"

    def test_company_and_order_of_anchors_change_nothing(
        self, scene: Scene, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        nested, changes = CONFIGS[name]
        config = scenes.z_lab_config(scene.target, nested=nested, **changes)
        one = scenes.train(scene, config, steps=(30,))[30]
        every = one.rows(anchors="all")
        assert max(row["num_accepted_drafts"] for row in every) > 2
        monkeypatch.setattr("dflash_core.drafter.judging.ROWS_PER_CALL", 2)
        few = Slicing(group_tokens=1, num_anchors=3)
        assert one.rows(anchors="all", slicing=few) == every
        assert one.rows(slicing=few) == [row for row in every if row["is_on_walk"]]


class TestCeiling:
    """Drafters that copy the target, on a text in which every token decides the next."""

    CYCLE = (3, 11, 7, 30, 12, 25, 19)

    def rows(self, rule: str) -> list[dict[str, Any]]:
        """Score one that knows by heart which token follows which."""
        vocab, hidden = 40, 24
        follower = dict(zip(self.CYCLE, [*self.CYCLE[1:], self.CYCLE[0]], strict=True))
        codes_before, codes_after = torch.eye(vocab), torch.zeros(vocab, vocab)
        for token, after in follower.items():
            codes_after[after, token] = 10.0
        config: dict[str, Any] = {
            **{"architectures": ["DFlashDraftModel"], "hidden_size": hidden, "intermediate_size": 8},
            **{"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "rms_norm_eps": 1e-6},
            **{"rope_theta": 100.0, "max_position_embeddings": 64, "vocab_size": vocab, "head_dim": 12},
            **{"num_target_layers": 8, "block_size": 5},
            "dflash_config": {"mask_token_id": 39, "target_layer_ids": [2]},
        }
        facts = {"hidden_size": hidden, "num_hidden_layers": 8, "vocab_size": vocab}
        target: Any = SimpleNamespace(config=read_model_config(facts))
        if rule == "dspark":
            config["dflash_config"] |= {"projector_type": rule, "markov_rank": vocab, "markov_head_type": "vanilla"}
        else:
            config["architectures"] = ["DFlash2DraftModel"]
            config["dflash_config"] |= SELECTOR | {"selector_rank": vocab, "selector_top_k": vocab}
        weights = scenes.random_tensors(config, target)
        own = {
            "markov_head.markov_w1.weight": codes_before,
            "markov_head.markov_w2.weight": codes_after,
            "candidate_selector.predecessor_codebook": codes_before,
            "candidate_selector.successor_codebook": codes_after,
            "candidate_selector.hidden_projection.weight": torch.full((vocab, hidden), 1 / hidden),
        }
        weights |= {name: tensor for name, tensor in own.items() if name in weights}
        # Layers that add nothing, and a mask token of ones: the selector then sees ones in every drafting row.
        for name in ("layers.0.self_attn.o_proj.weight", "layers.0.mlp.down_proj.weight"):
            weights[name] = torch.zeros_like(weights[name])
        spec = read_drafter_spec(
            config, {name: list(one.shape) for name, one in weights.items()}, target.config, where="config"
        )
        drafter = Drafter(spec, weights, torch.ones(vocab, hidden), device=CPU, dtype=torch.float32)
        text = [self.CYCLE[place % 7] for place in range(41)]
        transcript = Transcript(id="p0", prompt_ids=(1, 2, 3), response_ids=tuple(text), stop_reason="length")
        return score_transcripts(
            drafter,
            make_head(torch.zeros(vocab, hidden), drafter, weights),
            [transcript],
            lambda _: torch.randn(44, hidden, generator=torch.Generator().manual_seed(0)),
            torch.ones(44),
            block_size=5,
            max_new_tokens=41,
            anchors="walk",
        )

    @pytest.mark.parametrize(("rule", "ceiling"), [("dflash2", 5), ("dspark", 6)])
    def test_every_block_is_accepted_whole(self, rule: str, ceiling: int) -> None:
        """Tau ends at the block's length, and one above where the anchor's own row drafts."""
        emitted = [row["num_emitted_tokens"] for row in self.rows(rule)]
        assert set(emitted[:-1]) == {ceiling}
        assert sum(emitted) == 40


def test_a_map_of_target_ids_is_refused_where_it_is_used() -> None:
    kept = torch.tensor([token for token in range(150) if token % 3])
    facts = Facts(draft_vocab_size=100, vocab_size=400)
    with pytest.raises(UnsupportedCheckpoint, match="subtract 0, 1, 2"):
        make_head(torch.randn(100, WIDTH), facts, {"d2t": kept})  # type: ignore[arg-type]
    t2d = torch.zeros(400, dtype=torch.bool)
    t2d[kept] = True
    with pytest.raises(UnsupportedCheckpoint, match="t2d does not keep"):
        make_head(torch.randn(100, WIDTH), facts, {"d2t": torch.zeros(100, dtype=torch.long), "t2d": t2d})  # type: ignore[arg-type]
