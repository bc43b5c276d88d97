"""The chain of stages without Prefect: what the flow composes, called one after the other."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_core import evaluation, stages
from dflash_core.config import Config
from dflash_core.drafter_reading import read_drafter
from dflash_core.results.records import EvaluationRecord


@dataclass(frozen=True)
class Evaluated:
    """One evaluation: its record, and what each stage said."""

    record: EvaluationRecord
    spec: dict[str, Any]
    manifests: dict[str, stages.Manifest]

    @property
    def built(self) -> list[str]:
        """Return the stages whose product was made and not found."""
        return [name for name, manifest in self.manifests.items() if manifest["was_built"]]

    def walks(self) -> dict[str, list[int]]:
        """Return the tokens emitted per verification step of each prompt."""
        assert self.record.blocks is not None
        on_walk = self.record.blocks.filter(self.record.blocks["is_on_walk"]).sort("prompt_id", "walk_step")
        walks: dict[str, list[int]] = {prompt.prompt_id: [] for prompt in self.record.prompts}
        for prompt_id, emitted in on_walk.select("prompt_id", "num_emitted_tokens").iter_rows():
            walks[prompt_id].append(emitted)
        return walks


def evaluate_directly(config: Config, checkpoint: Path | str) -> Evaluated:
    """Score one checkpoint; everything but the results database."""
    inspection = evaluation.inspect(str(checkpoint), config)
    evaluation.require_ready(inspection)
    plan = stages.plan_target(config)
    drafter = read_drafter(inspection, config, plan.target.config)
    key = stages.drafter_key(inspection, config)
    streamed = stages.stream_drafter(str(checkpoint), config, inspection.ref.identity, key)
    transcripts = stages.write_transcripts(config)
    states = stages.extract_hidden_states(config, drafter.target_layer_ids)
    sha256 = streamed["meta"]["weights_sha256"]
    spec = evaluation.evaluation_spec(config, plan, transcripts["meta"], drafter, sha256)
    blocks = stages.run_drafter(config, spec, streamed["key"], drafter)
    record = evaluation.done_record(
        config,
        evaluation.checkpoint_record(inspection, sha256),
        spec,
        blocks,
        started_at=evaluation.now(),
        seconds={},
        cached={},
        bytes_read=0,
    )
    manifests = {"drafter": streamed, "transcripts": transcripts, "hidden_states": states, "blocks": blocks}
    return Evaluated(record, spec, manifests)
