"""Flow: the target's part of the work, once, before any checkpoint; deployed as `prepare-target`."""

from __future__ import annotations

from typing import Any

from prefect import flow

from dflash_core import evaluation, stages
from dflash_core.config import load_config
from dflash_core.hosts.present import report_from_json
from flows.planning import require_target_fits
from tasks.extract_hidden_states import extract_hidden_states
from tasks.plan_target import plan_target
from tasks.probe_hosts import probe_hosts
from tasks.write_transcripts import write_transcripts


@flow(name="prepare-target", flow_run_name="prepare target", validate_parameters=True)
def prepare_target(config: str | None = None, layers: list[int] | None = None) -> dict[str, Any]:
    """Have the target write its transcripts and take its hidden states, so that scoring needs it no more.

    Args:
        config: the configuration file on the machine that runs this; none takes dflash.yaml or the defaults.
        layers: 0-based decoder layers to keep; none takes those of the configured draft config.
    """
    settings = load_config(config)
    plan = plan_target(settings)
    wanted = list(layers) if layers is not None else list(evaluation.configured_layers(settings, plan))
    if not stages.is_prepared(settings, plan, tuple(wanted)):
        reports = [report_from_json(report) for report in probe_hosts(settings)]
        require_target_fits(settings, reports, has_transcripts=stages.has_transcripts(settings, plan))
    transcripts = write_transcripts(settings, settings.store, plan.transcripts_key)
    name = transcripts["meta"]["digest"]
    key = stages.hidden_states_key(plan, name, tuple(wanted))
    states = extract_hidden_states(settings, settings.store, key, name, wanted)
    return {"target": plan.target.name, "transcripts": transcripts["meta"], "hidden_states": states["meta"]}
