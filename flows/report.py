"""Flow: one self-contained HTML page from the results database; deployed as `report`."""

from __future__ import annotations

from prefect import flow
from prefect.artifacts import create_link_artifact

from dflash_core.config import load_config
from flows.report_making import make_report


@flow(name="report", flow_run_name="report", validate_parameters=True)
def report(
    config: str | None = None, out: str | None = None, baseline: str | None = None, has_drafts: bool = True
) -> str:
    """Write the report and link it from the flow run's page.

    Args:
        config: the configuration file on the machine that runs this; none takes dflash.yaml or the defaults.
        out: where to write; none writes report.html beside the database.
        baseline: what checkpoints are compared with, as `compare --baseline` takes it; none takes the config's.
        has_drafts: show the drafts of the best and worst prompts, drafted again from the store.
    """
    path = make_report(load_config(config), out, baseline=baseline, has_drafts=has_drafts)
    create_link_artifact(link=path.absolute().as_uri(), key="report", description="acceptance of every checkpoint")
    return str(path)
