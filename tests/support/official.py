"""Tiny targets of any family, drafters of any rule trained on them, our walks and the official loop's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_core.acceptance import walk
from dflash_core.drafter.footprint import USUAL, Slicing
from dflash_core.drafter.head import Head, Rows, make_head
from dflash_core.drafter.model import Anchors, Drafter
from dflash_core.drafter.scoring import score_transcripts
from dflash_core.drafter.spec import DrafterSpec, read_drafter_spec
from dflash_core.store import Store
from dflash_core.target.head import load_embedding_and_head
from dflash_core.target.hidden_states import HiddenStates, extract_hidden_states
from dflash_core.target.loading import Target, read_target_folder
from dflash_core.target.runtime import load_model
from dflash_core.target.transcripts import RenderedPrompt, Transcript, generate
from tests.support import tiny
from tests.support.tiny_families import MAKERS

MAX_NEW_TOKENS = 44
CPU = torch.device("cpu")
SELECTOR = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 5}
Walks = dict[str, list[int]]


@dataclass
class Scene:
    """A tiny target and what it wrote; the last text is never trained on, so that weak blocks occur too."""

    target: Target
    model: Any
    transcripts: list[Transcript]
    stop_token_id: int | None
    store: Store
    tables: Any
    layers: dict[tuple[int, ...], HiddenStates] = field(default_factory=dict)

    def states(self, layers: tuple[int, ...]) -> HiddenStates:
        """Return hidden states, extracted once."""
        if layers not in self.layers:
            dtypes = {"compute_dtype": "float32", "store_dtype": "float32"}
            self.layers[layers] = extract_hidden_states(self.store, self.target, self.transcripts, layers, **dtypes)
        return self.layers[layers]

    @property
    def is_hybrid(self) -> bool:
        return "linear_attention" in (getattr(self.model.config, "layer_types", None) or ())

    def stop_token_ids(self) -> list[int]:
        return [] if self.stop_token_id is None else [self.stop_token_id]


def write_target(folder: Path, family: str, *, scale: float = 6.0) -> Target:
    """Save a random target whose larger weights make its greedy text vary."""
    torch.manual_seed(0)
    model = MAKERS[family](False)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(scale)
    model.save_pretrained(folder)
    return read_target_folder(folder, name=family)


def make_scene(folder: Path, target: Target, *, num_prompts: int = 3) -> Scene:
    """Let a target continue random prompts; one token, late in some texts and absent from another, stops it."""
    model = load_model(target, "float32")
    generator = torch.Generator().manual_seed(1)
    prompts = [
        RenderedPrompt(
            id=f"p{number}", prompt_ids=tuple(torch.randint(8, 150, (9 + 4 * number,), generator=generator).tolist())
        )
        for number in range(num_prompts)
    ]
    limits = {"max_new_tokens": MAX_NEW_TOKENS, "batch_size": num_prompts}
    unstopped = generate(model, prompts, stop_token_ids=[], **limits)
    stop = _stop_inside([transcript.response_ids for transcript in unstopped[:-1]])
    transcripts = generate(model, prompts, stop_token_ids=[] if stop is None else [stop], **limits)
    return Scene(target, model, transcripts, stop, Store(folder / "store"), load_embedding_and_head(target))


def _stop_inside(texts: Sequence[Sequence[int]]) -> int | None:
    return next(
        (
            token
            for text in texts
            for place, token in enumerate(text)
            if place >= 15 and token not in text[:place] and not all(token in other for other in texts)
        ),
        None,
    )


def z_lab_config(target: Target, *, nested: Mapping[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """Return a draft config; `nested` goes into `dflash_config`, those of DFlash2 make it one."""
    config = tiny.draft_config(target, **changes)
    config["dflash_config"] = config["dflash_config"] | dict(nested or {})
    if nested and "selector_rank" in nested:
        config["architectures"] = ["DFlash2DraftModel"]
    return config


def dspark_config(target: Target, kind: str, **changes: Any) -> dict[str, Any]:
    """Return a DSpark config as DeepSpec nests it in SpecForge's form."""
    nested = {"projector_type": "dspark", "markov_rank": 12, "markov_head_type": kind}
    return z_lab_config(target, nested=nested, **changes)


