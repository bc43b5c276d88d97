"""Shows `ExtraMetrics` the blocks that it counts, transcript group by transcript group.

    recall, temperatures    blocks of the main walk, drafted once more: their hidden rows are not kept while walking
    trees                   blocks of each budget's own walk, where the budgets part from one another
    sweep                   each shorter block's own walk, or a prefix of the longer draft

Shapes: T tokens of one transcript, A anchors, P draft positions, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from dflash_core.acceptance import walk
from dflash_core.acceptance.own_walk import add_steps
from dflash_core.acceptance.sweep import choose_method, shorter_walk
from dflash_core.drafter.extra_metrics import ExtraMetrics, ObservedBlocks
from dflash_core.drafter.model import Anchors, Drafter, LayerContext
from dflash_core.drafter.slices import Slices, halved


class Rule(Protocol):
    """How blocks are laid out: `scoring.BlockRule`."""

    @property
    def block_size(self) -> int:
        """Return K."""

    @property
    def max_new_tokens(self) -> int:
        """Return the limit."""

    @property
    def row_alignment(self) -> walk.RowAlignment:
        """Return which position a row predicts."""

    @property
    def num_drafts(self) -> int:
        """Return P."""

    def num_drafted(self, index: int) -> int:
        """Return the drafts at a response index."""

    def drafting_rows(self, hidden_AKD: Tensor) -> Tensor:
        """Return hidden_APD."""


class ScoredTranscript(Protocol):
    """A transcript with its context at hand and its main walk done: `scoring`'s own bookkeeping."""

    context: list[LayerContext]
    num_response: int
    rows: dict[int, dict[str, int]]
    """Response index to what was counted there."""

    @property
    def prompt_id(self) -> str:
        """Return the prompt's id."""

    def walk_anchors(self) -> list[int]:
        """Return the response indices of the main walk."""

    def anchors(self, indices: Sequence[int]) -> Anchors:
        """Return anchors at response indices."""

    def references(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return reference_AP and available_A."""


class Group(NamedTuple):
    """Scored transcripts whose contexts are resident, and how they were scored."""

    tracks: Sequence[ScoredTranscript]
    rule: Rule
    has_all_anchors: bool
    finals: Sequence[Tensor | None]
    """Per transcript final_TD, the target's state after its final norm; None where no temperature is wanted."""
    score_again: Callable[[int], Mapping[str, Sequence[dict[str, Any]]]]
    """Block size to prompt id to the rows of that block's own walk."""
    slices: Slices
    """Blocks whose hidden rows are held at once."""


def observe_group(drafter: Drafter, extras: ExtraMetrics, group: Group) -> None:
    """Count everything that is wanted for a group of transcripts."""
    if extras.settings.recall_ks or extras.settings.temperatures:
        walks = [(place, index) for place, track in enumerate(group.tracks) for index in track.walk_anchors()]
        for place, indices, blocks in _drafted(drafter, group, walks):
            name = group.tracks[place].prompt_id
            _observe(lambda _, some, name=name: extras.observe(name, some), indices, blocks)  # type: ignore[misc]
    if extras.settings.tree_budgets:
        _follow_trees(drafter, extras, group)
    for block_size in extras.settings.sweep_block_sizes:
        _sweep(drafter, extras, group, block_size)


def _follow_trees(drafter: Drafter, extras: ExtraMetrics, group: Group) -> None:
    while wanted := [
        (place, index)
        for place, track in enumerate(group.tracks)
        for index in extras.tree_anchors(track.prompt_id, track.num_response)
    ]:
        for place, indices, blocks in _drafted(drafter, group, wanted):
            _observe(partial(extras.observe_trees, group.tracks[place].prompt_id), indices, blocks)
    for track in group.tracks:
        extras.finish_trees(track.prompt_id, track.num_response)


def _sweep(drafter: Drafter, extras: ExtraMetrics, group: Group, block_size: int) -> None:
    method = choose_method(drafter.spec.is_causal, has_all_anchors=group.has_all_anchors)
    again = {} if method == "prefix" else group.score_again(block_size)
    for track in group.tracks:
        if method == "prefix":
            counts = shorter_walk(
                lambda index, rows=track.rows: rows[index]["num_accepted_drafts"],  # type: ignore[misc]
                track.num_response,
                block_size=block_size,
                max_new_tokens=group.rule.max_new_tokens,
                row_alignment=group.rule.row_alignment,
            )
        else:
            rows = again[track.prompt_id]
            counts = add_steps((row["num_accepted_drafts"], row["num_emitted_tokens"]) for row in rows)
        extras.note_sweep(track.prompt_id, block_size, method, counts)


def _drafted(
    drafter: Drafter, group: Group, wanted: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, list[int], ObservedBlocks]]:
    """Draft at anchors, some at once, and yield place of the transcript, response indices and blocks.

    Args:
        drafter: the drafter.
        group: transcripts and rule.
        wanted: pairs of a transcript's place in the group and a response index, those of one transcript together.
    """
    left = list(wanted)
    while left:
        part = left[: group.slices.num_anchors]
        chosen = [(place, [index for _, index in pairs]) for place, pairs in groupby(part, key=itemgetter(0))]
        tracks = [group.tracks[place] for place, _ in chosen]
        anchors = [track.anchors(indices) for track, (_, indices) in zip(tracks, chosen, strict=True)]
        try:
            hidden = drafter.draft_hidden([track.context for track in tracks], anchors, group.rule.block_size)
        except torch.OutOfMemoryError as error:
            group.slices.halve(len(part), error)
            continue
        left = left[len(part) :]
        for (place, indices), one, hidden_AKD in zip(chosen, anchors, hidden, strict=True):
            yield place, indices, _blocks(drafter, group, place, indices, one, hidden_AKD)


def _observe(
    count: Callable[[Sequence[int], ObservedBlocks], None], indices: Sequence[int], blocks: ObservedBlocks
) -> None:
    """Have blocks counted, fewer at once where the device has no room for what counting takes.

    Args:
        count: counts blocks at response indices; it counts all of them or, where it fails, none.
        indices: response indices of the anchors.
        blocks: their blocks.

    Raises:
        DoesNotFit: there is no room for one.
    """
    try:
        count(indices, blocks)
    except torch.OutOfMemoryError as error:
        at_once = halved(len(indices), "block", error)
        for first in range(0, len(indices), at_once):
            part = slice(first, first + at_once)
            _observe(count, indices[part], ObservedBlocks._make(None if one is None else one[part] for one in blocks))


def _blocks(
    drafter: Drafter, group: Group, place: int, indices: Sequence[int], anchors: Anchors, hidden_AKD: Tensor
) -> ObservedBlocks:
    reference_AP, available_A = group.tracks[place].references(indices)
    drafted_A = torch.tensor([group.rule.num_drafted(index) for index in indices])
    final_TD = group.finals[place]
    final_APD = None
    if final_TD is not None:
        # What comes at anchor + p is chosen by the state before it; beyond the text any state will do.
        place_AP = anchors.position_A[:, None] + torch.arange(group.rule.num_drafts)
        final_APD = final_TD[place_AP.clamp(max=final_TD.shape[0] - 1)].to(drafter.device)
    return ObservedBlocks(
        hidden_APD=group.rule.drafting_rows(hidden_AKD),
        anchor_A=anchors.token_A.to(drafter.device),
        reference_AP=reference_AP.to(drafter.device),
        available_A=available_A.to(drafter.device),
        drafted_A=drafted_A.to(drafter.device),
        final_APD=final_APD,
    )
