"""Padding of the head never wins, and of an embedding only the rows that are asked for are touched."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_core import evaluation, stages
from dflash_core.config import parse_config
from dflash_core.drafter.head import Head, Rows
from dflash_core.drafter.model import Drafter
from dflash_core.drafter_reading import read_drafter
from dflash_core.drafter_run import load_drafter
from dflash_core.store import Store
from dflash_core.target.head import load_embedding_and_head
from tests.support import scene, tiny

CPU = torch.device("cpu")
NUM_TOKENS = 150


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Drafter:
    target = tiny.write_tiny_target(tmp_path_factory.mktemp("target"), "qwen3")
    spec, weights = tiny.random_weights(tiny.draft_config(target), target)
    return Drafter(spec, weights, load_embedding_and_head(target).embedding_VD, device=CPU, dtype=torch.float32)


def padded_head() -> tuple[Tensor, Tensor]:
    """Return a head whose padding would win every row, and the hidden rows."""
    generator = torch.Generator().manual_seed(0)
    head_VD = torch.randn(tiny.VOCAB, 64, generator=generator)
    hidden_RD = torch.randn(50, 64, generator=generator)
    head_VD[NUM_TOKENS:] = 0.0
    head_VD[NUM_TOKENS:, 0] = 1000.0
    hidden_RD[:, 0] = hidden_RD[:, 0].abs() + 1.0
    return head_VD, hidden_RD


class TestPadding:
    def test_it_would_win_and_cannot(self, drafter: Drafter) -> None:
        head_VD, hidden_RD = padded_head()
        assert (Head(head_VD, drafter).choose(Rows(hidden_RD)) >= NUM_TOKENS).all(), "it is what this test is about"
        chosen = Head(head_VD, drafter, num_token_rows=NUM_TOKENS).choose(Rows(hidden_RD))
        assert torch.equal(chosen, (hidden_RD @ head_VD[:NUM_TOKENS].T).argmax(dim=1))

    @pytest.mark.parametrize("softcap", [None, 5.0])
    def test_it_is_not_counted_in_ranks(self, drafter: Drafter, softcap: float | None) -> None:
        head_VD, hidden_RD = padded_head()
        capped = Drafter.__new__(Drafter)
        capped.__dict__ |= drafter.__dict__ | {"spec": replace(drafter.spec, final_logit_softcapping=softcap)}
        best = (hidden_RD @ head_VD[:NUM_TOKENS].T).topk(2, dim=1).indices
        head = Head(head_VD, capped, num_token_rows=NUM_TOKENS)
        hits, ranks = head.compare(Rows(hidden_RD), best[:, 0])
        if softcap is None:  # capping makes equals of large logits
            assert hits.all()
            assert (head.compare(Rows(hidden_RD), best[:, 1])[1] == 2).all()
        assert (ranks <= NUM_TOKENS).all()

    def test_a_text_with_a_token_of_the_padding_is_a_miss_and_no_error(self, drafter: Drafter) -> None:
        head_VD, hidden_RD = padded_head()
        head = Head(head_VD, drafter, num_token_rows=NUM_TOKENS)
        hits, ranks = head.compare(Rows(hidden_RD), torch.full((50,), NUM_TOKENS + 3))
        assert not hits.any()
        assert (ranks == tiny.VOCAB).all()


def test_scoring_masks_what_the_targets_tokenizer_does_not_know(tmp_path: Path) -> None:
    """A target whose head is longer than its tokenizer: the mask token may be padding, a proposal may not."""
    setup = scene.make_setup(tmp_path)
    path = setup.folder / "target" / "tokenizer.json"
    data = json.loads(path.read_text())
    data["model"]["vocab"] = {word: token for word, token in data["model"]["vocab"].items() if token < NUM_TOKENS}
    path.write_text(json.dumps(data))
    (folder,) = setup.run.iterdir()
    weights = load_file(folder / "model.safetensors")
    config = parse_config({"store": str(tmp_path / "s"), **json_config(setup)}, where="test")
    plan = stages.plan_target(config)
    spec = read_drafter(evaluation.inspect(str(folder), config), config, plan.target.config)
    assert spec.mask_token_id >= NUM_TOKENS

    def write(folder: Path) -> dict[str, str]:
        save_file(weights, folder / stages.WEIGHTS_NAME)
        return {}

    artifact = Store(config.store).build(stages.DRAFTER_KIND, "k", write)
    model, head = load_drafter(plan, artifact, spec, device=CPU, dtype=torch.float32)
    logits = head.logits(torch.randn(7, 64))
    assert torch.isneginf(logits[:, NUM_TOKENS:]).all()
    assert torch.isfinite(logits[:, :NUM_TOKENS]).all()
    assert torch.isfinite(model.embed(torch.tensor([spec.mask_token_id]))).all()


def json_config(setup: scene.Setup) -> dict[str, object]:
    """Return target and prompts of a set-up as configuration."""
    return {"target": {"model": str(setup.folder / "target")}, "prompts": str(setup.folder / "prompts.jsonl")}


class _Counting(torch.Tensor):
    """An embedding that notes how many of its elements are read by look-ups, and refuses to be moved whole."""

    looked_up: list[int]

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        plain = [arg.as_subclass(torch.Tensor) if isinstance(arg, _Counting) else arg for arg in args]
        for arg in args:
            if isinstance(arg, _Counting):
                assert func in (torch.Tensor.to, torch.Tensor.device.__get__) or "embedding" in str(func), func
        result = func(*plain, **(kwargs or {}))
        if "embedding" in str(func):
            cls.looked_up.append(result.shape[0])
        return result


def test_each_row_that_is_asked_for_is_read_once_and_no_other(drafter: Drafter) -> None:
    table = torch.randn(tiny.VOCAB, 64)
    counting = table.clone().as_subclass(_Counting)
    _Counting.looked_up = []
    one = Drafter(drafter.spec, drafter._weights, counting, device=CPU, dtype=torch.bfloat16)
    ids_AK = torch.full((30, 8), tiny.MASK_TOKEN_ID)
    ids_AK[:, 0] = torch.arange(30) % 9
    rows = one.embed(ids_AK)
    assert _Counting.looked_up == [10], "nine anchors' tokens and the mask"
    assert torch.equal(rows, table[ids_AK].bfloat16() * drafter.spec.input_embedding_scale)


_MEASURE = """
import sys, torch
from pathlib import Path
from dflash_core.drafter.model import Drafter
from dflash_core.target.head import load_embedding_and_head
from dflash_core.target.loading import read_target_folder
from tests.support import tiny

def private_kb():
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1])

target = read_target_folder(Path(sys.argv[1]), name="t")
config = tiny.draft_config(target)
spec, weights = tiny.random_weights(config, target)
before = private_kb()
table = load_embedding_and_head(target).embedding_VD
drafter = Drafter(spec, weights, table, device=torch.device("cpu"), dtype=torch.float32)
ids = torch.randint(0, target.config.vocab_size, (64, 8))
rows = drafter.embed(ids)
print(private_kb() - before, table.numel() * 2 // 1024)
"""


def test_an_embedding_of_another_dtype_is_never_copied_whole(tmp_path: Path) -> None:
    """Of a file full of holes, so that half a gigabyte costs no disk; float32 of it would be a gigabyte."""
    vocab, width = 1 << 22, 64
    header = {"model.embed_tokens.weight": {"dtype": "BF16", "shape": [vocab, width], "data_offsets": [0, vocab * 128]}}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + vocab * width * 2)
    sizes = {"hidden_size": width, "num_hidden_layers": 6, "vocab_size": vocab, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    grown_kb, table_kb = map(int, done.stdout.split())
    assert table_kb == 512 * 1024
    assert grown_kb < 32 * 1024
