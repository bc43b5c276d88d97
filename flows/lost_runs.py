"""An automation on the Prefect server: a run whose heartbeat stopped has crashed.

    python -m flows.lost_runs

A worker that is killed has its run reported as crashed; where worker and run die together, as on a box that
loses its power, nobody tells the server, and the run would be under way for ever. Runs send a heartbeat where
PREFECT_FLOWS_HEARTBEAT_FREQUENCY is set in the worker's environment.
"""

from __future__ import annotations

from datetime import timedelta

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification

from flows.services import HEARTBEAT_S

NAME = "dflash-eval: runs without a heartbeat"
HEARTBEAT = "prefect.flow-run.heartbeat"
SILENCE_S = 3 * HEARTBEAT_S
_ENDS = ("Completed", "Failed", "Cancelled", "Crashed")


def ensure_automation() -> bool:
    """Make the automation where the server lacks it; True where it was made."""
    with get_client(sync_client=True) as client:
        if client.read_automations_by_name(NAME):
            return False
        client.create_automation(_automation())
    return True


def _automation() -> AutomationCore:
    return AutomationCore(
        name=NAME,
        description="made by dflash-eval; a run that says nothing for a while has crashed, and is tried again",
        trigger=EventTrigger(
            after={HEARTBEAT},
            expect={HEARTBEAT, *(f"prefect.flow-run.{end}" for end in _ENDS)},
            match=ResourceSpecification(root={"prefect.resource.id": ["prefect.flow-run.*"]}),
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=timedelta(seconds=SILENCE_S),
        ),
        actions=[
            ChangeFlowRunState(
                name=None, state=StateType.CRASHED, message=f"no heartbeat for {SILENCE_S} s", force=False
            )
        ],
    )


if __name__ == "__main__":
    print("made" if ensure_automation() else "there already")
