r"""Transcripts: every prompt with the target's own greedy continuation, as token ids.

Under greedy verification speculative decoding emits exactly this continuation, so a transcript is all
that scoring a drafter needs from the target's decoding.

    prompt ids                     response ids
    <|im_start|> user ... assistant \n | The answer is 4 . <|im_end|>
                                       ^ the first token of the response is the first anchor

A response ends with a stop token (which belongs to it) or at `max_new_tokens`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from dflash_core import progress
from dflash_core.errors import PromptError, TargetError
from dflash_core.store import Artifact, Store, digest
from dflash_core.target.loading import Target
from dflash_core.target.prompts import Prompt
from dflash_core.target.runtime import load_model

TRANSCRIPTS_VERSION = 1
"""Raised when the same prompts and target would give other transcripts."""
KIND = "transcripts"
FILE_NAME = "transcripts.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class RenderedPrompt:
    """A prompt as the token ids that the target reads."""

    id: str
    prompt_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Transcript:
    """A prompt and the target's own continuation of it."""

    id: str
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    stop_reason: str
    """`stop` (its last token is a stop token) or `length`."""

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and response together."""
        return len(self.prompt_ids) + len(self.response_ids)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendering:
    """All prompts rendered, with what decided how."""

    prompts: tuple[RenderedPrompt, ...]
    template_digest: str
    tokenizer_digest: str
    stop_token_ids: tuple[int, ...]
    thinking: bool


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
    from jinja2 import TemplateError

    tokenizer = load_tokenizer(target)
    if not tokenizer.chat_template:
        raise TargetError(f"the tokenizer in {target.folder} has no chat template; instruction-tuned targets have one")
    rendered = []
    for prompt in prompts:
        messages = [{"role": role, "content": content} for role, content in prompt.messages]
        try:
            ids = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, enable_thinking=thinking, return_dict=False
            )
        except TemplateError as error:
            raise PromptError(f"the target's chat template refuses prompt {prompt.id!r}: {error}") from error
        rendered.append(RenderedPrompt(id=prompt.id, prompt_ids=tuple(int(token) for token in ids)))
    _check_lengths(target, rendered, max_new_tokens)
    return Rendering(
        prompts=tuple(rendered),
        template_digest=digest(tokenizer.chat_template),
        tokenizer_digest=digest(_tokenizer_text(target, tokenizer)),
        stop_token_ids=_stop_token_ids(target, tokenizer),
        thinking=thinking,
    )


def _check_lengths(target: Target, rendered: Sequence[RenderedPrompt], max_new_tokens: int) -> None:
    limit = target.config.max_position_embeddings
    for prompt in rendered:
        if not prompt.prompt_ids:
            raise PromptError(
                f"prompt {prompt.id!r} has no tokens under the target's chat template; check the template"
            )
        needed = len(prompt.prompt_ids) + max_new_tokens
        if limit is not None and needed > limit:
            raise PromptError(
                f"prompt {prompt.id!r} has {len(prompt.prompt_ids)} tokens; with completions.max_new_tokens = "
                f"{max_new_tokens} that is {needed}, more than the {limit} of the target's context; shorten it"
            )


def _tokenizer_text(target: Target, tokenizer: Any) -> str:
    path = target.folder / "tokenizer.json"
    return path.read_text(encoding="utf-8") if path.exists() else json.dumps(tokenizer.get_vocab(), sort_keys=True)


def _stop_token_ids(target: Target, tokenizer: Any) -> tuple[int, ...]:
    """Return the stop tokens of generation_config.json, else those of config.json and the tokenizer."""
    for name in ("generation_config.json", "config.json"):
        path = target.folder / name
        if not path.exists():
            continue
        data = json.loads(path.read_text(encoding="utf-8"))
        found = data.get("eos_token_id")
        if found is None:
            found = (data.get("text_config") or {}).get("eos_token_id")
        if found is not None:
            return tuple(sorted({found} if isinstance(found, int) else set(found)))
    if tokenizer.eos_token_id is None:
        raise TargetError(
            f"{target.folder} names no stop token (eos_token_id); every transcript would run to the limit"
        )
    return (int(tokenizer.eos_token_id),)


def transcripts_key(
    target: Target, rendering: Rendering, *, max_new_tokens: int, batch_size: int, compute_dtype: str
) -> str:
    """Return the key of the transcripts: the ids read, the model, and how it wrote."""
    prompts = [[prompt.id, list(prompt.prompt_ids)] for prompt in rendering.prompts]
    stop = list(rendering.stop_token_ids)
    return digest(
        KIND, TRANSCRIPTS_VERSION, target.identity, prompts, stop, max_new_tokens, batch_size, compute_dtype, "greedy"
    )


def write_transcripts(
    store: Store, target: Target, rendering: Rendering, *, max_new_tokens: int, batch_size: int, compute_dtype: str
) -> Artifact:
    """Return the transcripts from the store, or have the target write them.

    Args:
        store: where they are kept.
        target: the model that continues the prompts, on the CPU.
        rendering: the prompts as token ids.
        max_new_tokens: limit of one response.
        batch_size: prompts continued at once.
        compute_dtype: `float32` or `bfloat16`.

    Returns:
        Artifact of kind `transcripts`; `meta` holds digest, counts and what decided the rendering.
    """
    key = transcripts_key(
        target, rendering, max_new_tokens=max_new_tokens, batch_size=batch_size, compute_dtype=compute_dtype
    )

    def write(folder: Path) -> dict[str, Any]:
        model = load_model(target, compute_dtype)
        transcripts = generate(
            model,
            rendering.prompts,
            stop_token_ids=rendering.stop_token_ids,
            max_new_tokens=max_new_tokens,
            batch_size=batch_size,
        )
        lines = [json.dumps(asdict(transcript)) for transcript in transcripts]
        (folder / FILE_NAME).write_text("\n".join(lines) + "\n", encoding="utf-8")
        return {
            "digest": transcripts_digest(transcripts),
            "num_transcripts": len(transcripts),
            "num_tokens": sum(transcript.num_tokens for transcript in transcripts),
            "target": target.name,
            "target_identity": target.identity,
            "template_digest": rendering.template_digest,
            "tokenizer_digest": rendering.tokenizer_digest,
            "stop_token_ids": list(rendering.stop_token_ids),
            "thinking": rendering.thinking,
            "max_new_tokens": max_new_tokens,
            "sampling": "greedy",
            "compute_dtype": compute_dtype,
        }

    return store.build(KIND, key, write)


def read_transcripts(artifact: Artifact) -> list[Transcript]:
    """Read the transcripts of an artifact, in the order in which hidden states are concatenated."""
    transcripts = []
    for line in artifact.file(FILE_NAME).read_text(encoding="utf-8").splitlines():
        data = json.loads(line)
        transcripts.append(
            Transcript(
                id=data["id"],
                prompt_ids=tuple(data["prompt_ids"]),
                response_ids=tuple(data["response_ids"]),
                stop_reason=data["stop_reason"],
            )
        )
    return transcripts


def transcripts_digest(transcripts: Sequence[Transcript]) -> str:
    """Return the digest of what was written: ids and tokens, in order."""
    return digest([[t.id, list(t.prompt_ids), list(t.response_ids), t.stop_reason] for t in transcripts])


@torch.inference_mode()
def generate(
    model: Any,
    prompts: Sequence[RenderedPrompt],
    *,
    stop_token_ids: Sequence[int],
    max_new_tokens: int,
    batch_size: int,
) -> list[Transcript]:
    """Continue prompts greedily, in batches of similar length, left-padded.

    Args:
        model: a transformers causal language model.
        prompts: what to continue.
        stop_token_ids: tokens that end a response and belong to it.
        max_new_tokens: limit of one response.
        batch_size: prompts in one batch.

    Returns:
        One transcript per prompt, in the order given.
    """
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index].prompt_ids))
    transcripts: dict[int, Transcript] = {}
    total = len(prompts) * max_new_tokens
    for first in range(0, len(order), batch_size):
        batch = order[first : first + batch_size]
        done = first * max_new_tokens
        counter = _StepCounter(done, len(batch), total)
        responses = _generate_batch(
            model, [prompts[index].prompt_ids for index in batch], stop_token_ids, max_new_tokens, counter
        )
        for index, response in zip(batch, responses, strict=True):
            transcripts[index] = _cut(prompts[index], response, stop_token_ids)
        progress.report(KIND, min(total, done + len(batch) * max_new_tokens), total)
    return [transcripts[index] for index in range(len(prompts))]


def _generate_batch(
    model: Any,
    prompts: Sequence[Sequence[int]],
    stop_token_ids: Sequence[int],
    max_new_tokens: int,
    counter: Any,
) -> list[list[int]]:
    from transformers import GenerationConfig

    longest = max(len(ids) for ids in prompts)
    # Any id will do for padding: padded places are masked out.
    pad = stop_token_ids[0] if stop_token_ids else 0
    ids_BT = torch.tensor([[pad] * (longest - len(ids)) + list(ids) for ids in prompts])
    mask_BT = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts])
    settings = GenerationConfig(
        do_sample=False,
        num_beams=1,
        max_new_tokens=max_new_tokens,
        eos_token_id=list(stop_token_ids) or None,
        pad_token_id=pad,
    )
    # The model's own generation_config (penalties, sampling) would make the continuation not greedy.
    model.generation_config = settings
    output_BT = model.generate(
        input_ids=ids_BT, attention_mask=mask_BT, generation_config=settings, stopping_criteria=[counter]
    )
    return output_BT[:, longest:].tolist()


class _StepCounter:
    """A stopping criterion that never stops; it reports the progress of one batch."""

    def __init__(self, done: int, batch_size: int, total: int) -> None:
        self._done = done
        self._batch_size = batch_size
        self._total = total

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self._done += self._batch_size
        progress.report(KIND, self._done, self._total)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def _cut(prompt: RenderedPrompt, response: Sequence[int], stop_token_ids: Sequence[int]) -> Transcript:
    """End a response with its first stop token; the rest is padding of the batch."""
    stops = set(stop_token_ids)
    for place, token in enumerate(response):
        if token in stops:
            return Transcript(
                id=prompt.id,
                prompt_ids=prompt.prompt_ids,
                response_ids=tuple(response[: place + 1]),
                stop_reason="stop",
            )
    return Transcript(id=prompt.id, prompt_ids=prompt.prompt_ids, response_ids=tuple(response), stop_reason="length")
