"""`/v1/chat/completions`, which everybody speaks: messages in, text out.

The server's own template and tokenizer read the messages, and only the number of tokens it counted tells
whether they are ours. Fields beyond the standard are refused by some servers, so none is sent, save the
thinking flag where the template looks at it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dflash_core.errors import PromptError, ServerError
from dflash_core.target.rendering import RenderedPrompt
from dflash_core.target.servers.protocol import SAMPLING, Answer, Call, Limits, count, only_choice, text_of, token_ids

_TAKEN_OUT = ("reasoning_content", "reasoning", "tool_calls")
"""Fields that a server's parsers move text into; where it stood among the tokens cannot be told any more."""


@dataclass(frozen=True, slots=True)
class OpenAIChat:
    """The chat protocol."""

    thinking: bool | None
    """What to tell the server's template; None where the template does not ask."""
    api: str = "openai"
    takes_ids: bool = False

    def call(self, prompt: RenderedPrompt, model: str, limits: Limits) -> Call:
        """Return the request for one prompt.

        Raises:
            PromptError: the prompt is given as token ids.
        """
        if not prompt.from_template:
            raise PromptError(
                f"prompt {prompt.id!r} is given as `prompt_ids`, and a chat endpoint takes messages only; "
                f"remove them, or use a server that takes token ids (SGLang, vLLM)"
            )
        body: dict[str, Any] = SAMPLING | {
            "model": model,
            "messages": [{"role": role, "content": content} for role, content in prompt.messages],
            "max_tokens": limits.max_new_tokens,
            "frequency_penalty": 0.0,
        }
        if self.thinking is not None:
            body["chat_template_kwargs"] = {"enable_thinking": self.thinking}
        return Call(path="/v1/chat/completions", body=body)

    def read(self, data: Any) -> Answer:
        """Read the message; special tokens were left out of its text.

        Raises:
            ServerError: there is none, or it lacks a part of what the target emitted.
        """
        choice = only_choice(data)
        message = choice.get("message")
        content = message.get("content") if isinstance(message, dict) else None
        for field in _TAKEN_OUT:
            if isinstance(message, dict) and message.get(field):
                raise ServerError(
                    f"took a part of the completion out of its text, into `{field}`; start it without a parser of "
                    f"thinking and tool calls, or use an API that returns token ids"
                )
        matched = choice.get("matched_stop", choice.get("stop_reason"))
        return Answer(
            token_ids=token_ids(choice.get("token_ids")),
            text=text_of(content),
            text_has_special_tokens=False,
            finish_reason=text_of(choice.get("finish_reason")),
            matched=matched if isinstance(matched, int | str) else None,
            num_completion_tokens=count(data, "usage", "completion_tokens"),
            num_prompt_tokens=count(data, "usage", "prompt_tokens"),
            prompt_ids=token_ids(data.get("prompt_token_ids")),
            model=text_of(data.get("model")),
        )
