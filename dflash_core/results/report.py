"""One self-contained HTML page of the results: plots, tables, the drafts themselves, costs and failures.

The plots are plotly.js's, which lies compressed in the page; nothing is loaded from elsewhere. Only two scripts can
run, the library and the page's own: the page's policy names them by digest. All text is escaped, since names of runs
and datasets, messages of errors, prompts and answers come from other people's files and from models.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import os
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
from plotly.offline import get_plotlyjs

from dflash_core.errors import ResultsError
from dflash_core.results import report_format
from dflash_core.results.connection import DEFAULT_WAIT_S, PathLike
from dflash_core.results.report_data import ReportData, Row, Section, read_report_data
from dflash_core.results.report_drafts import DraftLimits, Drafts, DraftSource, draft_again
from dflash_core.results.report_payload import (
    default_chosen,
    has_numbers,
    label,
    section_payload,
    slice_title,
    stage_names,
    to_script_json,
)
from dflash_core.results.report_prompts import PromptList
from dflash_core.results.report_warnings import near_tie_share, section_warnings
from dflash_core.results.selection import CONDITION_NAMES

TEMPLATE = "report.html.j2"
STYLE = "report.css"
SCRIPTS = ("report_drawing.js", "report_plots.js", "report_page.js")
MAX_SERIES = 6
"""So many checkpoints can be told apart in one plot."""
_HERE = Path(__file__).parent


def write_report(
    db_path: PathLike,
    out_path: PathLike,
    *,
    baseline: str | None = None,
    drafts: DraftSource | None = None,
    limits: DraftLimits | None = None,
    now: datetime | None = None,
    wait_s: float = DEFAULT_WAIT_S,
) -> Path:
    """Write the report and return where it lies.

    Args:
        db_path: the results database.
        out_path: the HTML file; its folder is made, an older file is replaced at once.
        baseline: a selector of `compare` for what the others are compared with; None takes a drafter without a
            step, else the first step of the latest run.
        drafts: what drafts the best and worst prompts again; None leaves their drafts out.
        limits: how many drafts, and for how long; None takes the defaults.
        now: the time to print on the page; None is the present.
        wait_s: how long to wait, in seconds, while another process writes the database.

    Raises:
        InputError: the baseline stands for nothing that was evaluated.
        NoResults: there is no database yet.
        ResultsError: the database cannot be read, or the file cannot be written.
    """
    data = read_report_data(db_path, baseline=baseline, wait_s=wait_s)
    lists = [shown for section in data.sections for shown in section.prompt_lists]
    drafted = draft_again(lists, drafts, limits or DraftLimits())
    page = render_report(data, drafted, now=now or datetime.now(UTC))
    out = Path(out_path)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=out.parent, prefix=out.name, suffix=".part")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(page)
            os.chmod(temporary, 0o644)
            os.replace(temporary, out)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise ResultsError(f"the report {str(out)!r} cannot be written: {error}") from error
    return out


def render_report(data: ReportData, drafts: Drafts, *, now: datetime) -> str:
    """Return the page as text."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= report_format.FILTERS
    environment.globals |= {"label": label, "slice_title": slice_title, "near_tie_share": near_tie_share}
    has_plots = any(has_numbers(section) for section in data.sections)
    script = "".join((_HERE / name).read_text(encoding="utf-8") for name in SCRIPTS)
    digests = [_digest(script), _library().digest] if has_plots else []
    return environment.get_template(TEMPLATE).render(
        sections=[_section(section, drafts) for section in data.sections],
        overview=_overview(data.sections),
        failures=data.failures,
        vanished=data.vanished,
        made_at=now.astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        style=(_HERE / STYLE).read_text(encoding="utf-8"),
        script=script if has_plots else None,
        digests=digests,
        library=_library().packed if has_plots else None,
        payload=to_script_json([section_payload(section) for section in data.sections]) if has_plots else None,
        max_series=MAX_SERIES,
    )


class _Library:
    """plotly.js as the page holds it."""

    def __init__(self) -> None:
        source = get_plotlyjs()
        self.digest = _digest(source)
        self.packed = base64.b64encode(gzip.compress(source.encode("utf-8"), mtime=0)).decode("ascii")


@lru_cache(maxsize=1)
def _library() -> _Library:
    return _Library()


def _digest(script: str) -> str:
    """Return what a page's policy calls a script that may run."""
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")


def _section(section: Section, drafts: Drafts) -> dict[str, Any]:
    """Return what the template shows of one set of conditions."""
    chosen = default_chosen(section)
    return {
        "target": section.rows[0]["target"],
        "block_size": section.rows[0]["block_size"],
        "has_numbers": has_numbers(section),
        "conditions": report_format.conditions(section.rows),
        "prompts": _prompt_counts(section),
        "best": section.ranked[0] if section.ranked else None,
        "latest": section.latest,
        "baseline": section.baseline,
        "not_told": [label(row) for row in section.ranked if row["evaluation_id"] in section.not_told],
        "warnings": section_warnings(section),
        "slices": list(section.slices),
        "chosen": chosen,
        "ranked": section.ranked,
        "is_not_told": section.not_told,
        "rows": section.rows,
        "differences": {name: found for (name, part), found in section.differences.items() if part == ("all", "all")},
        "stages": stage_names(section.rows),
        "extras": section.extras,
        "sampled": [
            (label(next(row for row in section.rows if row["evaluation_id"] == entry[0])), *entry[1:])
            for entry in section.extras.get("sampled", [])
        ],
        "prompt_lists": [_prompt_list(shown, drafts) for shown in section.prompt_lists],
    }


def _prompt_list(shown: PromptList, drafts: Drafts) -> dict[str, Any]:
    """Return the prompts with their drafts; a reason that all share is said once."""
    found = [drafts[shown.evaluation_id, prompt.prompt_id] for prompt in shown.prompts]
    reasons = {one.why_not for one in found}
    return {
        "shown": shown,
        "why_not": next(iter(reasons)) if len(reasons) == 1 else None,
        "has_drafts": any(one.why_not is None for one in found),
        "prompts": [
            {"prompt": prompt, "drafts": one, "command": shown.command(prompt.prompt_id)}
            for prompt, one in zip(shown.prompts, found, strict=True)
        ],
    }


def _overview(sections: Sequence[Section]) -> dict[str, Any]:
    """Return the table of all sets of conditions, each beside the newest one."""
    names = list(CONDITION_NAMES)
    first = sections[0].rows[0] if sections else {}
    rows = []
    for section in sections:
        row = section.rows[0]
        cells = [(report_format.condition_text(name, row[name]), row[name] != first[name]) for name in names]
        rows.append({"cells": cells, "num_checkpoints": len(section.rows), "last": _last_start(section.rows)})
    return {"names": [CONDITION_NAMES[name] for name in names], "rows": rows}


def _last_start(rows: Sequence[Row]) -> datetime:
    last: datetime = max(row["started_at"] for row in rows)
    return last


def _prompt_counts(section: Section) -> str:
    """Return each dataset with its number of prompts."""
    counts = [
        f"{name} {max(row['num_prompts'] for row in rows.values())}"
        for (kind, name), rows in section.slices.items()
        if kind == "dataset"
    ]
    return ", ".join(counts)
