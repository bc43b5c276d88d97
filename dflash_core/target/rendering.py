"""Prompts as the token ids that the target reads, under its own tokenizer and chat template.

A later turn of a conversation cannot be rendered before the target has answered the turn before:

    turn 1   user: 1+1            -> ids known at once
    turn 2   user: 1+1 | assistant: <the target's answer> | user: and twice that?

The answer enters as text, without its special tokens, and the template decides what of it stays: many
templates drop the thinking of earlier answers, or put an empty thinking block in its place.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dflash_core.errors import PromptError, TargetError
from dflash_core.store import digest
from dflash_core.target.loading import Target
from dflash_core.target.prompts import Prompt
from dflash_core.target.stop_tokens import read_stop_tokens

Messages = tuple[tuple[str, str], ...]
"""(role, content) pairs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RenderedPrompt:
    """A prompt as the token ids that the target reads."""

    id: str
    prompt_ids: tuple[int, ...]
    messages: Messages = ()
    """The whole conversation up to here, as a chat endpoint takes it."""
    from_template: bool = True
    """False where the file gave the ids: the messages may then render to others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendering:
    """All prompts rendered, with what decided how."""

    prompts: tuple[RenderedPrompt, ...]
    """Those that can be rendered before anything is answered."""
    template_digest: str
    tokenizer_digest: str
    stop_token_ids: tuple[int, ...]
    thinking: bool
    later: tuple[Prompt, ...] = ()
    """Later turns, in file order: rendered when the turn they follow is answered."""


def load_tokenizer(target: Target) -> Any:
    """Load the target's tokenizer; no code of the model folder runs.

    Raises:
        TargetError: the folder has no tokenizer that transformers reads.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(target.folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise TargetError(f"{target.folder} has no readable tokenizer: {' '.join(str(error).split())[:200]}") from error
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        # Where the files are missing, transformers makes up an empty tokenizer for some kinds of model.
        raise TargetError(f"{target.folder} has no readable tokenizer: it knows no words; copy its tokenizer files too")
    return tokenizer


class Renderer:
    """The target's tokenizer and chat template, applied to one conversation after the other."""

    def __init__(self, target: Target, *, thinking: bool, max_new_tokens: int) -> None:
        self.tokenizer = load_tokenizer(target)
        if not self.tokenizer.chat_template:
            raise TargetError(
                f"the tokenizer in {target.folder} has no chat template; instruction-tuned targets have one"
            )
        self.thinking = thinking
        self._max_new_tokens = max_new_tokens
        self._context = target.config.max_position_embeddings
        self._vocab_size = target.config.vocab_size

    def render(self, prompt: Prompt, before: Messages = ()) -> RenderedPrompt:
        """Return a prompt with its token ids.

        Args:
            prompt: what to render.
            before: the conversation that it goes on with, the last answer included.

        Raises:
            PromptError: the template refuses it, or it and its continuation do not fit the target's context.
        """
        messages = (*before, *prompt.messages)
        ids = self._template_ids(prompt.id, messages) if prompt.prompt_ids is None else prompt.prompt_ids
        if prompt.prompt_ids is not None and max(ids) >= self._vocab_size:
            raise PromptError(
                f"{prompt.where}: `prompt_ids` holds {max(ids)}, the target's vocabulary ends at {self._vocab_size - 1}"
            )
        self._check_length(prompt.id, len(ids), self._max_new_tokens)
        return RenderedPrompt(
            id=prompt.id, prompt_ids=tuple(ids), messages=messages, from_template=prompt.prompt_ids is None
        )

    def render_after(self, turn: Prompt, before: RenderedPrompt, response_ids: Sequence[int]) -> RenderedPrompt:
        """Return a later turn, now that the turn before it is answered.

        Args:
            turn: what comes next.
            before: the turn that was answered.
            response_ids: the answer, its stop token included.
        """
        answer = self.tokenizer.decode(list(response_ids), skip_special_tokens=True)
        return self.render(turn, (*before.messages, ("assistant", answer)))

    def check_conversation(self, turn: Prompt, before: Messages, num_answers: int) -> Messages:
        """Refuse a later turn that would not fit after answers of the longest kind; return its messages.

        Raises:
            PromptError: the template refuses the conversation, or it may not fit the target's context.
        """
        messages = (*before, ("assistant", ""), *turn.messages)
        if turn.prompt_ids is None:
            num_known = len(self._template_ids(turn.id, messages))
            self._check_length(turn.id, num_known, (num_answers + 1) * self._max_new_tokens)
        return messages

    def _template_ids(self, name: str, messages: Messages) -> tuple[int, ...]:
        from jinja2 import TemplateError

        texts = [{"role": role, "content": content} for role, content in messages]
        try:
            ids = self.tokenizer.apply_chat_template(
                texts, add_generation_prompt=True, enable_thinking=self.thinking, return_dict=False
            )
        except TemplateError as error:
            raise PromptError(f"the target's chat template refuses prompt {name!r}: {error}") from error
        return tuple(int(token) for token in ids)

    def _check_length(self, name: str, num_tokens: int, num_more: int) -> None:
        if not num_tokens:
            raise PromptError(f"prompt {name!r} has no tokens under the target's chat template; check the template")
        needed = num_tokens + num_more
        if self._context is not None and needed > self._context:
            answers = num_more // self._max_new_tokens - 1
            room = f" and {answers} answers before it" if answers else ""
            raise PromptError(
                f"prompt {name!r} has {num_tokens} tokens{room}; with completions.max_new_tokens = "
                f"{self._max_new_tokens} that is {needed}, more than the {self._context} of the target's context; "
                f"shorten it"
            )


def render_prompts(target: Target, prompts: Sequence[Prompt], *, thinking: bool, max_new_tokens: int) -> Rendering:
    """Apply the target's chat template to every prompt.

    Args:
        target: the model whose template and tokenizer are used.
        prompts: what to render.
        thinking: handed to the template as `enable_thinking`.
        max_new_tokens: room that the continuation needs in the target's context.

    Raises:
        TargetError: the tokenizer has no chat template.
        PromptError: the template refuses a prompt, or it and its continuation do not fit the target's context.
    """
    renderer = Renderer(target, thinking=thinking, max_new_tokens=max_new_tokens)
    rendered, later = [], []
    # Per turn: the conversation without its answers, and how many are missing.
    asked: dict[str, tuple[Messages, int]] = {}
    for prompt in prompts:
        if prompt.follows is None:
            rendered.append(renderer.render(prompt))
            asked[prompt.id] = (prompt.messages, 0)
            continue
        before, num_answers = asked[prompt.follows]
        asked[prompt.id] = (renderer.check_conversation(prompt, before, num_answers + 1), num_answers + 1)
        later.append(prompt)
    return Rendering(
        prompts=tuple(rendered),
        template_digest=digest(renderer.tokenizer.chat_template),
        tokenizer_digest=digest(_tokenizer_text(target, renderer.tokenizer)),
        stop_token_ids=stop_token_ids_of(target, renderer.tokenizer),
        thinking=thinking,
        later=tuple(later),
    )


def _tokenizer_text(target: Target, tokenizer: Any) -> str:
    path = target.folder / "tokenizer.json"
    return path.read_text(encoding="utf-8") if path.exists() else json.dumps(tokenizer.get_vocab(), sort_keys=True)


def stop_token_ids_of(target: Target, tokenizer: Any) -> tuple[int, ...]:
    """Return the stop tokens that the target's files name, else the tokenizer's.

    Raises:
        TargetError: none of them names one.
    """
    found = read_stop_tokens(target.folder)
    if found is not None:
        return found.token_ids
    if tokenizer.eos_token_id is None:
        raise TargetError(
            f"{target.folder} names no stop token (eos_token_id); every transcript would run to the limit"
        )
    return (int(tokenizer.eos_token_id),)
