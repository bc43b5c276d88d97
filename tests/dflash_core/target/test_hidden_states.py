"""Hidden states: transformers' own numbers per layer, the convention of the last one, and what is computed again."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_core.errors import ArtifactDamaged, CheckpointMismatch
from dflash_core.store import Store
from dflash_core.target import hidden_states, runtime
from dflash_core.target.head import load_embedding_and_head
from dflash_core.target.hidden_states import (
    CHOICES,
    FINAL,
    HiddenStates,
    extract_hidden_states,
    find_hidden_states,
    layer_key,
    store_dtype_of,
)
from dflash_core.target.loading import Target, read_target_folder
from dflash_core.target.runtime import load_model
from dflash_core.target.transcripts import RenderedPrompt, Transcript, generate, transcripts_digest
from tests.support import tiny
from tests.support.tiny_families import DEPTH, write_family

DTYPES = {"compute_dtype": "float32", "store_dtype": "float32"}
NORM_WEIGHT = 3.0


FAMILIES = ["qwen3", "llama", "gemma3", "qwen3.5"]


@dataclasses.dataclass(frozen=True)
class Scene:
    target: Target
    transcripts: list[Transcript]
    states: HiddenStates
    """Every layer, in float32."""

    def slices(self) -> list[slice]:
        """Return the places of each transcript on the axis T."""
        starts = [0]
        for transcript in self.transcripts:
            starts.append(starts[-1] + transcript.num_tokens)
        return [slice(first, end) for first, end in zip(starts, starts[1:], strict=False)]


def make_scene(target: Target, store: Store) -> Scene:
    generator = torch.Generator().manual_seed(5)
    prompts = [
        RenderedPrompt(
            id=f"p{number}", prompt_ids=tuple(torch.randint(8, 150, (length,), generator=generator).tolist())
        )
        for number, length in enumerate((5, 1, 9))
    ]
    model = load_model(target, "float32")
    # One by one: a batch could round a near-tie the other way.
    transcripts = generate(model, prompts, stop_token_ids=[7], max_new_tokens=12, batch_size=1)
    return Scene(target, transcripts, extract_hidden_states(store, target, transcripts, range(DEPTH), **DTYPES))


@pytest.fixture(scope="module", params=FAMILIES)
def scene(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Scene:
    folder = tmp_path_factory.mktemp("scene")
    return make_scene(write_family(folder / "target", request.param, tied=False), Store(folder / "store"))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """Return a tiny Qwen3 whose final norm multiplies by three, so that before and after it differ clearly."""
    folder = tmp_path_factory.mktemp("norm") / "target"
    tiny.write_tiny_target(folder, "qwen3")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"] = torch.full_like(tensors["model.norm.weight"], NORM_WEIGHT)
    save_file(tensors, path, metadata={"format": "pt"})
    return read_target_folder(folder, name="tiny")


@pytest.fixture(scope="module")
def norm_scene(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return make_scene(target, Store(tmp_path_factory.mktemp("store")))


class TestConvention:
    def test_every_layer_but_the_last_is_transformers_own_number(self, scene: Scene) -> None:
        """transformers' tuple starts with the embeddings and ends after the final norm."""
        model = load_model(scene.target, "float32")
        for transcript, place in zip(scene.transcripts, scene.slices(), strict=True):
            ids = torch.tensor([[*transcript.prompt_ids, *transcript.response_ids]])
            with torch.inference_mode():
                states = model(ids, output_hidden_states=True, use_cache=False).hidden_states
            assert len(states) == DEPTH + 1
            for layer in range(DEPTH - 1):
                assert torch.equal(scene.states.load_layer(layer)[place], states[layer + 1][0]), layer
            assert torch.equal(scene.states.load_final()[place], states[-1][0])
            assert not torch.equal(scene.states.load_layer(DEPTH - 1)[place], states[-1][0])

    def test_the_stored_final_state_and_the_head_give_the_transcript(self, scene: Scene) -> None:
        head = load_embedding_and_head(scene.target).head_VD
        chosen = (scene.states.load_final() @ head.T).argmax(dim=-1)
        for transcript, place in zip(scene.transcripts, scene.slices(), strict=True):
            first = place.start + len(transcript.prompt_ids) - 1
            assert chosen[first : place.stop - 1].tolist() == list(transcript.response_ids)

    def test_the_last_layer_is_kept_before_the_final_norm(self, norm_scene: Scene) -> None:
        last = norm_scene.states.load_layer(DEPTH - 1)
        normed = last * torch.rsqrt(last.pow(2).mean(-1, keepdim=True) + 1e-6) * NORM_WEIGHT
        torch.testing.assert_close(norm_scene.states.load_final(), normed, atol=1e-5, rtol=1e-5)
        assert norm_scene.states.load_final().pow(2).mean(-1).sqrt().allclose(torch.tensor(NORM_WEIGHT), atol=1e-3)

    def test_what_is_stored_says_its_convention(self, norm_scene: Scene) -> None:
        states = norm_scene.states
        total = sum(transcript.num_tokens for transcript in norm_scene.transcripts)
        for layer, artifact in states.layers.items():
            assert artifact.meta["part"] == layer
            assert artifact.meta["convention"] == "residual, before the next norm"
            assert (artifact.meta["num_tokens"], artifact.meta["width"]) == (total, 64)
        assert states.final.meta["convention"] == "after the final norm"
        assert states.choices.meta["num_not_greedy"] == 0

    def test_a_narrower_dtype_is_the_same_number_rounded(self, norm_scene: Scene, tmp_path: Path) -> None:
        rounded = extract_hidden_states(
            Store(tmp_path),
            norm_scene.target,
            norm_scene.transcripts,
            [2],
            compute_dtype="float32",
            store_dtype="bfloat16",
        )
        assert torch.equal(rounded.load_layer(2), norm_scene.states.load_layer(2).bfloat16())
        assert rounded.load_final().dtype == torch.bfloat16
        assert torch.equal(rounded.load_margins(), norm_scene.states.load_margins()), "margins are never rounded"


