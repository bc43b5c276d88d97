"""What the trainer reads: transcripts, the target's hidden states over them, and its embedding.

Shapes: T tokens of a transcript, F features of a token (selected layers side by side), V
vocabulary, D hidden size, B transcripts of a batch, A anchors a transcript, K block slots, P draft
positions (K - 1).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dflash_core.errors import InputError
from examples.stand_in_run.model import DraftConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Transcript:
    """A prompt with the target's own continuation, and what the target computed over both."""

    tokens_T: Tensor
    num_prompt_tokens: int
    features_TF: Tensor

    @property
    def num_anchors(self) -> int:
        """Response tokens that have a token after them: each may stand in slot 0."""
        return len(self.tokens_T) - self.num_prompt_tokens - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingData:
    """Everything the drafter learns from."""

    transcripts: Sequence[Transcript]
    embedding_VD: Tensor
    """The target's frozen embedding, which is its head as well."""
    known_tokens_U: Tensor
    """Ids of the tokens that occur in the responses, each once, ascending."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Blocks at random anchors of a few transcripts."""

    features_BTF: Tensor
    block_ids_BAK: Tensor
    anchor_positions_BA: Tensor
    reference_ids_BAP: Tensor
    exists_BAP: Tensor
    """False where the transcript ends before this draft position; the reference is 0 there."""


def read_training_data(
    transcripts_file: Path, hidden_folder: Path, embedding_file: Path, *, group: str, config: DraftConfig
) -> TrainingData:
    """Read the transcripts of one group and the rows of hidden states that belong to them.

    Args:
        transcripts_file: JSON lines with id, group, prompt_ids, response_ids.
        hidden_folder: holds `layer_0001.safetensors` and so on, named by the target's 0-based
            decoder layer; one tensor `hidden`, all transcripts of the file one after the other.
        embedding_file: one tensor `weight` [V, D].
        group: transcripts of other groups are passed over.
        config: says which layers are read, and how wide they must be.

    Raises:
        InputError: a file is missing, unreadable, or does not fit the others.
    """
    rows = _read_lines(transcripts_file)
    lengths = [len(row["prompt_ids"]) + len(row["response_ids"]) for row in rows]
    files = [hidden_folder / f"layer_{layer:04d}.safetensors" for layer in config.target_layer_ids]
    features_NF = torch.cat(
        [_read_tensor(file, "hidden", shape=(sum(lengths), config.hidden_size)) for file in files], dim=1
    )
    embedding_VD = _read_tensor(embedding_file, "weight", shape=(config.vocab_size, config.hidden_size))
    transcripts = [
        Transcript(
            tokens_T=torch.tensor(row["prompt_ids"] + row["response_ids"]),
            num_prompt_tokens=len(row["prompt_ids"]),
            features_TF=features_TF.clone(),
        )
        for row, features_TF in zip(rows, features_NF.split(lengths), strict=True)
        if row["group"] == group
    ]
    transcripts = [transcript for transcript in transcripts if transcript.num_anchors > 0]
    if not transcripts:
        groups = sorted({str(row["group"]) for row in rows})
        raise InputError(
            f"no transcript of group {group!r} with two response tokens in {transcripts_file}; its groups are {groups}"
        )
    responses = torch.cat([transcript.tokens_T[transcript.num_prompt_tokens :] for transcript in transcripts])
    if int(responses.max()) >= config.vocab_size:
        raise InputError(
            f"{transcripts_file} holds token id {int(responses.max())}, but the draft config's vocabulary "
            f"has {config.vocab_size} tokens; they belong to different targets"
        )
    return TrainingData(transcripts=transcripts, embedding_VD=embedding_VD, known_tokens_U=responses.unique())


def draw_batch(
    transcripts: Sequence[Transcript],
    *,
    num_transcripts: int,
    num_anchors: int,
    config: DraftConfig,
) -> Batch:
    """Draw transcripts (long ones more often, none twice), and anchors from their responses.

    A transcript with fewer anchors than asked for repeats some of them. Draws from torch's global
    generator, whose state a checkpoint carries.
    """
    odds = torch.tensor([float(transcript.num_anchors) for transcript in transcripts])
    count = min(num_transcripts, len(transcripts))
    chosen = [transcripts[index] for index in torch.multinomial(odds, count).tolist()]
    anchors_BA = torch.stack([_draw_anchors(transcript, num_anchors) for transcript in chosen])
    tokens_BT = pad_sequence([transcript.tokens_T for transcript in chosen], batch_first=True)
    ends_B11 = torch.tensor([len(transcript.tokens_T) for transcript in chosen])[:, None, None]
    positions_BAP = anchors_BA[:, :, None] + torch.arange(1, config.block_size)
    exists_BAP = positions_BAP < ends_B11
    positions_BAP = positions_BAP.where(exists_BAP, 0)
    block_ids_BAK = torch.full((*anchors_BA.shape, config.block_size), config.mask_token_id)
    block_ids_BAK[:, :, 0] = tokens_BT.gather(1, anchors_BA)
    references_BAP = tokens_BT.gather(1, positions_BAP.flatten(1)).view_as(positions_BAP)
    return Batch(
        features_BTF=pad_sequence([transcript.features_TF for transcript in chosen], batch_first=True),
        block_ids_BAK=block_ids_BAK,
        anchor_positions_BA=anchors_BA,
        reference_ids_BAP=references_BAP.where(exists_BAP, 0),
        exists_BAP=exists_BAP,
    )


def _draw_anchors(transcript: Transcript, count: int) -> Tensor:
    order = torch.randperm(transcript.num_anchors)
    return transcript.num_prompt_tokens + order.repeat(-(-count // len(order)))[:count]


def _read_lines(file: Path) -> list[dict[str, Any]]:
    try:
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read the transcripts {str(file)!r}: {error}; check --transcripts") from error
    for number, row in enumerate(rows, start=1):
        lacking = [name for name in ("group", "prompt_ids", "response_ids") if name not in row]
        if lacking:
            raise InputError(f"transcript {number} of {file} lacks {', '.join(lacking)}; check --transcripts")
    return rows


def _read_tensor(file: Path, name: str, *, shape: tuple[int, int]) -> Tensor:
    """Read one tensor as float32, or say how its shape differs from what is needed."""
    try:
        with safe_open(file, framework="pt") as tensors:
            tensor = tensors.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise InputError(f"cannot read tensor {name!r} of {str(file)!r}: {error}") from error
    if tuple(tensor.shape) != shape:
        raise InputError(
            f"tensor {name!r} of {str(file)!r} has shape {list(tensor.shape)}, expected {list(shape)} from the "
            "transcripts and the draft config; they belong to different targets"
        )
    return tensor.float()
