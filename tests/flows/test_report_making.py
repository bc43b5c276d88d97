"""The report of a configuration shows the drafts that its store gives, and says why where it gives none."""

from __future__ import annotations

import html
import re
from pathlib import Path

import pytest

from dflash_core.config import Config, parse_config
from dflash_core.drafts import draft_prompt
from dflash_core.errors import CheckpointNotFound, InputError
from dflash_core.results.connection import writing
from dflash_core.results.database import write_evaluation
from dflash_core.results.report import write_report
from dflash_core.results.report_drafts import NO_SOURCE, TOO_LATE, TOO_MANY, DraftLimits
from flows.report_making import make_report
from tests.golden import tiny_qwen3 as golden
from tests.support.direct import evaluate_directly


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Return a configuration under which two checkpoints were evaluated, the drafter that is often right last."""
    folder = tmp_path_factory.mktemp("report")
    data = golden.make_config(folder).model_dump() | {"results": str(folder / "results" / "acceptance.duckdb")}
    config = parse_config(data, where="test")
    for step in (1, 2):
        write_evaluation(config.results, evaluate_directly(config, folder / "runs" / f"step_{step}").record)
    return config


@pytest.fixture(scope="module")
def page(config: Config) -> str:
    return make_report(config).read_text(encoding="utf-8")


def url_of_step(config: Config, step: int) -> str:
    return "file://" + str(Path(config.results).parents[1] / "runs" / f"step_{step}")


def drafts_of(page: str) -> list[str]:
    """Return the text of each line of drafts, as a reader without colours has it."""
    lists = re.findall(r'<ol class="drafts">(.*?)</ol>', page, flags=re.DOTALL)
    lines = [line for found in lists for line in re.findall(r"<li>(.*?)</li>", found, flags=re.DOTALL)]
    without = [re.sub(r"<small>.*?</small>|<i .*?</i>", "", line) for line in lines]
    return [" ".join(html.unescape(re.sub(r"<[^>]+>", " ", line)).split()) for line in without]


def test_the_drafts_are_those_that_show_prints(config: Config, page: str) -> None:
    lines = drafts_of(page)
    assert lines
    some_miss = some_accepted = False
    for prompt_id in re.findall(r"<strong>Among the [a-z]+: ([^<]+)</strong>", page):
        for block in draft_prompt(config, url_of_step(config, 2), prompt_id).blocks[:40]:
            has_miss = bool(block.rejected) and block.bonus is not None
            parts = [repr(block.anchor)]
            for sign, tokens in (
                ("+", block.accepted),
                ("x", block.rejected[:has_miss]),
                ("~", block.rejected[has_miss:]),
                (">", () if block.bonus is None else (block.bonus,)),
            ):
                parts += [sign, *map(repr, tokens)] if tokens else []
            assert " ".join(" ".join(parts).split()) in lines
            some_miss, some_accepted = some_miss or has_miss, some_accepted or bool(block.accepted)
    assert some_miss
    assert some_accepted


def test_each_kind_of_draft_has_a_colour_a_sign_and_a_word(page: str) -> None:
    for style, sign, word in (
        ("accepted", "+", "accepted:"),
        ("rejected", "x", "rejected:"),
        ("unused", "~", "not used:"),
        ("own", "&gt;", "the target's own:"),
    ):
        shown = rf'<span class="{style}"><b aria-hidden="true">{sign}</b><i class="hidden-text"> {word}</i>'
        assert shown.replace("&gt;", ">") in page or shown in page


def test_without_drafts_the_page_says_why_and_how_to_see_them(config: Config, tmp_path: Path) -> None:
    page = make_report(config, tmp_path / "report.html", has_drafts=False).read_text(encoding="utf-8")
    assert drafts_of(page) == []
    assert NO_SOURCE in page
    assert re.search(r"<code>dflash-eval show [^<]+ [^<]+</code>", page)


def test_a_checkpoint_that_is_gone_is_asked_for_once(config: Config, tmp_path: Path) -> None:
    asked = []

    def gone(checkpoint: str, prompt_id: str) -> None:
        asked.append(checkpoint)
        raise CheckpointNotFound(f"nothing at {checkpoint}\n<script>: " + 500 * "long ")

    page = write_report(config.results, tmp_path / "report.html", drafts=gone).read_text(encoding="utf-8")
    assert len(asked) == len(set(asked))
    assert f"No drafts here: nothing at {asked[0]}" in page
    assert "&lt;script&gt;: long" in page
    assert 60 * "long " not in page


def test_drafts_of_another_walk_than_the_stored_one_are_not_shown(config: Config, tmp_path: Path) -> None:
    def other(checkpoint: str, prompt_id: str) -> object:
        return draft_prompt(config, url_of_step(config, 1), prompt_id)

    page = write_report(config.results, tmp_path / "report.html", drafts=other).read_text(encoding="utf-8")
    assert "its walk is not the one that was stored" in page


def test_drafts_are_bounded_in_number_length_and_time(config: Config, tmp_path: Path) -> None:
    def draft(checkpoint: str, prompt_id: str) -> object:
        return draft_prompt(config, checkpoint, prompt_id)

    def page_with(limits: DraftLimits) -> str:
        out = write_report(config.results, tmp_path / "report.html", drafts=draft, limits=limits)
        return out.read_text(encoding="utf-8")

    page = page_with(DraftLimits(num_prompts=1, num_blocks=2))
    assert page.count('<ol class="drafts">') == 1
    assert len(drafts_of(page)) == 2
    assert re.search(r"And \d+ more steps: <code>dflash-eval show", page)
    assert TOO_MANY in page
    page = page_with(DraftLimits(seconds=-1.0))
    assert drafts_of(page) == []
    assert TOO_LATE in page


def test_a_store_that_breaks_in_an_unforeseen_way_leaves_the_rest_of_the_report(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import dflash_core.drafts

    def full(*_: object) -> None:
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(dflash_core.drafts, "Redrafter", full)
    page = make_report(config, tmp_path / "report.html").read_text(encoding="utf-8")
    assert "they could not be drafted again: CUDA out of memory" in page
    assert "Leaderboard" in page


def test_a_configured_baseline_counts_once_it_is_evaluated_and_a_typed_one_must_be(
    config: Config, tmp_path: Path
) -> None:
    def page_with(baseline: str | None, typed: str | None = None) -> str:
        changed = config.model_copy(update={"baseline": baseline})
        out = make_report(changed, tmp_path / "report.html", baseline=typed, has_drafts=False)
        return out.read_text(encoding="utf-8")

    assert "Latest against the baseline, golden, step 1" in page_with("never-evaluated")
    assert "Latest against the baseline, golden, step 2" in page_with("step_2")
    assert "Latest against the baseline, golden, step 2" in page_with("step_1", "step_2")
    with pytest.raises(InputError, match="no evaluation matches 'nothing'"):
        page_with(None, "nothing")


def test_an_empty_database_gives_a_report_that_says_so(config: Config, tmp_path: Path) -> None:
    empty = config.model_copy(update={"results": str(tmp_path / "empty.duckdb")})
    with writing(empty.results):
        pass
    assert "holds no evaluations yet" in make_report(empty).read_text(encoding="utf-8")
    assert (tmp_path / "report.html").is_file()