class TestMargins:
    def test_they_are_the_logit_of_the_next_token_less_the_best_other(self, scene: Scene) -> None:
        model = load_model(scene.target, "float32")
        margins = scene.states.load_margins()
        for transcript, place in zip(scene.transcripts, scene.slices(), strict=True):
            ids = [*transcript.prompt_ids, *transcript.response_ids]
            with torch.inference_mode():
                logits = model(torch.tensor([ids])).logits[0].tolist()
            for index, token in enumerate(ids):
                found = float(margins[place.start + index])
                if index < len(transcript.prompt_ids) - 1 or index == len(ids) - 1:
                    assert found == math.inf, "nobody judges prompt tokens, and the last has no next"
                    continue
                others = max(value for other, value in enumerate(logits[index]) if other != ids[index + 1])
                assert found == pytest.approx(logits[index][ids[index + 1]] - others, abs=1e-4), token
                assert found >= 0

    def test_a_token_that_the_target_would_not_have_chosen_is_negative(self, norm_scene: Scene, tmp_path: Path) -> None:
        transcript = norm_scene.transcripts[0]
        response = list(transcript.response_ids)
        response[4] = response[4] + 1 if response[4] < 100 else response[4] - 1
        forged = dataclasses.replace(transcript, response_ids=tuple(response))
        states = extract_hidden_states(Store(tmp_path), norm_scene.target, [forged], [], **DTYPES)
        margins = states.load_margins()
        place = len(transcript.prompt_ids) - 1 + 4
        assert margins[place] < 0
        assert (margins[:place] >= 0).all()
        assert states.choices.meta["num_not_greedy"] >= 1


