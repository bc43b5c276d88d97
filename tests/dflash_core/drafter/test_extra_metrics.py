"""Extra numbers of real tiny drafters of every rule: against plain loops, the official loop, and its sampled runs."""

from __future__ import annotations

import dataclasses
import math
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import dflash.model as official
import pytest
import torch
from torch import Tensor

from dflash_core.acceptance import walk
from dflash_core.drafter import extra_metrics
from dflash_core.drafter.extra_metrics import ExtraMetrics, ExtraSettings
from dflash_core.drafter.footprint import USUAL, Slicing
from dflash_core.drafter.head import Rows
from dflash_core.drafter.model import Anchors
from dflash_core.drafter.scoring import score_transcripts
from dflash_core.results.records import EXTRA_SCHEMAS
from dflash_core.target.logits import target_logits
from tests.dflash_core.acceptance.test_trees import longest_prefix, plain_tree
from tests.support import official as scenes
from tests.support.official import CPU, MAX_NEW_TOKENS, Scene, Trained

KS = (1, 2, 4, 8, 16)
BUDGETS = (2, 4, 8, 16)
TEMPERATURES = (0.5, 1.5)
EVERYTHING = ExtraSettings(sweep_block_sizes=(1, 2, 5), recall_ks=KS, tree_budgets=BUDGETS, temperatures=TEMPERATURES)
# Name to settings of the config: the rule, and what else decides rows.
DRAFTERS: dict[str, Any] = {
    "argmax": lambda target: scenes.z_lab_config(target),
    "argmax, causal": lambda target: scenes.z_lab_config(target, is_causal=True),
    "argmax, shifted rows": lambda target: scenes.z_lab_config(target, sample_from_anchor=True),
    "argmax, reduced vocabulary": lambda target: scenes.z_lab_config(target, draft_vocab_size=150),
    "dflash2": lambda target: scenes.z_lab_config(target, nested=scenes.SELECTOR),
    "dspark": lambda target: scenes.dspark_config(target, "gated"),
}
Rows_ = list[dict[str, Any]]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("extras")
    return scenes.make_scene(folder, scenes.write_target(folder / "target", "llama", scale=8.0))


@pytest.fixture(scope="module", params=DRAFTERS)
def trained(scene: Scene, request: pytest.FixtureRequest) -> Trained:
    config = DRAFTERS[request.param](scene.target)
    d2t = None
    if "draft_vocab_size" in config:
        kept = torch.tensor([token for token in range(scene.target.config.vocab_size) if token % 16 != 1])
        d2t = kept - torch.arange(len(kept))
    return scenes.train(scene, config, steps=[70], d2t=d2t)[70]


@pytest.fixture(scope="module")
def plain_argmax(scene: Scene) -> Trained:
    return scenes.train(scene, DRAFTERS["argmax"](scene.target), steps=[70])[70]


def logits_of(scene: Scene) -> Any:
    config = scene.target.config
    return target_logits(
        scene.tables.head_VD, config, num_token_rows=config.vocab_size, device=CPU, dtype=torch.float32
    )


def scored(
    trained: Trained, wanted: ExtraSettings, *, anchors: str = "walk", slicing: Slicing = USUAL
) -> tuple[Rows_, dict[str, Rows_]]:
    """Return the rows of blocks and those of each extra."""
    scene = trained.scene
    states = scene.states(trained.spec.target_layer_ids)
    ends = torch.tensor([one.num_tokens for one in scene.transcripts]).cumsum(0).tolist()
    starts = [0, *ends]
    if trained.spec.proposal_rule != "argmax":
        wanted = ExtraSettings(
            sweep_block_sizes=wanted.sweep_block_sizes, recall_ks=wanted.recall_ks, temperatures=wanted.temperatures
        )
    extras = ExtraMetrics(
        trained.head, wanted, target_logits=logits_of(scene), logits_elements=slicing.extra_logits_elements
    )
    rows = score_transcripts(
        trained.drafter,
        trained.head,
        scene.transcripts,
        trained.features,
        states.load_margins(),
        block_size=trained.spec.block_size,
        max_new_tokens=MAX_NEW_TOKENS,
        anchors=anchors,
        extras=extras,
        final_of=lambda index: states.load_final()[starts[index] : ends[index]],
        slicing=slicing,
    )
    return rows, extras.rows()


