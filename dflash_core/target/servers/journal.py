"""Finished transcripts of a job that is not finished: one line each, so that a killed job goes on from there.

{"api": "vllm", "model": "Qwen3-8B"}                                       who wrote
{"id": "a", "prompt_ids": "<digest>", "response_ids": [...], ...}          one answer
{"id": "b", "prompt_ids": "<dig                                            cut off by the kill: not there
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from dflash_core.store import digest
from dflash_core.target.rendering import RenderedPrompt
from dflash_core.target.servers.answers import Finished
from dflash_core.target.transcripts import Transcript

FILE_NAME = "answers.jsonl"


class Journal:
    """The answers so far; a context manager."""

    def __init__(self, folder: Path, writer: Mapping[str, Any]) -> None:
        """Open a journal, keeping what the same server and model wrote into it.

        Args:
            folder: where it lies.
            writer: names server and model, plain data; another writer's answers are dropped.
        """
        self._path = folder / FILE_NAME
        self._known: dict[str, dict[str, Any]] = {}
        lines = _whole_lines(self._path)
        if lines and lines[0] == dict(writer):
            self._known = {line["id"]: line for line in lines[1:]}
        temporary = self._path.with_suffix(".new")
        kept = [dict(writer), *self._known.values()]
        temporary.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        temporary.replace(self._path)
        self._file = self._path.open("a", encoding="utf-8")

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def __len__(self) -> int:
        return len(self._known)

    def find(self, prompt: RenderedPrompt) -> Finished | None:
        """Return the answer to this very prompt, or None where there is none yet."""
        line = self._known.get(prompt.id)
        if line is None or line["prompt_ids"] != _ids_digest(prompt.prompt_ids):
            return None
        transcript = Transcript(
            id=prompt.id,
            prompt_ids=prompt.prompt_ids,
            response_ids=tuple(line["response_ids"]),
            stop_reason=line["stop_reason"],
        )
        return Finished(
            transcript=transcript,
            is_retokenised=line["is_retokenised"],
            is_sure=line["is_sure"],
            is_prompt_checked=line["is_prompt_checked"],
        )

    def add(self, finished: Finished) -> None:
        """Keep an answer; it is on disk when this returns."""
        transcript = finished.transcript
        line = {
            "id": transcript.id,
            "prompt_ids": _ids_digest(transcript.prompt_ids),
            "response_ids": list(transcript.response_ids),
            "stop_reason": transcript.stop_reason,
            "is_retokenised": finished.is_retokenised,
            "is_sure": finished.is_sure,
            "is_prompt_checked": finished.is_prompt_checked,
        }
        self._known[transcript.id] = line
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        # Folders that nobody touched for days are taken for abandoned.
        os.utime(self._path.parent)

    def discard(self) -> None:
        """Drop every answer: it cannot be told any more which model wrote them."""
        self._known = {}
        self._file.close()
        self._path.unlink(missing_ok=True)


def _ids_digest(prompt_ids: Sequence[int]) -> str:
    return digest(list(prompt_ids))


def _whole_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines that were written whole; the last one may have been cut off."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    lines = []
    for line in text.split("\n")[:-1]:
        try:
            lines.append(json.loads(line))
        except ValueError:
            break
    return [line for line in lines if isinstance(line, dict)]
