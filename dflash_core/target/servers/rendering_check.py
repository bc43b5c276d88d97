"""Does the server read a prompt as we do? Asked of servers that are given token ids, and would not notice.

`/tokenize` of vLLM and of new SGLang takes messages: template and tokenizer are compared. Older SGLang takes
text: the tokenizer is. A server without it is believed.
"""

from __future__ import annotations

from typing import Any

from dflash_core.target.rendering import RenderedPrompt
from dflash_core.target.servers.answers import mismatch, require_same_ids
from dflash_core.target.servers.client import Client
from dflash_core.target.servers.protocol import count, token_ids

PATH = "/tokenize"


class RenderingCheck:
    """Remembers what the server can tell."""

    def __init__(self) -> None:
        self.kind = "template"
        """`template`, `tokenizer` or `none`: what was compared so far."""

    async def require_same(
        self, client: Client, prompt: RenderedPrompt, model: str, *, thinking: bool | None, tokenizer: Any
    ) -> None:
        """Compare the server's tokens of a prompt with ours.

        Args:
            client: asks the server.
            prompt: rendered by our template.
            model: the server's name of it.
            thinking: for the server's template; None where the template does not ask.
            tokenizer: the target's.

        Raises:
            ServerMismatch: they differ; with both numbers.
        """
        if self.kind == "template":
            messages = [{"role": role, "content": content} for role, content in prompt.messages]
            body: dict[str, Any] = {"model": model, "messages": messages, "add_generation_prompt": True}
            if thinking is not None:
                body["chat_template_kwargs"] = {"enable_thinking": thinking}
            if await self._compare(client, body, prompt):
                return
            self.kind = "tokenizer"
        if self.kind == "tokenizer":
            text = tokenizer.decode(list(prompt.prompt_ids))
            if tuple(tokenizer.encode(text, add_special_tokens=False)) != prompt.prompt_ids:
                return
            if not await self._compare(client, {"model": model, "prompt": text, "add_special_tokens": False}, prompt):
                self.kind = "none"

    async def _compare(self, client: Client, body: dict[str, Any], prompt: RenderedPrompt) -> bool:
        """Compare, and tell whether the server could say."""
        reply = await client.post(PATH, body, may_refuse=True, is_quick=True)
        if reply.is_refusal:
            return False
        theirs = token_ids(reply.data.get("tokens")) if isinstance(reply.data, dict) else None
        if theirs is not None:
            require_same_ids(theirs, prompt)
            return True
        number = count(reply.data, "count")
        if number is not None and number != len(prompt.prompt_ids):
            raise mismatch(prompt, f"{number} tokens", f"{len(prompt.prompt_ids)}")
        return number is not None
