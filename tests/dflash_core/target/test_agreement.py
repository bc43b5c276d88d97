"""Whether transcripts are the target's own, and what is named as the cause where they are not."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_core.store import Store
from dflash_core.target.agreement import judge_agreement
from dflash_core.target.choices import NO_NEXT_TOKEN, Choices
from dflash_core.target.hidden_states import extract_hidden_states
from dflash_core.target.loading import read_target_folder
from dflash_core.target.runtime import load_model
from dflash_core.target.transcripts import RenderedPrompt, Transcript, generate
from tests.support import tiny

DTYPES = {"compute_dtype": "float32", "store_dtype": "float32"}


def choices_of(*responses: list[float], num_prompt: int = 3) -> tuple[Choices, list[tuple[int, int]]]:
    """Return choices with the given margins of each response."""
    margins: list[float] = []
    for response in responses:
        margins += [NO_NEXT_TOKEN] * (num_prompt - 1) + response + [NO_NEXT_TOKEN]
    margin = torch.tensor(margins)
    empty = torch.zeros(len(margins))
    made = Choices(chosen=empty.int(), margin=margin, rank=empty.int(), log_probability=empty)
    return made, [(num_prompt, len(response)) for response in responses]


def test_ties_and_misses_are_counted_over_responses_alone() -> None:
    found = judge_agreement(*choices_of([2.0, 0.0, 0.0005, -0.0002], [1.0] * 296))
    assert (found.num_tokens, found.num_greedy, found.num_near_ties) == (300, 299, 3)
    assert found.share == pytest.approx(299 / 300)
    assert found.warning is None


def test_no_response_tokens_is_no_share() -> None:
    found = judge_agreement(*choices_of([], []))
    assert (found.num_tokens, found.share, found.warning) == (0, None, None)


@pytest.mark.parametrize(
    ("responses", "cause"),
    [
        ([[-3.0, -2.0, -4.0, 1.0, *[2.0] * 36]] * 4, "first tokens, as where another chat template"),
        ([[*[2.0] * 9, -3.0, *[-3.0] * 9, -2.5, *[2.0] * 9]] * 9 + [[-1.0] * 90], "nearly everywhere"),
        ([[*[2.0] * 15, -0.2, *[3.0] * 14, -0.1, *[2.0] * 9]] * 4, "are quantised"),
        ([[*[2.0] * 9, -3.0, *[3.0] * 9, -2.5, *[2.0] * 9]] * 4, "the server sampled"),
    ],
    ids=["first tokens", "everywhere", "small margins", "large margins"],
)
def test_the_likeliest_cause_is_named(responses: list[list[float]], cause: str) -> None:
    found = judge_agreement(*choices_of(*responses))
    assert found.warning is not None
    assert cause in found.warning
    assert "\n" not in found.warning


class TestARealTarget:
    """A tiny target whose transcripts were written under other conditions, as a server's may be."""

    @pytest.fixture(scope="class")
    @staticmethod
    def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
        folder = tmp_path_factory.mktemp("agreement")
        tiny.write_tiny_target(folder / "target", "qwen3")
        return folder

    def write(self, folder: Path, name: str = "target") -> list[Transcript]:
        generator = torch.Generator().manual_seed(5)
        prompts = [
            RenderedPrompt(id=f"p{number}", prompt_ids=tuple(torch.randint(8, 150, (9,), generator=generator).tolist()))
            for number in range(6)
        ]
        model = load_model(read_target_folder(folder / name, name=name), "float32")
        return generate(model, prompts, stop_token_ids=[], max_new_tokens=40, batch_size=1)

    def judge(self, folder: Path, transcripts: list[Transcript], tmp_path: Path) -> tuple[int, list[str]]:
        target = read_target_folder(folder / "target", name="target")
        states = extract_hidden_states(Store(tmp_path), target, transcripts, [], **DTYPES)
        assert states.choices.meta["num_judged"] == 240
        return int(states.choices.meta["num_not_greedy"]), states.warnings

    def test_its_own_transcripts_agree(self, folder: Path, tmp_path: Path) -> None:
        assert self.judge(folder, self.write(folder), tmp_path) == (0, [])

    def test_rounded_weights_are_told_by_small_margins(self, folder: Path, tmp_path: Path) -> None:
        (tmp_path / "rounded").mkdir()
        for path in (folder / "target").iterdir():
            (tmp_path / "rounded" / path.name).write_bytes(path.read_bytes())
        file = tmp_path / "rounded" / "model.safetensors"
        tensors = {}
        for name, tensor in load_file(file).items():
            step = tensor.abs().max() / 24
            tensors[name] = (tensor / step).round() * step if tensor.ndim == 2 else tensor
        save_file(tensors, file, metadata={"format": "pt"})
        missed, warnings = self.judge(folder, self.write(tmp_path, "rounded"), tmp_path / "store")
        assert missed > 2
        assert "quantised" in warnings[0]

    def test_sampled_tokens_are_told_by_large_margins(self, folder: Path, tmp_path: Path) -> None:
        generator = torch.Generator().manual_seed(1)
        model = load_model(read_target_folder(folder / "target", name="target"), "float32")
        sampled = []
        for one in self.write(folder):
            ids = list(one.prompt_ids)
            for _ in range(40):
                with torch.inference_mode():
                    best = model(torch.tensor([ids])).logits[0, -1].topk(20).indices
                # One token in six is any of the twenty best.
                place = int(torch.randint(0, 120, (1,), generator=generator))
                ids.append(int(best[place if place < 20 else 0]))
            sampled.append(dataclasses.replace(one, response_ids=tuple(ids[len(one.prompt_ids) :])))
        missed, warnings = self.judge(folder, sampled, tmp_path)
        assert warnings[0].startswith(f"{missed} of 240 response tokens")
        assert "sampled" in warnings[0]

    def test_transcripts_of_another_prompt_differ_nearly_everywhere(self, folder: Path, tmp_path: Path) -> None:
        """A random target has no habits: without the end of its prompt it would have said something else throughout."""
        other = [dataclasses.replace(one, prompt_ids=one.prompt_ids[:-4]) for one in self.write(folder)]
        missed, warnings = self.judge(folder, other, tmp_path)
        assert missed > 120
        assert "nearly everywhere" in warnings[0]
