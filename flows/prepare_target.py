"""Flow: the target's part of the work, once, before any checkpoint; deployed as `prepare-target`."""

from __future__ import annotations

from typing import Any, Literal

from prefect import flow

from dflash_core import evaluation, stages
from dflash_core.config import Config, load_config
from dflash_core.errors import ConfigError
from dflash_core.hosts.present import report_from_json
from dflash_core.refreshing import refreshing
from dflash_core.store_opening import store_of
from dflash_core.store_remote import RemoteStore
from dflash_core.target.loading import STORED
from flows.preparing import differing
from flows.run_names import preparation_name
from flows.target_part import TargetPart, facts_of, require_here
from tasks.extract_hidden_states import extract_hidden_states
from tasks.keep_target_tables import keep_target_tables
from tasks.plan_target import plan_target
from tasks.probe_hosts import probe_hosts
from tasks.write_transcripts import write_transcripts

Stage = Literal["transcripts", "hidden_states", "all"]
"""What of a preparation can be made again."""


@flow(name="prepare-target", flow_run_name=preparation_name, validate_parameters=True)
def prepare_target(
    config: str | None = None,
    layers: list[int] | None = None,
    refresh: list[Stage] | None = None,
    expected: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Have the target write its transcripts and take its hidden states, so that scoring needs it no more.

    Args:
        config: the configuration file on the machine that runs this; none takes dflash.yaml or the defaults.
        layers: 0-based decoder layers to keep; none takes those of the configured draft config.
        refresh: make these again, and what is made from them.
        expected: set by an evaluation that waits for this run: what its keys are made of. A machine that would make
            something else refuses at once.
    """
    settings = load_config(config)
    with refreshing(refresh or ()) as again:
        plan = plan_target(settings)
        _require_agreement(expected or {}, facts_of(plan), config)
        wanted = list(layers) if layers is not None else list(evaluation.configured_layers(settings, plan))
        if not stages.is_prepared(settings, plan, tuple(wanted)):
            reports = [report_from_json(report) for report in probe_hosts(settings)]
            require_here(
                TargetPart(
                    config=settings,
                    config_path=config,
                    plan=plan,
                    layers=tuple(wanted),
                    reports=reports,
                )
            )
        transcripts = write_transcripts(settings, settings.store, plan.transcripts_key)
        name = transcripts["meta"]["digest"]
        key = stages.hidden_states_key(plan, name, tuple(wanted))
        states = extract_hidden_states(settings, settings.store, key, name, wanted)
        kept_as = _keep_tables(settings, plan)
    return {
        "target": plan.target.name,
        "target_identity": plan.target.identity,
        "kept_as": kept_as,
        "transcripts": transcripts["meta"],
        "hidden_states": states["meta"],
        "warnings": again.take_differing(),
    }


def _require_agreement(expected: dict[str, str], facts: dict[str, str], config: str | None) -> None:
    texts = differing(expected, facts)
    if texts:
        raise ConfigError(
            f"this box would prepare something else than the evaluation asks for: {'; '.join(texts)}; on both boxes "
            f"{config or 'the configuration'} must name the same target, prompts and completions, and where their CPUs "
            "differ target.compute_dtype must not be left to `auto`"
        )


def _keep_tables(config: Config, plan: stages.TargetPlan) -> str | None:
    """Keep in a shared store what boxes without the target need of it; return what they write as `target.model`."""
    if not plan.target.is_whole:
        return config.target.model
    if isinstance(store_of(config), RemoteStore):
        return f"{STORED}{keep_target_tables(config)['key']}"
    return None
