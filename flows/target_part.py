"""The target's part in an evaluation: found in the store, made here, or handed to a box that can make it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from prefect import runtime

from dflash_core import stages
from dflash_core.config import Config
from dflash_core.errors import DoesNotFit, PreparationFailed, TargetError
from dflash_core.hosts.report import HostReport
from dflash_core.refreshing import OF_TARGET, Refresh
from dflash_core.store_opening import store_of
from dflash_core.store_remote import RemoteStore
from flows import preparing
from flows.planning import require_target_fits


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetPart:
    """What an evaluation needs of the target, and how it may come by it."""

    config: Config
    config_path: str | None
    plan: stages.TargetPlan
    layers: tuple[int, ...]
    reports: Sequence[HostReport]
    """What this machine has."""


def facts_of(plan: stages.TargetPlan) -> dict[str, str]:
    """Return what must be equal on two boxes for one to find what the other made."""
    return {
        "target_identity": plan.target.identity,
        "transcripts_key": plan.transcripts_key,
        "compute_dtype": plan.compute_dtype,
        "store_dtype": plan.store_dtype,
    }


def ensure_prepared(part: TargetPart, prepare: str | None, refresh: Refresh, say: Callable[[str], None]) -> None:
    """Return when the store holds transcripts and hidden states, or this machine may make them.

    Args:
        part: what is needed.
        prepare: `here`, a deployment, or None to choose (see `choose`).
        refresh: what is to be made again.
        say: is told what is waited for.

    Raises:
        DoesNotFit: the target does not fit this machine, and nobody else is there to run it.
        TargetError: this machine holds too little of the target to run it, and nobody else is there.
        PreparationFailed: it was handed over and did not come.
    """
    if stages.is_prepared(part.config, part.plan, part.layers):
        return
    deployment = choose(part, prepare)
    if deployment is None:
        require_here(part)
        return
    again = tuple(stage for stage in OF_TARGET if stage in refresh.stages)
    run = preparing.hand_over(
        preparing.Preparation(
            config=part.config_path,
            facts=facts_of(part.plan),
            layers=part.layers,
            refresh=again,
            asked_by=str(runtime.flow_run.id),
        ),
        deployment,
        say=say,
    )
    refresh.made_elsewhere(*again)
    store = store_of(part.config)
    if again and isinstance(store, RemoteStore):
        store.look_again()
    if not stages.is_prepared(part.config, part.plan, part.layers):
        raise PreparationFailed(
            f"{run} of {deployment} was completed, and the store {store} still lacks what it should have made; has the "
            "box of its worker another store in its configuration?"
        )


def choose(part: TargetPart, prepare: str | None) -> str | None:
    """Return the deployment that is to prepare the target, or None for this machine.

    Not told, an evaluation hands over where that can help: the store is shared, or this machine cannot run the
    target; and where somebody is there to take it.
    """
    if prepare is not None:
        return None if prepare == preparing.HERE else prepare
    is_shared = isinstance(store_of(part.config), RemoteStore)
    if (is_shared or _why_not_here(part) is not None) and preparing.is_served():
        return preparing.DEPLOYMENT
    return None


def require_here(part: TargetPart) -> None:
    """Refuse a machine that cannot run the target.

    Raises:
        DoesNotFit, TargetError: as for `ensure_prepared`.
    """
    why_not = _why_not_here(part)
    if why_not is not None:
        raise why_not


def _why_not_here(part: TargetPart) -> DoesNotFit | TargetError | None:
    if not part.plan.target.is_whole:
        return TargetError(
            f"{part.config.target.model} is no more of the target than a drafter needs, and the store lacks its "
            f"transcripts or hidden states; start a worker for {preparing.DEPLOYMENT} on a box that holds the target, "
            "or run `dflash-eval prepare` there"
        )
    try:
        has_transcripts = stages.has_transcripts(part.config, part.plan)
        require_target_fits(part.config, part.reports, has_transcripts=has_transcripts)
    except DoesNotFit as error:
        return error
    return None
