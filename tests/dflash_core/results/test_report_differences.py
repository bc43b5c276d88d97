"""Differences of the report over prompts that not all checkpoints have, in a real browser."""

from dflash_core.results.database import write_evaluation
from dflash_core.results.report import write_report
from tests.dflash_core.results.builders import make_prompts, make_record
from tests.dflash_core.results.report_reading import SET, numbers
from tests.dflash_core.results.report_scene import NOW
from tests.support.browser import Browser


def test_the_numbers_of_a_difference_say_on_how_many_prompts_it_is(tmp_path):
    prompts = make_prompts(12)
    write_evaluation(tmp_path / "db", make_record("eval-p", run="published", step=None, prompts=prompts[:9]))
    write_evaluation(tmp_path / "db", make_record("eval-100", seed=1, prompts=prompts, minutes=1))
    report = write_report(tmp_path / "db", tmp_path / "report.html", now=NOW)
    with Browser(tmp_path) as browser, browser.open(report) as page:
        page.wait_for("document.documentElement.dataset.drawn === 'yes'")
        assert [row[3] for row in numbers(page, "curve")] == ["prompts", "9", "12"]
        page.choose(f"{SET} [data-control=values]", "difference")
        assert [row[3] for row in numbers(page, "curve")] == ["prompts", "9", "9"]