def hidden_at(trained: Trained, number: int, index: int, block_size: int | None = None) -> Tensor:
    """Draft one block alone and return the rows that draft, as many as it drafts near the limit."""
    transcript, size = trained.scene.transcripts[number], block_size or trained.spec.block_size
    layout = {"block_size": size, "max_new_tokens": MAX_NEW_TOKENS, "row_alignment": trained.spec.row_alignment}
    anchor = Anchors(
        torch.tensor([index + len(transcript.prompt_ids)]),
        torch.tensor([transcript.response_ids[index]]),
        torch.tensor([walk.num_slots(index, **layout)]),
    )
    context = trained.drafter.read_context(trained.features(number))
    (hidden_1KD,) = trained.drafter.draft_hidden([context], [anchor], size)
    first = walk.first_row(trained.spec.row_alignment)
    return hidden_1KD[0, first : first + walk.num_drafted(index, **layout)]


def scores_at(trained: Trained, number: int, index: int) -> tuple[Tensor, list[int]]:
    """Return full scores in the target's numbering, -inf for what cannot be proposed, and the text, row by row."""
    response = trained.scene.transcripts[number].response_ids
    hidden_PD = hidden_at(trained, number, index)
    text = list(response[index + 1 : index + 1 + len(hidden_PD)])
    hidden_PD = hidden_PD[: len(text)]
    side = trained.head.side(hidden_PD[None], torch.tensor([[response[index], *text[:-1]]]))
    scores_PU = trained.head.scores(Rows(hidden_PD, None if side is None else side[0]))
    if trained.head.target_ids is None:
        return scores_PU, text
    scores_PV = torch.full((len(text), trained.scene.target.config.vocab_size), -torch.inf)
    scores_PV[:, trained.head.target_ids] = scores_PU
    return scores_PV, text


def anchors_of(rows: Rows_, trained: Trained) -> list[tuple[int, int, int]]:
    """Return transcript, response index and accepted drafts of every step of the walk."""
    numbers = {one.id: number for number, one in enumerate(trained.scene.transcripts)}
    return [
        (numbers[row["prompt_id"]], row["anchor_index"], row["num_accepted_drafts"])
        for row in rows
        if row["is_on_walk"]
    ]


def by_keys(rows: Rows_, *keys: str) -> dict[tuple[Any, ...], dict[str, Any]]:
    found = {tuple(row[key] for key in keys): row for row in rows}
    assert len(found) == len(rows)
    return found


