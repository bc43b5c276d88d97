"""A served target as a source of transcripts: many requests at once, each finished answer kept.

    who serves what? ─ per turn: (check the rendering ─ ask ─ judge ─ journal) x concurrency ─ still the same?

The second look catches a server that was restarted with another model while it was asked.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_core import progress
from dflash_core.config import CompletionSettings
from dflash_core.errors import ConfigError, ServerError, ServerMismatch, one_line
from dflash_core.target.rendering import RenderedPrompt
from dflash_core.target.servers.answers import Finished, some_of, to_transcript
from dflash_core.target.servers.client import Client, Patience
from dflash_core.target.servers.journal import Journal
from dflash_core.target.servers.openai_chat import OpenAIChat
from dflash_core.target.servers.protocol import SAMPLING, Completer, Limits
from dflash_core.target.servers.rendering_check import RenderingCheck
from dflash_core.target.servers.served import Served, base_name, find_served
from dflash_core.target.servers.sglang import SGLang
from dflash_core.target.servers.vllm import VLLM
from dflash_core.target.thinking import thinking_support
from dflash_core.target.transcripts import KIND, Job, Transcript, Written

PATIENCE = Patience()


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSource:
    """A server that runs the target."""

    settings: CompletionSettings

    def __post_init__(self) -> None:
        """Refuse a configuration without an address."""
        if self.settings.base_url is None:
            raise ConfigError(
                "completions.source = 'server' needs completions.base_url, such as http://127.0.0.1:30000"
            )

    @property
    def name(self) -> str:
        """Return `server`."""
        return "server"

    def key_parts(self) -> list[Any]:
        """Return protocol, model and sampling; where the server stands decides nothing."""
        return ["server", self.settings.api, self.settings.server_model, SAMPLING]

    def write(self, job: Job) -> Written:
        """Have the server continue every prompt; answers of an earlier attempt are not asked for again.

        Raises:
            ServerError: the server fails, in one line that says how many transcripts are kept.
            ServerMismatch: it serves another model, or reads the prompts differently.
            ConfigError: the environment variable of the key is not set.
        """
        return _Asking(self.settings, job).write()


class _Asking:
    """One attempt at a job."""

    def __init__(self, settings: CompletionSettings, job: Job) -> None:
        assert settings.base_url is not None
        self._settings = settings
        self._job = job
        self._url = settings.base_url.rstrip("/").removesuffix("/v1")
        self._key = _key(settings.api_key_env)
        self._limits = Limits(max_new_tokens=job.max_new_tokens, stop_token_ids=job.rendering.stop_token_ids)
        self._tokenizer = job.renderer.tokenizer
        template = self._tokenizer.chat_template
        reads_flag = not isinstance(template, str) or thinking_support(template).reads_flag
        self._thinking = job.rendering.thinking if reads_flag else None
        self._finished: dict[str, Finished] = {}
        self._check = RenderingCheck()

    def write(self) -> Written:
        served = self._run(self._find_served())
        completer = self._completer(served.api)
        with Journal(self._job.folder, {"api": served.api, "model": served.model}) as journal:

            def complete(wave: Sequence[RenderedPrompt], num_before: int) -> list[Transcript]:
                self._run(self._ask_all(wave, served, completer, journal))
                return [self._finished[prompt.id].transcript for prompt in wave]

            transcripts = self._job.by_turns(complete)
            self._require_unchanged(served, journal)
        finished = [self._finished[transcript.id] for transcript in transcripts]
        return Written(transcripts=transcripts, facts=self._facts(served, finished))

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run something to its end; say where and what is kept when it fails."""
        try:
            return asyncio.run(work)
        except ServerError as error:
            kept = f"; {len(self._finished)} of {self._job.num_prompts} transcripts are kept" if self._finished else ""
            raise type(error)(f"the server {self._url} {one_line(error)}{kept}") from error

    def _client(self) -> Client:
        return Client(self._url, key=self._key, timeout_s=self._settings.timeout_s, patience=PATIENCE)

    async def _find_served(self) -> Served:
        async with self._client() as client:
            return await find_served(client, self._settings, self._job.target)

    def _require_unchanged(self, served: Served, journal: Journal) -> None:
        now = self._run(self._find_served())
        if now != served:
            journal.discard()
            raise ServerMismatch(
                f"the server {self._url} was {served.model!r} ({served.api}) at first and is {now.model!r} ({now.api}) "
                f"now; none of its answers is kept, for it cannot be told which of them wrote them"
            )

    def _completer(self, api: str) -> Completer:
        if api == "sglang":
            return SGLang()
        if api == "vllm":
            return VLLM()
        return OpenAIChat(self._thinking)

    async def _ask_all(
        self, wave: Sequence[RenderedPrompt], served: Served, completer: Completer, journal: Journal
    ) -> None:
        """Ask for every prompt that the journal lacks, some at a time; the first failure ends all."""
        missing = []
        for prompt in wave:
            found = journal.find(prompt)
            if found is None:
                missing.append(prompt)
            else:
                self._finished[prompt.id] = found
        self._report()
        waiting = iter(missing)
        async with self._client() as client:

            async def work() -> None:
                for prompt in waiting:
                    finished = await self._ask_one(client, prompt, served, completer)
                    journal.add(finished)
                    self._finished[prompt.id] = finished
                    self._report()

            await _together([work() for _ in range(min(self._settings.concurrency, len(missing)))])

    async def _ask_one(self, client: Client, prompt: RenderedPrompt, served: Served, completer: Completer) -> Finished:
        if completer.takes_ids and prompt.from_template:
            await self._check.require_same(
                client, prompt, served.model, thinking=self._thinking, tokenizer=self._tokenizer
            )
        call = completer.call(prompt, served.model, self._limits)
        answer = completer.read((await client.post(call.path, call.body)).data)
        if answer.model is not None and base_name(answer.model) != base_name(served.model):
            raise ServerMismatch(f"answered as {answer.model!r} when {served.model!r} was asked for")
        return to_transcript(answer, prompt, self._tokenizer, self._limits)

    def _report(self) -> None:
        progress.report(KIND, len(self._finished), self._job.num_prompts, unit="transcripts")

    def _facts(self, served: Served, finished: Sequence[Finished]) -> dict[str, Any]:
        return {
            "sampling": "greedy",
            "compute_dtype": None,
            "server": {"api": served.api, "model": served.model, "sampling": dict(SAMPLING)},
            "rendering_check": self._check.kind if served.api != "openai" else "prompt_tokens",
            "num_retokenised": sum(one.is_retokenised for one in finished),
            "num_unsure": sum(not one.is_sure for one in finished),
            "warnings": warnings_of(finished, self._limits.max_new_tokens),
        }


