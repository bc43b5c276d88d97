"""Golden numbers of a fixed tiny target and two fixed drafters, end to end but for Prefect and the database.

    .venv/bin/python -m tests.golden.tiny_qwen3        writes tests/golden/tiny_qwen3.json

Run it in the commit that raises METRICS_VERSION (or the version of the transcripts or the extraction),
and say in that commit why the numbers changed. `tests/golden/test_golden.py` compares.

The target is random, with tied embeddings, so that its greedy text often repeats a token. One drafter
is random: the ranks that it gives the target's tokens show any change of its forward pass. The other is
made by hand to draft its anchor again and again: where the text repeats it is right for whole blocks.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_core.acceptance.walk import METRICS_VERSION
from dflash_core.config import Config, parse_config
from dflash_core.results.aggregate import aggregate
from dflash_core.target.hidden_states import EXTRACTION_VERSION
from dflash_core.target.loading import Target, read_target_folder
from dflash_core.target.transcripts import TRANSCRIPTS_VERSION
from tests.support import tiny
from tests.support.direct import evaluate_directly

PATH = Path(__file__).with_suffix(".json")
COMMAND = ".venv/bin/python -m tests.golden.tiny_qwen3"
NUM_PROMPTS = 6
MAX_NEW_TOKENS = 40
# Of this seed every margin of the target is above 5e-4, some 100 times what another CPU's rounding could move.
SEED = 20
STOP_TOKEN_ID = 32


def versions() -> dict[str, int]:
    """Return what must be raised when a number changes."""
    return {
        "metrics_version": METRICS_VERSION,
        "extraction_version": EXTRACTION_VERSION,
        "transcripts_version": TRANSCRIPTS_VERSION,
    }


def write_target(folder: Path) -> Target:
    """Save the fixed target. The mask token's embedding is zero, so that a block holds its anchor alone."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(SEED)
    sizes = tiny._COMMON | {"eos_token_id": STOP_TOKEN_ID}
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, head_dim=16, tie_word_embeddings=True))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and "embed" not in name:
                parameter.mul_(5.0)
        model.model.embed_tokens.weight[tiny.MASK_TOKEN_ID] = 0.0
    model.save_pretrained(folder)
    tiny.add_tokenizer(folder)
    return read_target_folder(folder, name="tiny-qwen3")


def repeating(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return weights that carry the anchor's embedding to every slot and nothing else."""
    made = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    for name in made:
        if name.endswith("norm.weight"):
            made[name].fill_(1.0)
    width = made["norm.weight"].shape[0]
    made["layers.0.self_attn.v_proj.weight"].copy_(torch.eye(width))
    made["layers.0.self_attn.o_proj.weight"].copy_(torch.eye(width) * 100.0)
    return made


def make_config(folder: Path) -> Config:
    """Write target, prompts and the two drafters into a folder, and return the configuration."""
    target = write_target(folder / "target")
    tiny.write_prompts(folder / "prompts.jsonl", NUM_PROMPTS)
    draft_config = tiny.draft_config(target, num_key_value_heads=4)
    _, weights = tiny.random_weights(draft_config, target)
    tiny.write_drafter(folder / "runs" / "step_1", draft_config, weights)
    tiny.write_drafter(folder / "runs" / "step_2", draft_config, repeating(weights))
    return parse_config(
        {
            "run": "golden",
            "target": {"model": str(folder / "target"), "compute_dtype": "float32"},
            "completions": {"max_new_tokens": MAX_NEW_TOKENS, "batch_size": 1},
            "prompts": str(folder / "prompts.jsonl"),
            "drafter": {"anchors": "all"},
            "device": "cpu",
            "store": str(folder / "store"),
        },
        where="golden",
    )


def compute(folder: Path) -> dict[str, Any]:
    """Return every golden number as plain data."""
    config = make_config(folder)
    numbers: dict[str, Any] = {}
    for name, step in (("random", 1), ("repeating", 2)):
        evaluated = evaluate_directly(config, folder / "runs" / f"step_{step}")
        record = evaluated.record
        assert record.blocks is not None
        columns = ("anchor_index", "num_accepted_drafts", "num_emitted_tokens", "is_near_tie", "miss_rank")
        table = aggregate(record.blocks, record.prompts, num_drafts=7, has_all_anchors=True)
        numbers[name] = {
            "walks": evaluated.walks(),
            "tau": {
                f"{row['slice']} {row['dataset']}": [row["tau_pooled"], row["tau_prompt_mean"], row["tau_all_anchors"]]
                for row in table.acceptance.iter_rows(named=True)
            },
            "blocks": {
                prompt.prompt_id: [
                    list(row)
                    for row in record.blocks.filter(record.blocks["prompt_id"] == prompt.prompt_id)
                    .select(columns)
                    .iter_rows()
                ]
                for prompt in record.prompts
            },
        }
        numbers["responses"] = {prompt.prompt_id: prompt.response_text for prompt in record.prompts}
    return numbers


def main() -> None:
    """Write the golden file."""
    with tempfile.TemporaryDirectory() as folder:
        numbers = compute(Path(folder))
    document = {"command": COMMAND, "versions": versions(), "numbers": numbers}
    text = json.dumps(document, indent=1)
    PATH.write_text(_joined(text) + "\n", encoding="utf-8")
    print(f"wrote {PATH}")


def _joined(text: str) -> str:
    """Put the numbers of each innermost list on one line."""
    import re

    return re.sub(r"\[[^\[\]]*\]", lambda match: " ".join(match.group().split()), text)


if __name__ == "__main__":
    main()