@torch.inference_mode()
def test_recall_equals_sorting_all_scores_of_each_block_alone(trained: Trained) -> None:
    rows, extras = scored(trained, ExtraSettings(recall_ks=KS))
    counts: dict[tuple[str, int, int], list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for number, index, accepted in anchors_of(rows, trained):
        scores_PV, text = scores_at(trained, number, index)
        for place, token in enumerate(text):
            best = scores_PV[place].topk(16)
            order = [int(one) for value, one in zip(best.values, best.indices, strict=True) if value > -torch.inf]
            rank = order.index(token) + 1 if token in order else 99
            for k in KS:
                if trained.spec.proposal_rule == "dflash2" and k > scenes.SELECTOR["selector_top_k"]:
                    continue  # there the order is that of the logits
                cell = counts[trained.scene.transcripts[number].id, place + 1, k]
                is_in, is_reached = rank <= k, accepted >= place
                cell[:] = [a + b for a, b in zip(cell, [1, is_in, is_reached, is_in and is_reached], strict=True)]
    found = by_keys(extras["recall"], "prompt_id", "draft_position", "k")
    names = ("num_blocks", "num_recalled", "num_reached", "num_reached_recalled")
    for key, expected in counts.items():
        assert [found[key][name] for name in names] == expected, key
    assert set(found) >= set(counts)
    assert {tuple(row) for row in extras["recall"]} == {tuple(EXTRA_SCHEMAS["recall"])}
    assert len({row["num_recalled"] for row in extras["recall"]}) > 3, "worth comparing"


def test_recall_at_one_is_survival(trained: Trained) -> None:
    rows, extras = scored(trained, ExtraSettings(recall_ks=(1,)))
    accepted = [count for _, _, count in anchors_of(rows, trained)]
    for position in range(1, trained.spec.num_drafts + 1):
        hits = sum(row["num_reached_recalled"] for row in extras["recall"] if row["draft_position"] == position)
        assert hits == sum(count >= position for count in accepted)


@torch.inference_mode()
def test_walks_under_trees_equal_a_plain_loop_with_a_heap_for_each_budget(trained: Trained) -> None:
    if trained.spec.proposal_rule != "argmax":
        assert "trees" not in scored(trained, EVERYTHING)[1]
        return
    _, extras = scored(trained, ExtraSettings(tree_budgets=BUDGETS))
    found = by_keys(extras["trees"], "prompt_id", "budget")
    for number, transcript in enumerate(trained.scene.transcripts):
        for budget in BUDGETS:
            anchor, steps, accepted = 0, 0, 0
            while anchor < len(transcript.response_ids) - 1:
                logits_PU = trained.head.logits(hidden_at(trained, number, anchor))
                nodes = plain_tree(logits_PU, budget)
                if trained.head.target_ids is not None:
                    nodes = {tuple(int(trained.head.target_ids[token]) for token in node) for node in nodes}
                matched = longest_prefix(nodes, transcript.response_ids[anchor + 1 :])
                steps, accepted = steps + 1, accepted + matched
                anchor += min(matched + 1, len(transcript.response_ids) - 1 - anchor)
            assert found[transcript.id, budget] == {
                "prompt_id": transcript.id,
                "budget": budget,
                "num_verification_steps": steps,
                "num_accepted_drafts": accepted,
                "num_emitted_tokens": len(transcript.response_ids) - 1,
            }
    steps_of = [sum(row["num_verification_steps"] for row in found.values() if row["budget"] == b) for b in BUDGETS]
    assert steps_of[0] > steps_of[-1]


def test_a_tree_of_any_budget_moves_on_at_least_as_far_as_its_first_node(plain_argmax: Trained) -> None:
    """One node is the first draft: the walk of a block of two slots, drafted with all slots."""
    _, extras = scored(plain_argmax, ExtraSettings(tree_budgets=(1,)))
    for row in extras["trees"]:
        assert row["num_accepted_drafts"] <= row["num_verification_steps"]


def test_shorter_blocks_are_scored_as_if_alone(trained: Trained) -> None:
    for anchors in ("walk", "all"):
        _, extras = scored(trained, ExtraSettings(sweep_block_sizes=(1, 2, 5)), anchors=anchors)
        is_prefix = anchors == "all" and all(trained.spec.is_causal)
        assert {row["method"] for row in extras["sweep"]} == {"prefix" if is_prefix else "redrafted"}
        found = by_keys(extras["sweep"], "prompt_id", "block_size")
        for block_size in (1, 2, 5):
            alone = [row for row in trained.rows(block_size=block_size) if row["is_on_walk"]]
            for transcript in trained.scene.transcripts:
                rows = [row for row in alone if row["prompt_id"] == transcript.id]
                counts = found[transcript.id, block_size]
                assert counts["num_verification_steps"] == len(rows)
                for name in ("num_accepted_drafts", "num_emitted_tokens"):
                    assert counts[name] == sum(row[name] for row in rows)


def test_shorter_blocks_walk_as_the_official_loop_does(plain_argmax: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(official, "_cuda_time", time.perf_counter)
    _, extras = scored(plain_argmax, ExtraSettings(sweep_block_sizes=(2, 5)))
    found = by_keys(extras["sweep"], "prompt_id", "block_size")
    for block_size in (2, 5):
        for prompt_id, lengths in scenes.official_walks(plain_argmax, block_size=block_size).items():
            row = found[prompt_id, block_size]
            assert (row["num_verification_steps"], row["num_emitted_tokens"]) == (len(lengths), sum(lengths))


def test_a_prefix_is_not_the_shorter_block_where_slots_see_ahead(plain_argmax: Trained) -> None:
    """Why it is drafted again: the first drafts of a whole block differ from those of a block of two."""
    first = plain_argmax.head.choose(Rows(hidden_at(plain_argmax, 2, 3)[:1]))
    logits = plain_argmax.head.logits
    whole, short = logits(hidden_at(plain_argmax, 2, 3)[:1]), logits(hidden_at(plain_argmax, 2, 3, block_size=2))
    assert first.shape == (1,)
    assert (whole - short).abs().max() > 0.1


@torch.inference_mode()
def test_chances_equal_the_targets_own_forward_pass_and_plain_sums(trained: Trained) -> None:
    rows, extras = scored(trained, ExtraSettings(temperatures=TEMPERATURES))
    found = by_keys(extras["sampled"], "prompt_id", "temperature", "rule")
    sums: dict[tuple[str, float, str], list[float]] = defaultdict(lambda: [0.0] * 6)
    for number, transcript in enumerate(trained.scene.transcripts):
        ids = torch.tensor([[*transcript.prompt_ids, *transcript.response_ids]])
        logits_TV = trained.scene.model(ids).logits[0]
        for _, index, _ in [one for one in anchors_of(rows, trained) if one[0] == number]:
            scores_PV, text = scores_at(trained, number, index)
            first = len(transcript.prompt_ids) + index
            for temperature in TEMPERATURES:
                p_PV = torch.softmax(logits_TV[first : first + len(text)].double() / temperature, dim=-1)
                q_PV = torch.softmax(scores_PV.double() / temperature, dim=-1)
                for rule in ("one_hot", "sampled"):
                    if rule == "one_hot":
                        q_PV = torch.nn.functional.one_hot(scores_PV.argmax(-1), scores_PV.shape[1]).double()
                    else:
                        q_PV = torch.softmax(scores_PV.double() / temperature, dim=-1)
                    least_PV = torch.minimum(p_PV, q_PV)
                    a = least_PV.sum(-1).tolist()
                    m = [float(least_PV[place, token]) for place, token in enumerate(text)]
                    numbers = [
                        1,
                        len(text),
                        bool(text),
                        a[0] if text else 0.0,
                        sum(math.prod(a[: place + 1]) for place in range(len(text))),
                        sum(math.prod(m[:place]) * a[place] for place in range(len(text))),
                    ]
                    cell = sums[transcript.id, temperature, rule]
                    cell[:] = [one + other for one, other in zip(cell, numbers, strict=True)]
    names = list(EXTRA_SCHEMAS["sampled"])[3:]
    assert set(found) == set(sums)
    for key, expected in sums.items():
        assert [found[key][name] for name in names] == pytest.approx(expected, rel=1e-4), key


class _Enough(Exception):  # noqa: N818 - ends a run of the official loop after its first block
    pass


def first_blocks(trained: Trained, number: int, index: int, temperature: float, num_runs: int) -> list[int]:
    """Let the official loop sample from an anchor of a text and return the drafts that its first block accepts."""
    drafter, transcript = scenes.official_drafter(trained), trained.scene.transcripts[number]
    prompt = torch.tensor([[*transcript.prompt_ids, *transcript.response_ids[:index]]])
    anchor = torch.tensor([[transcript.response_ids[index]]])
    counts: list[int] = []

    def judge(*arguments: Any) -> None:
        counts.append(official_rule(*arguments)[0])
        raise _Enough

    official_rule = official._rejection_sample
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(official, "_rejection_sample", judge)
        patch.setattr(official, "sample", lambda *_: anchor)
        for _ in range(num_runs):
            with pytest.raises(_Enough):
                official.dflash_generate(
                    drafter, trained.scene.model, prompt, MAX_NEW_TOKENS - index, None, temperature=temperature
                )
    return counts


@pytest.mark.parametrize("rule", ["argmax", "dflash2"])
def test_sampled_runs_of_the_official_loop_accept_the_first_draft_as_often(scene: Scene, rule: str) -> None:
    """At the 8 anchors whose chance is nearest to one half, 40 runs each; 4 standard errors.

    The first draft's chance is the loop's own. Of whole blocks the bound holds, which counts only drafts that
    follow the text; between it and the estimate lies what nobody can know from the text alone.
    """
    torch.manual_seed(5)
    temperature, num_runs = 0.7, 40
    one = scenes.train(scene, DRAFTERS[rule](scene.target), steps=[70])[70]
    if rule == "dflash2":
        # The selector is not trained: at full strength it overrules nearly every good draft.
        name = "candidate_selector.hidden_projection.weight"
        one = dataclasses.replace(one, weights=one.weights | {name: one.weights[name] / 8})
    found = {}
    for number, transcript in enumerate(scene.transcripts):
        for index in range(0, len(transcript.response_ids) - 1, 2):
            extras = ExtraMetrics(one.head, ExtraSettings(temperatures=(temperature,)), target_logits=logits_of(scene))
            extras.observe("p", observed(one, number, [index]))
            found[number, index] = by_keys(extras.rows()["sampled"], "rule")["sampled",]
    chosen = sorted(found, key=lambda place: abs(found[place]["sum_first_acceptance"] - 0.5))[:8]
    runs = [first_blocks(one, number, index, temperature, num_runs) for number, index in chosen]
    chances = [found[place]["sum_first_acceptance"] for place in chosen]
    assert 2.0 < sum(chances) < 6.0, "neither sure nor hopeless"
    error = math.sqrt(sum(chance * (1 - chance) / num_runs for chance in chances))
    assert sum(sum(count >= 1 for count in counts) / num_runs for counts in runs) == pytest.approx(
        sum(chances), abs=4 * error
    )
    mean = sum(sum(counts) / num_runs for counts in runs)
    error = math.sqrt(sum(float(torch.tensor(counts).double().var()) / num_runs for counts in runs))
    assert mean >= sum(found[place]["sum_accepted_on_transcript"] for place in chosen) - 4 * error


def observed(trained: Trained, number: int, indices: Sequence[int]) -> extra_metrics.ObservedBlocks:
    """Draft blocks through the drafter itself and put beside them what the text and the target say."""
    transcript, spec = trained.scene.transcripts[number], trained.spec
    start = sum(one.num_tokens for one in trained.scene.transcripts[:number])
    states = trained.scene.states(spec.target_layer_ids)
    final_TD = states.load_final()[start : start + transcript.num_tokens]
    response = torch.tensor(transcript.response_ids)
    index_A = torch.tensor(indices)
    position_A = index_A + len(transcript.prompt_ids)
    place_AP = index_A[:, None] + 1 + torch.arange(spec.num_drafts)
    layout = {"block_size": spec.block_size, "max_new_tokens": MAX_NEW_TOKENS, "row_alignment": spec.row_alignment}
    num_slots_A = torch.tensor([walk.num_slots(index, **layout) for index in indices])
    anchors = Anchors(position_A, response[index_A], num_slots_A)
    with torch.inference_mode():
        context = trained.drafter.read_context(trained.features(number))
        (hidden,) = trained.drafter.draft_hidden([context], [anchors], spec.block_size)
    first = walk.first_row(spec.row_alignment)
    final_AP = (position_A[:, None] + torch.arange(spec.num_drafts)).clamp(max=len(final_TD) - 1)
    return extra_metrics.ObservedBlocks(
        hidden_APD=hidden[:, first : first + spec.num_drafts],
        anchor_A=response[index_A],
        reference_AP=response[place_AP.clamp(max=len(response) - 1)],
        available_A=(len(response) - 1 - index_A).clamp(max=spec.num_drafts),
        drafted_A=(MAX_NEW_TOKENS - 1 - index_A).clamp(max=spec.num_drafts),
        final_APD=final_TD[final_AP],
    )


def test_shown_directly_or_while_scoring_it_counts_the_same(plain_argmax: Trained) -> None:
    rows, extras = scored(plain_argmax, EVERYTHING)
    shown = ExtraMetrics(plain_argmax.head, EVERYTHING, target_logits=logits_of(plain_argmax.scene))
    for number, transcript in enumerate(plain_argmax.scene.transcripts):
        visited = [index for one, index, _ in anchors_of(rows, plain_argmax) if one == number]
        for part in filter(None, (visited[:3], visited[3:])):
            with torch.inference_mode():
                shown.observe(transcript.id, observed(plain_argmax, number, part))
    assert shown.rows()["recall"] == extras["recall"]
    for here, there in zip(shown.rows()["sampled"], extras["sampled"], strict=True):
        assert here == {key: pytest.approx(one) if isinstance(one, float) else one for key, one in there.items()}


def test_scoring_at_every_anchor_gives_the_same_extras_and_the_same_rows_as_without(trained: Trained) -> None:
    rows, extras = scored(trained, EVERYTHING)
    all_rows, of_all = scored(trained, EVERYTHING, anchors="all")
    assert rows == trained.rows()
    assert all_rows == trained.rows(anchors="all")
    for name in extras:
        for here, there in zip(extras[name], of_all[name], strict=True):
            expected = {key: pytest.approx(one) if isinstance(one, float) else one for key, one in there.items()}
            assert here | {"method": None} == expected | {"method": None}


def test_slices_change_nothing(trained: Trained) -> None:
    _, expected = scored(trained, EVERYTHING)
    _, found = scored(trained, EVERYTHING, slicing=Slicing(extra_logits_elements=700, extra_blocks=3))
    for name, rows in expected.items():
        for here, there in zip(found[name], rows, strict=True):
            assert here == {key: pytest.approx(one) if isinstance(one, float) else one for key, one in there.items()}


def test_logits_are_never_made_for_more_rows_than_the_budget(
    plain_argmax: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []
    logits = plain_argmax.head.logits
    monkeypatch.setattr(plain_argmax.head, "_rows_at_once", 5)
    monkeypatch.setattr(plain_argmax.head, "logits", lambda rows: sizes.append(len(rows)) or logits(rows))
    scored(plain_argmax, EVERYTHING, slicing=Slicing(extra_logits_elements=5 * plain_argmax.head.num_proposable))
    assert max(sizes) == 5


def test_what_is_not_wanted_is_not_there(plain_argmax: Trained) -> None:
    rows, extras = scored(plain_argmax, ExtraSettings())
    assert not ExtraSettings()
    assert extras == {}
    assert rows == plain_argmax.rows()
    for name, wanted in {"recall": {"recall_ks": (1,)}, "trees": {"tree_budgets": (3,)}}.items():
        assert set(scored(plain_argmax, ExtraSettings(**wanted))[1]) == {name}


def test_temperatures_without_the_targets_logits_are_a_mistake_of_the_caller(plain_argmax: Trained) -> None:
    with pytest.raises(AssertionError):
        ExtraMetrics(plain_argmax.head, ExtraSettings(temperatures=(1.0,)))