def random_tensors(config: Mapping[str, Any], target: Target, *, seed: int = 0) -> dict[str, Tensor]:
    """Return random weights of every tensor that a config calls for, shapes written out here."""
    _, weights = tiny.random_weights(_plain(config), target, seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    hidden, vocab, nested = config["hidden_size"], config["vocab_size"], config["dflash_config"]
    if "selector_rank" in nested:
        taps, rank = nested["conv_kernel_size"], nested["selector_rank"]
        kernels = 2 * taps * (hidden // nested["conv_group_size"])
        for layer in range(config["num_hidden_layers"]):
            for name in ("attention_conv", "mlp_conv"):
                base = 0.3 * torch.randn(2, taps, hidden, generator=generator)
                base[:, 0] += 1.0
                weights[f"layers.{layer}.{name}.base_kernel"] = base
                projection = 0.05 * torch.randn(kernels, hidden, generator=generator)
                weights[f"layers.{layer}.{name}.kernel_projection.weight"] = projection
        for side in ("predecessor", "successor"):
            weights[f"candidate_selector.{side}_codebook"] = torch.randn(vocab, rank, generator=generator)
        weights["candidate_selector.hidden_projection.weight"] = 0.1 * torch.randn(rank, hidden, generator=generator)
    if nested.get("markov_rank"):
        rank, kind = nested["markov_rank"], nested["markov_head_type"]
        num_drafted = config.get("draft_vocab_size", vocab)
        weights["markov_head.markov_w1.weight"] = torch.randn(vocab, rank, generator=generator)
        weights["markov_head.markov_w2.weight"] = torch.randn(num_drafted, rank, generator=generator) * rank**-0.5
        shapes = {"gated": ("gate_proj", rank, hidden + rank), "rnn": ("joint_proj", 3 * rank, hidden + 2 * rank)}
        if kind in shapes:
            name, rows, columns = shapes[kind]
            weights[f"markov_head.{name}.weight"] = torch.randn(rows, columns, generator=generator) * columns**-0.5
            weights[f"markov_head.{name}.bias"] = torch.randn(rows, generator=generator)
    return weights


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the backbone of a config as z-lab's DFlash."""
    own = {"mask_token_id", "target_layer_ids", "input_embedding_scale"}
    nested = {key: value for key, value in config["dflash_config"].items() if key in own}
    left_out = {"draft_vocab_size", "sample_from_anchor"}
    plain = {key: value for key, value in config.items() if key not in left_out}
    return plain | {"architectures": ["DFlashDraftModel"], "dflash_config": nested}


@dataclass(frozen=True)
class Trained:
    """One drafter on a scene."""

    scene: Scene
    config: dict[str, Any]
    weights: dict[str, Tensor]
    head_VD: Tensor | None = None
    """Its own head, where it has one."""

    @cached_property
    def spec(self) -> DrafterSpec:
        shapes = {name: list(tensor.shape) for name, tensor in self.weights.items()}
        return read_drafter_spec(self.config, shapes, self.scene.target.config, where="draft config")

    @cached_property
    def drafter(self) -> Drafter:
        return Drafter(self.spec, self.weights, self.scene.tables.embedding_VD, device=CPU, dtype=torch.float32)

    @cached_property
    def head(self) -> Head:
        own = self.scene.tables.head_VD if self.head_VD is None else self.head_VD
        return make_head(own, self.drafter, self.weights)

    def features(self, index: int) -> Tensor:
        states = self.scene.states(self.spec.target_layer_ids)
        return tiny.features_of(self.spec, self.scene.transcripts, states, index)

    def rows(
        self, *, anchors: str = "walk", block_size: int | None = None, slicing: Slicing = USUAL
    ) -> list[dict[str, Any]]:
        """Return our rows."""
        return score_transcripts(
            self.drafter,
            self.head,
            self.scene.transcripts,
            self.features,
            self.scene.states(self.spec.target_layer_ids).load_margins(),
            block_size=block_size or self.spec.block_size,
            max_new_tokens=MAX_NEW_TOKENS,
            anchors=anchors,
            slicing=slicing,
        )

    def walks(self, **options: Any) -> Walks:
        """Return tokens emitted per verification step, by our scoring."""
        return walks_of(self.rows(**options), self.scene)


def walks_of(rows: Sequence[Mapping[str, Any]], scene: Scene) -> Walks:
    """Return tokens emitted per verification step of each text."""
    walks: Walks = {transcript.id: [] for transcript in scene.transcripts}
    for row in sorted((row for row in rows if row["is_on_walk"]), key=lambda row: row["walk_step"]):
        walks[row["prompt_id"]].append(row["num_emitted_tokens"])
    return walks


def train(
    scene: Scene,
    config: dict[str, Any],
    *,
    steps: Sequence[int],
    seed: int = 0,
    d2t: Tensor | None = None,
    learning_rate: float = 3e-3,
) -> dict[int, Trained]:
    """Fit a drafter to all texts but the last; return it after some numbers of steps, ascending.

    A selector is left as it is: it then overrules the head now and then, right or wrong.
    """
    weights = {name: tensor.requires_grad_(True) for name, tensor in random_tensors(config, scene.target).items()}
    head_VD = scene.tables.head_VD
    if d2t is not None:
        head_VD = head_VD[torch.arange(len(d2t)) + d2t]
    constant = {} if d2t is None else {"d2t": d2t}
    trained = Trained(scene, config, weights | constant, None if d2t is None else head_VD)
    spec, drafter, head = trained.spec, trained.drafter, trained.head
    optimizer = torch.optim.AdamW(weights.values(), lr=learning_rate, weight_decay=0.0)
    generator = torch.Generator().manual_seed(seed)
    num_drafts, first = spec.num_drafts, walk.first_row(spec.row_alignment)
    taken = {}
    with torch.enable_grad():
        for step in range(max(steps) + 1):
            if step in steps:
                kept = {name: tensor.detach().clone() for name, tensor in weights.items()}
                taken[step] = Trained(scene, config, kept | constant, trained.head_VD)
            index = step % max(1, len(scene.transcripts) - 1)
            response = torch.tensor(scene.transcripts[index].response_ids)
            chosen = torch.randint(0, max(1, len(response) - num_drafts), (32,), generator=generator)
            position = chosen + len(scene.transcripts[index].prompt_ids)
            anchors = Anchors(position, response[chosen], torch.full_like(chosen, spec.block_size))
            context = drafter.read_context(trained.features(index))
            (hidden,) = drafter.draft_hidden([context], [anchors], spec.block_size)
            hidden = hidden[:, first : first + num_drafts]
            padded = torch.cat([response, response[-1:].expand(num_drafts)])
            labels = torch.stack([padded[chosen + place] for place in range(1, num_drafts + 1)], dim=1)
            before = torch.cat([response[chosen][:, None], labels[:, :-1]], dim=1)
            side = head.side(hidden, before) if spec.proposal_rule == "dspark" else None
            rows = Rows(hidden.flatten(0, 1), None if side is None else side.flatten(0, 1))
            logits = head.scores(rows) if spec.proposal_rule == "dspark" else head.logits(rows.hidden_RD)
            own = labels.flatten() if head._own_of_U is None else head._own_of_U[labels.flatten()]
            loss = torch.nn.functional.cross_entropy(logits, own, ignore_index=-1)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
            optimizer.step()
    return taken


class Recomputing:
    """A target that reads the whole text at every call, and of the cache keeps but the length.

    transformers 5.24 takes back a linear layer's convolution when drafts are rejected, but not its recurrent
    state: with the cache, the official loop does not emit a hybrid target's own greedy text. Without, it does.
    """

    def __init__(self, model: Any) -> None:
        from transformers import LlamaConfig

        self._model = model
        self._ids = torch.empty(1, 0, dtype=torch.long)
        self.config = LlamaConfig(num_hidden_layers=1)
        self.device = model.device
        self.lm_head = model.lm_head
        self.get_input_embeddings = model.get_input_embeddings

    def __call__(self, ids: Tensor, *, position_ids: Tensor, past_key_values: Any, **options: Any) -> Any:
        first, count = int(position_ids[0, 0]), ids.shape[1]
        past_key_values.update(*[torch.zeros(1, 1, count, 1)] * 2, 0)
        assert past_key_values.get_seq_length() == first + count
        self._ids = torch.cat([self._ids[:, :first], ids], dim=1)
        output = self._model(self._ids, use_cache=False, output_hidden_states=True)
        output.logits = output.logits[:, -1:] if options.get("logits_to_keep") else output.logits[:, first:]
        output.hidden_states = tuple(states[:, first:] for states in output.hidden_states)
        return output


def official_drafter(trained: Trained) -> Any:
    """Return the official model with the same weights."""
    import dflash.model as official
    from transformers import Qwen3Config

    facts = {key: value for key, value in trained.config.items() if key not in ("architectures", "model_type")}
    is_second = trained.config["architectures"] == ["DFlash2DraftModel"]
    kind = official.DFlash2DraftModel if is_second else official.DFlashDraftModel
    drafter = kind(Qwen3Config(**facts)).eval()
    renamed = {
        f"{name}.weight" if name.endswith("_codebook") else name: tensor for name, tensor in trained.weights.items()
    }
    drafter.load_state_dict(renamed, strict=True)
    return drafter


def official_run(trained: Trained, drafter: Any, transcript: Transcript, *, block_size: int | None = None) -> Any:
    """Let the official loop speculate from a text's prompt on."""
    import dflash.model as official

    return official.dflash_generate(
        drafter,
        Recomputing(trained.scene.model) if trained.scene.is_hybrid else trained.scene.model,
        torch.tensor([transcript.prompt_ids]),
        MAX_NEW_TOKENS,
        trained.scene.stop_token_ids() or None,
        block_size=block_size,
        return_stats=True,
    )


def official_walks(trained: Trained, *, block_size: int | None = None) -> Walks:
    """Return the official acceptance lengths of every text, which must be what the official loop emits."""
    drafter = official_drafter(trained)
    walks = {}
    for transcript in trained.scene.transcripts:
        result = official_run(trained, drafter, transcript, block_size=block_size)
        emitted = result.output_ids[0, len(transcript.prompt_ids) :].tolist()
        assert emitted == list(transcript.response_ids), f"{transcript.id}: not the greedy text"
        walks[transcript.id] = result.acceptance_lengths
    return walks
