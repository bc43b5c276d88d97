"""From a server's answer to a transcript, or to the reason why it is none.

A response ends with the token that stopped it. Servers may leave that token out, and then it is put back:

    output ids [40, 41]    finish reason stop, matched 7    ->  [40, 41, 7]  stop
    output ids [40, 41, 7] finish reason stop               ->  [40, 41, 7]  stop
    output ids [40, 41]    finish reason length             ->  [40, 41]     length
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dflash_core.errors import ServerError, ServerMismatch
from dflash_core.target.rendering import RenderedPrompt
from dflash_core.target.retokenising import retokenise
from dflash_core.target.servers.protocol import Answer, Limits
from dflash_core.target.transcripts import Transcript, cut

_MAX_PLACES_NAMED = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """A transcript, and how sure its ids are."""

    transcript: Transcript
    is_retokenised: bool
    """True where the server gave text."""
    is_sure: bool
    """False where the ids are not certainly those that the target emitted."""
    is_prompt_checked: bool
    """False where the server does not tell what it read."""


def to_transcript(answer: Answer, prompt: RenderedPrompt, tokenizer: Any, limits: Limits) -> Finished:
    """Return the transcript that an answer is.

    Raises:
        ServerMismatch: the server read another prompt, or ends texts where the target does not.
        ServerError: the completion is empty, cut off, or ended for no reason that a continuation has.
    """
    is_prompt_checked = _check_prompt(answer, prompt)
    if answer.finish_reason not in ("stop", "length"):
        raise ServerError(
            f"ended prompt {prompt.id!r} with the finish reason {answer.finish_reason!r}, expected stop or length"
        )
    is_retokenised = answer.token_ids is None
    if answer.token_ids is not None:
        ids, is_sure = _given_ids(answer, answer.token_ids, prompt), True
    else:
        ids, is_sure = _ids_of_text(answer, prompt, tokenizer)
    if not ids and not (answer.finish_reason == "stop" and answer.num_completion_tokens == 1):
        raise ServerError(f"returned an empty completion for prompt {prompt.id!r} ({_counted(answer)})")
    if answer.finish_reason == "stop":
        ids = _with_stop_token(ids, answer, prompt, tokenizer, limits)
    elif is_retokenised and _lost_its_stop_token(len(ids), answer, limits):
        ids, is_sure = _with_stop_token(ids, answer, prompt, tokenizer, limits), False
    transcript = cut(prompt, ids[: limits.max_new_tokens], limits.stop_token_ids)
    return Finished(
        transcript=transcript, is_retokenised=is_retokenised, is_sure=is_sure, is_prompt_checked=is_prompt_checked
    )


def _check_prompt(answer: Answer, prompt: RenderedPrompt) -> bool:
    """Refuse a server that read other tokens than ours; tell whether it said what it read."""
    if answer.prompt_ids is not None:
        require_same_ids(answer.prompt_ids, prompt)
        return True
    if answer.num_prompt_tokens is None:
        return False
    if answer.num_prompt_tokens != len(prompt.prompt_ids):
        raise mismatch(prompt, f"{answer.num_prompt_tokens} tokens", f"{len(prompt.prompt_ids)}")
    return True


def require_same_ids(theirs: tuple[int, ...], prompt: RenderedPrompt) -> None:
    """Refuse a server whose tokens of a prompt are not ours.

    Raises:
        ServerMismatch: with both numbers, or the first place where they differ.
    """
    ours = prompt.prompt_ids
    if theirs == ours:
        return
    if len(theirs) != len(ours):
        raise mismatch(prompt, f"{len(theirs)} tokens", f"{len(ours)}")
    place = next(place for place, pair in enumerate(zip(theirs, ours, strict=True)) if pair[0] != pair[1])
    raise mismatch(prompt, f"token {theirs[place]} at place {place}", f"{ours[place]}")


def mismatch(prompt: RenderedPrompt, theirs: str, ours: str) -> ServerMismatch:
    """Return the error for a prompt that the server reads differently."""
    return ServerMismatch(
        f"reads prompt {prompt.id!r} as {theirs}, the target's tokenizer and template give {ours}; "
        f"serve the model with the tokenizer and chat template of target.model, and check completions.thinking"
    )


def _given_ids(answer: Answer, ids: tuple[int, ...], prompt: RenderedPrompt) -> tuple[int, ...]:
    counted = answer.num_completion_tokens
    # A trimmed stop token is counted and not returned. (No ids at all are for the caller to judge.)
    if ids and counted is not None and len(ids) not in (counted, counted - 1):
        raise ServerError(
            f"returned {len(ids)} token ids for prompt {prompt.id!r} and counted {counted}: the completion is cut off"
        )
    return ids


def _ids_of_text(answer: Answer, prompt: RenderedPrompt, tokenizer: Any) -> tuple[tuple[int, ...], bool]:
    if answer.text is None:
        raise ServerError(
            f"returned an empty completion for prompt {prompt.id!r}: neither token ids nor text "
            f"({_counted(answer)}); where a parser takes thinking or tool calls out of the text, start it without"
        )
    counted = answer.num_completion_tokens
    counts: tuple[int, ...] = ()
    if counted is not None:
        counts = (counted, counted - 1) if answer.finish_reason == "stop" else (counted,)
    found = retokenise(
        tokenizer,
        prompt.prompt_ids,
        answer.text,
        counts=counts,
        has_special_tokens=answer.text_has_special_tokens,
    )
    if found is None:
        raise ServerMismatch(
            f"wrote an answer to prompt {prompt.id!r} that does not come back from the target's tokenizer as it was; "
            f"serve the model with the tokenizer of target.model, or use an API that returns token ids"
        )
    return found.ids, found.is_sure


def _lost_its_stop_token(num_ids: int, answer: Answer, limits: Limits) -> bool:
    """Tell whether the last token at the limit is one that decoding leaves out: the stop token, in all likelihood."""
    return answer.num_completion_tokens == limits.max_new_tokens == num_ids + 1


def _with_stop_token(
    ids: tuple[int, ...], answer: Answer, prompt: RenderedPrompt, tokenizer: Any, limits: Limits
) -> tuple[int, ...]:
    stops = limits.stop_token_ids
    if ids and ids[-1] in stops:
        return ids
    named = answer.matched
    if isinstance(named, str):
        named = tokenizer.convert_tokens_to_ids(named)
    if named is not None and named not in stops:
        raise ServerMismatch(
            f"ended prompt {prompt.id!r} at {answer.matched!r}, which is no stop token of the target "
            f"({', '.join(map(str, stops))}); compare generation_config.json with what the server stops at"
        )
    if named is None:
        own = tokenizer.eos_token_id
        named = own if own in stops else stops[0] if len(stops) == 1 else None
    if named is None:
        raise ServerMismatch(
            f"does not say which of the stop tokens {', '.join(map(str, stops))} ended prompt {prompt.id!r}; "
            f"use an API that returns token ids"
        )
    return (*ids, int(named))


def _counted(answer: Answer) -> str:
    counted = answer.num_completion_tokens
    return "it counted no tokens" if counted is None else f"it counted {counted} tokens"


def some_of(names: list[str]) -> str:
    """Return some names and how many there are more."""
    more = f" and {len(names) - _MAX_PLACES_NAMED} more" if len(names) > _MAX_PLACES_NAMED else ""
    return ", ".join(names[:_MAX_PLACES_NAMED]) + more