def warnings_of(finished: Sequence[Finished], max_new_tokens: int) -> list[str]:
    """Return, one line each, what may make the transcripts others than the target's own."""
    unsure = [one.transcript.id for one in finished if not one.is_sure]
    unchecked = [one.transcript.id for one in finished if not one.is_prompt_checked]
    short = [
        one.transcript.id
        for one in finished
        if one.transcript.stop_reason == "length" and len(one.transcript.response_ids) < max_new_tokens
    ]
    warnings = []
    if unsure:
        warnings.append(
            f"{len(unsure)} of {len(finished)} answers came as text whose number of tokens is not the one that the "
            f"server counted ({some_of(unsure)}): these transcripts may differ from what the target emitted"
        )
    if unchecked:
        warnings.append(
            f"the server did not say how many tokens it read of {len(unchecked)} prompts "
            f"({some_of(unchecked)}): another template would go unnoticed here"
        )
    if short:
        warnings.append(
            f"the server cut {len(short)} answers off before completions.max_new_tokens = {max_new_tokens} "
            f"({some_of(short)}): its context may be shorter than the target's"
        )
    return warnings


def _key(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise ConfigError(f"completions.api_key_env = {variable!r}: no such environment variable, or it is empty")
    return key


async def _together(work: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run coroutines at once; the first error stops the others and is raised."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
