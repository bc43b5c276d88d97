"""The report of a configuration: its results, with the drafts that its store can give."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dflash_core.config import Config
from dflash_core.errors import DFlashEvalError, InputError, ResultsError
from dflash_core.results.compare import url_of
from dflash_core.results.report import write_report
from dflash_core.results.report_drafts import DraftSource

if TYPE_CHECKING:
    from dflash_core.drafts import DraftedPrompt, Redrafter

DEFAULT_NAME = "report.html"


def make_report(
    config: Config, out: str | Path | None = None, *, baseline: str | None = None, has_drafts: bool = True
) -> Path:
    """Write the report of a configuration's results and return where it lies.

    Args:
        config: names the results, and the store that the drafts come from.
        out: the HTML file; None is report.html beside the database.
        baseline: a selector of `compare`; None takes the configuration's, where that was evaluated already.
        has_drafts: draft the best and worst prompts again, for a minute at most.

    Raises:
        InputError: the baseline stands for nothing that was evaluated.
        NoResults: there is no database yet.
        ResultsError: the database cannot be read, or the file cannot be written.
    """
    return write_report(
        config.results,
        Path(config.results).with_name(DEFAULT_NAME) if out is None else out,
        baseline=_known_baseline(config) if baseline is None else baseline,
        drafts=_drafts_of(config) if has_drafts else None,
    )


def _known_baseline(config: Config) -> str | None:
    """Return the configured baseline once it has results: before that a report is made all the same."""
    if config.baseline is None:
        return None
    try:
        url_of(config.results, config.baseline)
    except InputError:
        return None
    return config.baseline


def _drafts_of(config: Config) -> DraftSource:
    """Return what drafts a prompt again with a configuration; torch is loaded when the first one is wanted.

    One drafter is held at a time: a report asks for the prompts of one checkpoint after the other.
    """
    loaded: dict[str, Redrafter] = {}

    def draft(checkpoint: str, prompt_id: str) -> DraftedPrompt:
        from dflash_core.drafts import Redrafter

        try:
            if checkpoint not in loaded:
                loaded.clear()
                loaded[checkpoint] = Redrafter(config, checkpoint)
            return loaded[checkpoint].draft(prompt_id)
        except DFlashEvalError:
            raise
        except (OSError, RuntimeError) as error:  # a disk that is gone, a GPU that is full
            raise ResultsError(f"they could not be drafted again: {error}") from error

    return draft
