"""Flow: one self-contained HTML page from the results database; deployed as `report`."""

from __future__ import annotations

from pathlib import Path

from prefect import flow
from prefect.artifacts import create_link_artifact

from dflash_core.config import load_config
from dflash_core.results.report import write_report


@flow(name="report", flow_run_name="report", validate_parameters=True)
def report(config: str | None = None, out: str | None = None) -> str:
    """Write the report and link it from the flow run's page.

    Args:
        config: the configuration file on the machine that runs this; none takes dflash.yaml or the defaults.
        out: where to write; none writes report.html beside the database.
    """
    settings = load_config(config)
    path = write_report(Path(settings.results), Path(out) if out else Path(settings.results).with_name("report.html"))
    create_link_artifact(link=path.absolute().as_uri(), key="report", description="acceptance of every checkpoint")
    return str(path)
