"""The drafts themselves, token by token, of one drafter on one prompt, from what the store holds."""

from __future__ import annotations

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
from dflash_core.errors import InputError
from dflash_core.store_opening import store_of
from dflash_core.target import transcripts as written


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
    """Chance of acceptance that DSpark's confidence head gives each draft; empty where the drafter has none."""
    odds: Odds | None = None
    """The drafter's own probabilities of its drafts, and of the target's token at the first miss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftedPrompt:
    """All verification steps of one prompt."""

    prompt_id: str
    prompt: str
    response: str
    blocks: tuple[DraftedBlock, ...]


@torch.inference_mode()
def draft_prompt(config: Config, checkpoint: str, prompt_id: str | None) -> DraftedPrompt:
    """Draft one prompt again and keep the tokens.

    Args:
        config: what names transcripts and hidden states.
        checkpoint: a checkpoint that was evaluated under this configuration.
        prompt_id: which prompt; None takes the first.

    Raises:
        InputError: there is no such prompt, or the checkpoint was not evaluated yet.
    """
    inspection = evaluation.inspect(checkpoint, config)
    plan = stages.plan_target(config)
    store = store_of(config)
    written_artifact = store.find(written.KIND, plan.transcripts_key)
    weights = store.find(stages.DRAFTER_KIND, stages.drafter_key(inspection, config))
    if written_artifact is None or weights is None:
        raise InputError(f"{checkpoint} was not evaluated with this config yet; run: dflash-eval evaluate {checkpoint}")
    transcripts = written.read_transcripts(written_artifact)
    chosen = _choose(transcripts, prompt_id)
    spec = evaluation.read_spec(inspection, config, plan.target.config)
    states = stages.find_states(config, plan, written_artifact.meta["digest"], spec.target_layer_ids)
    if states is None:
        raise InputError(f"{checkpoint} was not evaluated with this config yet; run: dflash-eval evaluate {checkpoint}")
    placement = place_drafter(config.device, spec)
    drafter, head = stages.load_drafter(plan, weights, spec, device=placement.device, dtype=placement.dtype)
    first = sum(transcript.num_tokens for transcript in transcripts[:chosen])
    end = first + transcripts[chosen].num_tokens
    features_TF = torch.cat([states.load_layer(layer)[first:end] for layer in spec.target_layer_ids], dim=-1)
    tokenizer = written.load_tokenizer(plan.target)
    rule = scoring.BlockRule(
        block_size=config.drafter.block_size or spec.block_size,
        max_new_tokens=written_artifact.meta["max_new_tokens"],
        row_alignment=spec.row_alignment,
    )
    blocks = _walk(drafter, head, transcripts[chosen], features_TF, tokenizer, rule)
    prompt = plan.prompts[[prompt.id for prompt in plan.prompts].index(transcripts[chosen].id)]
    return DraftedPrompt(
        prompt_id=prompt.id,
        prompt=prompt.messages[-1][1],
        response=tokenizer.decode(transcripts[chosen].response_ids),
        blocks=tuple(blocks),
    )


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
        before_1P = torch.tensor([[response[index], *draft][:drafted]], device=drafter.device)
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
