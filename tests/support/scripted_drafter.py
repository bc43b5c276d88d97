"""A drafter that drafts what a script says, on a device of any size, and its scoring."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from dflash_core.acceptance import walk
from dflash_core.drafter.footprint import USUAL, Slicing
from dflash_core.drafter.head import Head
from dflash_core.drafter.model import Anchors
from dflash_core.drafter.scoring import score_transcripts
from dflash_core.target.transcripts import Transcript

VOCAB = 6
Row = dict[str, Any]


class SmallDevice:
    """A scripted drafter on a device that has room for a few blocks at once."""

    def __init__(self, drafter: ScriptedDrafter, room: int) -> None:
        self._drafter = drafter
        self.room = room
        self.tried: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    def draft_hidden(self, contexts: Sequence[int], anchors: Sequence[Anchors], num_slots: int) -> list[Tensor]:
        self.tried.append(sum(len(one.position_A) for one in anchors))
        if self.tried[-1] > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return self._drafter.draft_hidden(contexts, anchors, num_slots)


class ScriptedDrafter:
    """Stands in for the drafter: at each anchor of each transcript it drafts what a script says.

    The context of a transcript is its number, and a drafted token is a hidden row with a one at its
    place, which a head of ones on the diagonal turns back into the token.
    """

    def __init__(
        self,
        script: Sequence[Sequence[Sequence[int]]],
        prompts: Sequence[int],
        *,
        block_size: int,
        row_alignment: walk.RowAlignment = "same_position",
    ) -> None:
        self.script = script
        self.prompts = prompts
        self.spec = SimpleNamespace(
            block_size=block_size,
            row_alignment=row_alignment,
            output_multiplier=1.0,
            final_logit_softcapping=None,
        )
        self.device = torch.device("cpu")
        self.dtype = torch.float32
        self.slots: dict[int, int] = {}
        """Slots of the last block that was drafted at a position."""
        self.drafted: list[tuple[int, int]] = []
        """Every (transcript, response index) that was drafted from."""

    def read_context(self, features_TF: Tensor) -> int:
        return int(features_TF)

    def draft_hidden(self, contexts: Sequence[int], anchors: Sequence[Anchors], num_slots: int) -> list[Tensor]:
        parts = []
        for number, chosen in zip(contexts, anchors, strict=True):
            hidden = torch.full((len(chosen.position_A), num_slots, VOCAB), -1.0)
            for row, position in enumerate(chosen.position_A.tolist()):
                index = position - self.prompts[number]
                self.drafted.append((number, index))
                self.slots[position] = int(chosen.num_slots_A[row])
                first = walk.first_row(self.spec.row_alignment)
                for slot, token in enumerate(self.script[number][index][: num_slots - first], first):
                    hidden[row, slot, token] = 1.0
            parts.append(hidden)
        return parts


def diagonal_head(drafter: Any) -> Head:
    return Head(torch.eye(VOCAB), drafter)


def transcript(number: int, num_prompt: int, response: Sequence[int]) -> Transcript:
    return Transcript(id=f"p{number}", prompt_ids=(0,) * num_prompt, response_ids=tuple(response), stop_reason="stop")


def score(
    drafter: Any,
    transcripts: Sequence[Transcript],
    margins: Tensor | None = None,
    *,
    anchors: str,
    block_size: int,
    limit: int,
    slicing: Slicing = USUAL,
) -> list[Row]:
    if margins is None:
        margins = torch.full((sum(one.num_tokens for one in transcripts),), math.inf)
    return score_transcripts(
        drafter,
        diagonal_head(drafter),
        transcripts,
        lambda index: torch.tensor(index),
        margins,
        block_size=block_size,
        max_new_tokens=limit,
        anchors=anchors,
        slicing=slicing,
    )
