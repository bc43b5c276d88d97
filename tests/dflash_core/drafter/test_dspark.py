"""DSpark walks, and those of other drafters with shifted rows, against a plain loop that drafts token by token."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_core.drafter.model import Anchors
from tests.support import official as scenes
from tests.support.official import MAX_NEW_TOKENS, Scene, Trained, Walks

STEPS = (15, 50)
REDUCED = {"draft_vocab_size": 120}
# Name to kind of Markov head, None for none, and settings of the top level.
KINDS: dict[str, tuple[str | None, dict[str, Any]]] = {
    "vanilla": ("vanilla", {}),
    "gated": ("gated", {}),
    "rnn": ("rnn", {}),
    "rnn, causal": ("rnn", {"is_causal": True}),
    "gated, same position": ("gated", {"sample_from_anchor": False}),
    "rnn, reduced vocabulary": ("rnn", REDUCED),
    "no head, shifted rows": (None, {"sample_from_anchor": True}),
    "no head, reduced vocabulary": (None, REDUCED),
    "jetspec, shifted rows": (None, {"dflash_config": {"causal_head": True, "draft_shift": True}}),
}


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("dspark")
    return scenes.make_scene(folder, scenes.write_target(folder / "target", "llama", scale=8.0))


@pytest.fixture(scope="module", params=KINDS)
def trained(scene: Scene, request: pytest.FixtureRequest) -> dict[int, Trained]:
    kind, changes = KINDS[request.param]
    if kind is None:
        nested = changes.get("dflash_config", {})
        top = {key: value for key, value in changes.items() if key != "dflash_config"}
        config = scenes.z_lab_config(scene.target, nested=nested, **top)
    else:
        config = scenes.dspark_config(scene.target, kind, **changes)
    d2t = None
    if "draft_vocab_size" in changes:
        kept = torch.tensor([token for token in range(scene.target.config.vocab_size) if token % 4 != 1])
        assert len(kept) == changes["draft_vocab_size"]
        d2t = kept - torch.arange(len(kept))
    return scenes.train(scene, config, steps=STEPS, d2t=d2t)


def sigmoid(number: float) -> float:
    return 1 / (1 + math.exp(-number))


def drafting(one: Trained) -> tuple[int, int]:
    """Return the row that drafts the token after the anchor, and the slots of a block that draft nothing."""
    nested = one.config["dflash_config"]
    shifted = one.config.get("sample_from_anchor", "markov_rank" in nested)
    if nested.get("draft_shift"):
        return 0, 1
    return (0, 0) if shifted else (1, 1)


def plain_drafts(one: Trained, hidden_KD: Tensor, anchor: int, num_drafts: int) -> Iterator[int]:
    """Draft one block token by token, as far as asked, each biased by the one before; in float64, without our head."""
    w = {name: tensor.double() for name, tensor in one.weights.items() if name != "d2t"}
    head = (one.scene.tables.head_VD if one.head_VD is None else one.head_VD).double()
    nested = one.config["dflash_config"]
    rank, kind = nested.get("markov_rank", 0), nested.get("markov_head_type")
    first_row, _ = drafting(one)
    state = [0.0] * rank
    before = anchor
    for place in range(num_drafts):
        hidden = hidden_KD[first_row + place].double()
        code = w["markov_head.markov_w1.weight"][before] if kind else torch.empty(0).double()
        if kind in ("vanilla", None):
            bottleneck = code
        elif kind == "gated":
            gate = w["markov_head.gate_proj.weight"] @ torch.cat([hidden, code]) + w["markov_head.gate_proj.bias"]
            bottleneck = torch.tensor([sigmoid(one_) for one_ in gate.tolist()]).double() * code
        else:
            read = torch.cat([torch.tensor(state).double(), code, hidden])
            joint = (w["markov_head.joint_proj.weight"] @ read + w["markov_head.joint_proj.bias"]).tolist()
            gates, candidates, outputs = joint[:rank], joint[rank : 2 * rank], joint[2 * rank :]
            state = [
                sigmoid(gate) * old + (1 - sigmoid(gate)) * math.tanh(new)
                for gate, old, new in zip(gates, state, candidates, strict=True)
            ]
            bottleneck = torch.tensor([math.tanh(output) for output in outputs]).double()
        bias = w["markov_head.markov_w2.weight"] @ bottleneck if kind else 0
        own = int((head @ hidden + bias).argmax())
        before = own + (int(one.weights["d2t"][own]) if "d2t" in one.weights else 0)
        yield before


def plain_walks(one: Trained, block_size: int) -> Walks:
    """Walk as serving does: draft, compare with the text, emit what was accepted and one token more."""
    walks: Walks = {}
    _, idle = drafting(one)
    for number, transcript in enumerate(one.scene.transcripts):
        context = one.drafter.read_context(one.features(number))
        response = transcript.response_ids
        walks[transcript.id] = []
        place = 0
        while place < len(response) - 1:
            left = MAX_NEW_TOKENS - 1 - place
            slots = min(block_size, left + 1) if idle else block_size
            num_drafts = min(left, slots - idle)
            anchors = Anchors(
                torch.tensor([len(transcript.prompt_ids) + place]),
                torch.tensor([response[place]]),
                torch.tensor([slots]),
            )
            ((hidden_KD,),) = one.drafter.draft_hidden([context], [anchors], block_size)
            drafts = plain_drafts(one, hidden_KD, response[place], num_drafts)
            accepted = matching(drafts, response[place + 1 :])
            emitted = min(accepted + 1, len(response) - 1 - place)
            walks[transcript.id].append(emitted)
            place += emitted
    return walks


def matching(drafts: Iterable[int], text: Sequence[int]) -> int:
    """Count drafts that agree with the text, up to the first that does not: what follows has no say."""
    count = 0
    for draft, token in zip(drafts, text, strict=False):
        if draft != token:
            break
        count += 1
    return count


@pytest.mark.parametrize("steps", STEPS)
def test_walks_equal_a_plain_loop(trained: dict[int, Trained], steps: int) -> None:
    one = trained[steps]
    assert one.walks() == plain_walks(one, one.spec.block_size)


def test_shorter_blocks_and_every_anchor(trained: dict[int, Trained]) -> None:
    one = trained[STEPS[-1]]
    for block_size in (2, 5):
        assert one.walks(block_size=block_size) == plain_walks(one, block_size)
    assert one.walks(anchors="all") == one.walks()


def test_a_block_of_one_slot(trained: dict[int, Trained]) -> None:
    """Where its row drafts the next position it proposes one token; else none, and tau is 1."""
    one = trained[STEPS[-1]]
    walks = one.walks(block_size=1)
    assert walks == plain_walks(one, 1)
    lengths = {length for walk in walks.values() for length in walk}
    assert lengths == ({1} if drafting(one)[1] else {1, 2})


def test_the_walks_are_worth_comparing(trained: dict[int, Trained]) -> None:
    lengths = {length for one in trained.values() for walk in one.walks().values() for length in walk}
    assert lengths >= {1, 2}
    assert max(lengths) > 3
    spec = trained[STEPS[-1]].spec
    assert spec.num_drafts == spec.block_size - drafting(trained[STEPS[-1]])[1]
    if spec.draft_vocab_size is None:
        assert max(lengths) == spec.num_drafts + 1, "a whole block and the bonus token"


@pytest.mark.parametrize("trained", [name for name, (kind, _) in KINDS.items() if kind], indirect=True)
def test_the_markov_head_has_a_say(trained: dict[int, Trained]) -> None:
    """Without its bias the walks are others."""
    one = trained[STEPS[0]]
    assert one.spec.proposal_rule == "dspark"
    silent = {name: torch.zeros_like(tensor) if "markov_w2" in name else tensor for name, tensor in one.weights.items()}
    assert Trained(one.scene, one.config, silent, one.head_VD).walks() != one.walks()
