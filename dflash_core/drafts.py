"""The drafts themselves, token by token, of one drafter on one prompt, from what the store holds."""

from __future__ import annotations

import itertools
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dflash_core import evaluation, stages
from dflash_core.acceptance import walk
from dflash_core.config import Config
from dflash_core.draft_odds import Odds, read_odds
from dflash_core.drafter import scoring
from dflash_core.drafter.device import place_drafter
from dflash_core.drafter.head import Head
from dflash_core.drafter.model import Drafter
from dflash_core.drafter_reading import read_drafter
from dflash_core.drafter_run import load_drafter
from dflash_core.errors import InputError
from dflash_core.store_opening import store_of
from dflash_core.target import transcripts as written
from dflash_core.target.runtime import DTYPES


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftedBlock:
    """One verification step: what was drafted and what the target says."""

    anchor_index: int
    anchor: str
    accepted: tuple[str, ...]
    rejected: tuple[str, ...]
    """Drafts from the first miss on; those beyond the end of the transcript included."""
    bonus: str | None
    """The target's own token after the accepted ones; None where the transcript ends before it."""
    confidences: tuple[float, ...] = ()
    """What DSpark's confidence head says of each draft; empty where the drafter has none. It was trained to say the
    chance that the token is accepted when drafter and target draw at temperature 1, all before it being accepted."""
    odds: Odds | None = None
    """The drafter's own probabilities of its drafts, and of the target's token at the first miss."""

    @property
    def expected_tokens(self) -> float:
        """Return the tokens that the confidences promise: 1, and for each draft the product of those up to it."""
        return 1.0 + sum(itertools.accumulate(self.confidences, operator.mul))


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftedPrompt:
    """All verification steps of one prompt."""

    prompt_id: str
    prompt: str
    response: str
    blocks: tuple[DraftedBlock, ...]


class Redrafter:
    """An evaluated checkpoint, loaded once, that drafts prompts again and keeps the tokens."""

    def __init__(self, config: Config, checkpoint: str) -> None:
        """Load the drafter and find what the target left in the store.

        Args:
            config: what names transcripts and hidden states.
            checkpoint: a checkpoint that was evaluated under this configuration.

        Raises:
            InputError: it was not evaluated yet.
        """
        inspection = evaluation.inspect(checkpoint, config)
        self._plan = stages.plan_target(config)
        store = store_of(config)
        texts = store.find(written.KIND, self._plan.transcripts_key)
        weights = store.find(stages.DRAFTER_KIND, stages.drafter_key(inspection, config))
        states, spec = None, None
        if texts is not None and weights is not None:
            spec = read_drafter(inspection, config, self._plan.target.config)
            states = stages.find_states(config, self._plan, texts.meta["digest"], spec.target_layer_ids)
        if texts is None or weights is None or states is None or spec is None:
            raise InputError(
                f"{checkpoint} was not evaluated with this config yet; run: dflash-eval evaluate {checkpoint}"
            )
        self._states, self._spec = states, spec
        self._transcripts = written.read_transcripts(texts)
        placement = place_drafter(config.device, spec)
        self._drafter, self._head = load_drafter(
            self._plan, weights, spec, device=torch.device(placement.device), dtype=DTYPES[placement.dtype]
        )
        self._tokenizer = written.load_tokenizer(self._plan.target)
        self._rule = scoring.BlockRule(
            block_size=config.drafter.block_size or spec.block_size,
            max_new_tokens=texts.meta["max_new_tokens"],
            row_alignment=spec.row_alignment,
        )

    @torch.inference_mode()
    def draft(self, prompt_id: str | None) -> DraftedPrompt:
        """Draft one prompt again.

        Args:
            prompt_id: which prompt; None takes the first.

        Raises:
            InputError: there is no such prompt.
        """
        chosen = _choose(self._transcripts, prompt_id)
        transcript = self._transcripts[chosen]
        first = sum(before.num_tokens for before in self._transcripts[:chosen])
        rows = slice(first, first + transcript.num_tokens)
        layers = self._spec.target_layer_ids
        features_TF = torch.cat([self._states.load_layer(layer)[rows] for layer in layers], dim=-1)
        blocks = _walk(self._drafter, self._head, transcript, features_TF, self._tokenizer, self._rule)
        (prompt,) = (prompt for prompt in self._plan.prompts if prompt.id == transcript.id)
        return DraftedPrompt(
            prompt_id=prompt.id,
            prompt=prompt.messages[-1][1],
            response=self._tokenizer.decode(transcript.response_ids),
            blocks=tuple(blocks),
        )


def draft_prompt(config: Config, checkpoint: str, prompt_id: str | None) -> DraftedPrompt:
    """Draft one prompt again, as `Redrafter` does."""
    return Redrafter(config, checkpoint).draft(prompt_id)


def _choose(transcripts: list[written.Transcript], prompt_id: str | None) -> int:
    ids = [transcript.id for transcript in transcripts]
    if prompt_id is None:
        return 0
    if prompt_id not in ids:
        raise InputError(f"no prompt {prompt_id!r}; there are: {', '.join(ids)}")
    return ids.index(prompt_id)


def _walk(
    drafter: Drafter,
    head: Head,
    transcript: written.Transcript,
    features_TF: Tensor,
    tokenizer: Any,
    rule: scoring.BlockRule,
) -> list[DraftedBlock]:
    context = drafter.read_context(features_TF)
    response = transcript.response_ids
    blocks = []
    index = 0
    while index < len(response) - 1:
        drafted = rule.num_drafted(index)
        (hidden_1KD,) = drafter.draft_hidden([context], [rule.anchors(transcript, [index])], rule.block_size)
        hidden_PD = rule.drafting_rows(hidden_1KD)[0, :drafted]
        draft = head.propose(hidden_PD, response[index])
        before_1P = torch.tensor([[response[index], *draft][:drafted]], dtype=torch.long, device=drafter.device)
        confidence_1P = head.confidence(hidden_PD[None], before_1P)
        reference = list(response[index + 1 : index + 1 + drafted])
        judged = torch.tensor([draft[: len(reference)]]), torch.tensor([reference])
        num_accepted = int(walk.count_accepted_drafts(*judged)) if drafted else 0
        emitted = walk.num_emitted(index, len(response), num_accepted)
        missed = reference[num_accepted] if num_accepted < len(reference) else None
        texts = [tokenizer.decode([token]) for token in draft]
        blocks.append(
            DraftedBlock(
                anchor_index=index,
                anchor=tokenizer.decode([response[index]]),
                accepted=tuple(texts[:num_accepted]),
                rejected=tuple(texts[num_accepted:]),
                bonus=tokenizer.decode([response[index + emitted]]) if emitted > num_accepted else None,
                confidences=() if confidence_1P is None else tuple(confidence_1P[0].tolist()),
                odds=read_odds(head, hidden_PD, before_1P, draft, missed, num_accepted),
            )
        )
        index += emitted
    return blocks