class TestReuse:
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return Store(tmp_path / "store")

    def extract(self, scene: Scene, store: Store, *layers: int) -> tuple[HiddenStates, int]:
        """Return the states and how often the target ran for them."""
        before = runtime.num_forward_passes
        states = extract_hidden_states(store, scene.target, scene.transcripts, layers, **DTYPES)
        return states, runtime.num_forward_passes - before

    def test_one_pass_per_transcript_and_none_the_second_time(self, norm_scene: Scene, store: Store) -> None:
        first, num_passes = self.extract(norm_scene, store, 1, 4)
        assert num_passes == len(norm_scene.transcripts)
        assert first.was_built
        again, num_passes = self.extract(norm_scene, store, 4, 1)
        assert (num_passes, again.was_built) == (0, False)

    def test_a_layer_added_later_leaves_the_others_alone(self, norm_scene: Scene, store: Store) -> None:
        first, _ = self.extract(norm_scene, store, 1)

        def stamps() -> list[tuple[int, int]]:
            artifacts = [first.layers[1], first.final, first.choices]
            stats = [file.stat() for artifact in artifacts for file in artifact.path.glob("*.safetensors")]
            return [(stat.st_ino, stat.st_mtime_ns) for stat in stats]

        before = stamps()
        more, num_passes = self.extract(norm_scene, store, 1, 3)
        assert (num_passes, more.was_built) == (len(norm_scene.transcripts), True)
        assert stamps() == before
        assert len(list((store.root / "hidden_states").iterdir())) == 4
        assert torch.equal(more.load_layer(3), norm_scene.states.load_layer(3))
        assert torch.equal(more.load_layer(1), norm_scene.states.load_layer(1))

    @pytest.mark.parametrize("part", [1, FINAL, CHOICES], ids=str)
    def test_only_the_damaged_part_is_made_again(self, norm_scene: Scene, store: Store, part: int | str) -> None:
        states, _ = self.extract(norm_scene, store, 1)
        artifact = {1: states.layers[1], FINAL: states.final, CHOICES: states.choices}[part]
        (file,) = artifact.path.glob("*.safetensors")
        whole = file.read_bytes()
        file.write_bytes(whole[:-4])
        name = transcripts_digest(norm_scene.transcripts)
        assert find_hidden_states(store, norm_scene.target, name, [1], **DTYPES) is None
        again, num_passes = self.extract(norm_scene, store, 1)
        # The final states, kept exactly, are all that the choices need.
        assert (num_passes, again.was_built) == (0 if part == CHOICES else len(norm_scene.transcripts), True)
        assert file.read_bytes() == whole
        assert len(list((store.root / "hidden_states").iterdir())) == 3

    def test_a_layer_asked_for_twice_is_kept_once(self, norm_scene: Scene, store: Store) -> None:
        states, _ = self.extract(norm_scene, store, 2, 2)
        assert set(states.layers) == {2}
        name = transcripts_digest(norm_scene.transcripts)
        found = find_hidden_states(store, norm_scene.target, name, [2, 2], **DTYPES)
        assert found is not None
        assert not found.was_built

    def test_nothing_is_found_before_it_was_made(self, norm_scene: Scene, store: Store) -> None:
        name = transcripts_digest(norm_scene.transcripts)
        assert find_hidden_states(store, norm_scene.target, name, [1], **DTYPES) is None
        self.extract(norm_scene, store, 1)
        assert find_hidden_states(store, norm_scene.target, name, [1], **DTYPES) is not None
        assert find_hidden_states(store, norm_scene.target, name, [1, 2], **DTYPES) is None
        assert find_hidden_states(store, norm_scene.target, "other transcripts", [1], **DTYPES) is None

    @pytest.mark.parametrize("layer", [DEPTH, -1])
    def test_a_layer_outside_the_target_is_refused_before_it_runs(
        self, norm_scene: Scene, store: Store, layer: int
    ) -> None:
        before = runtime.num_forward_passes
        with pytest.raises(CheckpointMismatch, match=rf"\[1, {layer}\].*has layers 0\.\.{DEPTH - 1}"):
            self.extract(norm_scene, store, 1, layer)
        assert runtime.num_forward_passes == before
        assert not store.root.exists()

    def test_a_file_that_breaks_after_it_was_found_is_named(self, norm_scene: Scene, store: Store) -> None:
        states, _ = self.extract(norm_scene, store, 1)
        (file,) = states.layers[1].path.glob("*.safetensors")
        file.write_bytes(b"x")
        with pytest.raises(ArtifactDamaged, match=str(file)):
            states.load_layer(1)


class TestNames:
    def key(self, target: Target, **changes: Any) -> str:
        facts: dict[str, Any] = {"transcripts": "t", "part": 1, **DTYPES} | changes
        return layer_key(
            target,
            facts["transcripts"],
            facts["part"],
            compute_dtype=facts["compute_dtype"],
            store_dtype=facts["store_dtype"],
        )

    @pytest.mark.parametrize(
        "changes",
        [{"transcripts": "u"}, {"part": 2}, {"part": "1"}, {"compute_dtype": "bfloat16"}, {"store_dtype": "bfloat16"}],
        ids=str,
    )
    def test_a_key_changes_with_what_decides(self, target: Target, changes: dict[str, Any]) -> None:
        assert self.key(target, **changes) != self.key(target)

    def test_a_key_changes_with_the_target_and_the_code_but_not_with_a_name(
        self, target: Target, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = self.key(target)
        assert self.key(dataclasses.replace(target, name="other", folder=Path("/x"))) == before
        assert self.key(dataclasses.replace(target, identity="other")) != before
        monkeypatch.setattr(hidden_states, "EXTRACTION_VERSION", hidden_states.EXTRACTION_VERSION + 1)
        assert self.key(target) != before

    @pytest.mark.parametrize(
        ("configured", "stored", "compute", "expected"),
        [
            ("auto", "bfloat16", "float32", "bfloat16"),
            ("auto", "float32", "bfloat16", "float32"),
            ("auto", None, "float32", "float32"),
            ("auto", "float8_e4m3fn", "bfloat16", "bfloat16"),
            ("float32", "bfloat16", "bfloat16", "float32"),
        ],
    )
    def test_states_are_stored_in_the_targets_dtype_unless_told_otherwise(
        self, target: Target, configured: str, stored: str | None, compute: str, expected: str
    ) -> None:
        config = dataclasses.replace(target.config, dtype=stored)
        assert store_dtype_of(dataclasses.replace(target, config=config), configured, compute) == expected
