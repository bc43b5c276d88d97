"""The report as a page in a real browser, and what it says."""

import dataclasses
import html
import json
import os
import re
import shutil
import struct
import subprocess
from datetime import UTC, datetime
from html.parser import HTMLParser

import pytest

from dflash_core.errors import NoResults, ResultsError
from dflash_core.results.connection import writing
from dflash_core.results.database import read_evaluation, write_evaluation
from dflash_core.results.report import write_report
from tests.dflash_core.results.builders import make_failed, make_prompts, make_record

NOW = datetime(2026, 3, 2, 8, 30, tzinfo=UTC)
EVIL = '<script>document.title="owned"</script>"\'&<b>'
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
BROWSER_OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions"),
    *("--enable-logging=stderr", "--v=0"),
)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("results") / "acceptance.duckdb"
    for place, quality in enumerate((0.2, 0.5, 0.8, 0.7)):
        step = 100 * (place + 1)
        write_evaluation(path, make_record(f"eval-{step}", step=step, quality=quality, seed=place, minutes=place))
    write_evaluation(path, make_record("eval-evil", run=EVIL, step=100, quality=0.4, seed=9))
    write_evaluation(path, make_record("eval-published", run="published", step=None, quality=0.6, seed=8))
    write_evaluation(path, make_record("eval-other", transcripts_digest="other prompts", seed=5, minutes=-9))
    write_evaluation(path, make_failed("eval-failed", step=500, error=f"cut off: {EVIL}", minutes=9))
    write_evaluation(path, make_failed("eval-gone", step=600, status="vanished", error=f"gone: {EVIL}", minutes=9))
    # Failed, then vanished: the last word counts. Vanished, then scored at that address: no news.
    write_evaluation(path, make_failed("eval-lost-before", step=600, error="was cut off", minutes=8))
    write_evaluation(path, make_failed("eval-back", step=100, status="vanished", error="was away", minutes=-1))
    # No news any more: a failure at the address of what was scored later, and one before a newer failure.
    write_evaluation(path, make_failed("eval-mended", error="was down", minutes=-1))
    write_evaluation(path, make_failed("eval-failed-before", step=500, error="was asleep", minutes=8))
    return path


@pytest.fixture(scope="module")
def page(path):
    out = write_report(path, path.with_name("report.html"), now=NOW)
    return out.read_text(encoding="utf-8")


class Outline(HTMLParser):
    """Collects tags with their attributes, and checks that they nest."""

    VOID = frozenset({"meta", "link"})

    def __init__(self):
        super().__init__()
        self.tags, self.open = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def of(self, tag):
        return [attrs for found, attrs in self.tags if found == tag]


@pytest.fixture(scope="module")
def outline(page):
    outline = Outline()
    outline.feed(page)
    assert outline.open == []
    return outline


def text_of(page):
    page = re.sub(r"<style>.*?</style>", "", page, flags=re.DOTALL)
    return html.unescape(re.sub(r"<[^>]+>", " ", page))


def test_the_page_shows_the_stored_numbers(path, page):
    text = " ".join(text_of(page).split())
    for name in ("eval-100", "eval-300", "eval-published"):
        numbers = read_evaluation(path, name)["datasets"]["all"]
        assert f"{numbers['tau_pooled']:.3f} {numbers['ci_low']:.3f} to {numbers['ci_high']:.3f}" in text
    assert "Best: run-a, step 300" in text
    assert "Latest: run-a, step 400" in text
    assert "chat 3, code 3, math 3" in text
    assert "20.5 MB 100.0 MB" in text
    assert "Made 2026-03-02 08:30 UTC" in text


def test_near_ties_carry_the_tau_without_them(path, page):
    for name in ("eval-100", "eval-published"):
        numbers = read_evaluation(path, name)["datasets"]["all"]
        without = f"{numbers['tau_without_near_ties']:.3f}"
        assert f'<abbr title="tau without these steps: {without}">{numbers["num_near_ties"]}</abbr>' in page


def test_conditions_stand_beside_the_numbers(page):
    text = " ".join(text_of(page).split())
    for words in (
        "Target SmolLM2-135M-Instruct",
        "Block size 4",
        "Drafter dtype float32",
        "Target dtype float32",
        "Device cpu",
        "Thinking off",
        "Chat template c0ffeec0ffee",
        "Verification rule greedy",
        "Counting rule bonus counted, cut at the stop token",
        "Metrics version 1",
    ):
        assert words in text


def test_other_conditions_have_a_section_of_their_own(page, outline):
    assert page.count("(conditions ") == 2
    assert page.index("d1d1d1d1d1d1") < page.index("other prompt")
    assert len(outline.of("h1")) == 1


def test_failures_that_are_news_are_listed_with_their_reason(page):
    text = text_of(page)
    assert f"cut off: {EVIL}" in html.unescape(page)
    assert "Evaluations that failed" in text
    assert "was down" not in text
    assert "was asleep" not in text


def test_what_vanished_is_told_apart_from_failures(page):
    failed, vanished = html.unescape(page).split("Checkpoints that vanished", maxsplit=1)
    assert f"cut off: {EVIL}" in failed
    assert f"gone: {EVIL}" in vanished
    assert f"gone: {EVIL}" not in failed
    assert "was cut off" not in text_of(page)
    assert "was away" not in text_of(page)


def test_vanished_checkpoints_alone_give_a_page_that_says_so(tmp_path):
    write_evaluation(tmp_path / "db", make_failed(status="vanished", error="rotated away"))
    page = write_report(tmp_path / "db", tmp_path / "report.html").read_text(encoding="utf-8")
    assert "No evaluation is done yet" in page
    assert "rotated away" in page
    assert "Evaluations that failed" not in page


def test_nothing_from_outside_is_loaded_or_executed(page, outline):
    assert "<script" not in page
    assert outline.of("script") == outline.of("img") == outline.of("iframe") == []
    assert [link["href"] for link in outline.of("link")] == ["data:,"]
    assert all(not attrs.get("src") for _, attrs in outline.tags)
    assert not [name for _, attrs in outline.tags for name in attrs if name.startswith("on")]
    assert [attrs["href"] for attrs in outline.of("a")] == ["#how"]
    policy = next(a["content"] for a in outline.of("meta") if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'")
    assert "url(" not in page
    assert "@import" not in page


def test_the_page_can_be_used_without_seeing_it(page, outline):
    assert outline.of("html")[0]["lang"] == "en"
    assert "<title>Drafter acceptance report</title>" in page
    tables, charts = outline.of("table"), outline.of("svg")
    assert len(tables) == len(outline.of("caption")) >= 5
    assert len(charts) >= 7
    assert all(chart["role"] == "img" and len(chart["aria-label"]) > 30 for chart in charts)
    assert all(head.get("scope") in ("col", "row") for head in outline.of("th"))
    ids = [attrs["id"] for _, attrs in outline.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    assert all(attrs["aria-labelledby"] in ids for _, attrs in outline.tags if "aria-labelledby" in attrs)


def test_tau_and_the_interval_are_explained(page):
    text = text_of(page)
    assert "plus one of its own" in text
    assert "95 % of the results when whole prompts are drawn again" in " ".join(text.split())


def test_an_empty_database_gives_a_page_that_says_so(tmp_path):
    with writing(tmp_path / "empty.duckdb"):
        pass
    page = write_report(tmp_path / "empty.duckdb", tmp_path / "report.html").read_text(encoding="utf-8")
    assert "holds no evaluations yet" in page
    assert "<svg" not in page


def test_failures_alone_give_a_page_that_says_so(tmp_path):
    write_evaluation(tmp_path / "db", make_failed())
    page = write_report(tmp_path / "db", tmp_path / "report.html").read_text(encoding="utf-8")
    assert "No evaluation is done yet" in page
    assert "the file is cut off" in page


def test_an_evaluation_without_a_single_step_is_shown_as_not_measured(tmp_path):
    one_token = tuple(dataclasses.replace(prompt, num_response_tokens=1) for prompt in make_prompts(2))
    write_evaluation(tmp_path / "db", make_record(prompts=one_token))
    page = write_report(tmp_path / "db", tmp_path / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"\bnan\b|\b0\.000\b|None", text_of(page), flags=re.IGNORECASE)
    assert "–" in page


def test_an_older_report_is_replaced_whole_and_a_missing_database_makes_none(path, tmp_path):
    out = tmp_path / "new folder" / "report.html"
    assert write_report(path, out, now=NOW) == out
    first = out.read_text(encoding="utf-8")
    write_report(path, out, now=NOW)
    assert out.read_text(encoding="utf-8") == first
    assert [found.name for found in out.parent.iterdir()] == ["report.html"]
    with pytest.raises(NoResults):
        write_report(tmp_path / "none.duckdb", tmp_path / "none.html")
    assert not (tmp_path / "none.html").exists()
    with pytest.raises(ResultsError, match="cannot be written"):
        write_report(path, out / "below a file.html")


def browse(tmp_path, *options, page):
    if CHROMIUM is None:
        message = "no chromium to look at the report with: apt-get install chromium"
        assert os.environ.get("CI") != "true", message
        pytest.skip(message)
    done = subprocess.run(
        [CHROMIUM, *BROWSER_OPTIONS, f"--user-data-dir={tmp_path / 'profile'}", *options, page.resolve().as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    return done


# Reports on the page from inside it: the widest overhang, unreadable text, and what is on show.
MEASURE = """<script>
addEventListener("load", () => {
  const wide = document.documentElement.scrollWidth - innerWidth;
  const marks = [...document.querySelectorAll("svg text")].map(t => t.getBoundingClientRect().height);
  const off = [...document.querySelectorAll("svg.chart")].filter(s => s.getBoundingClientRect().right > innerWidth);
  const charts = document.querySelectorAll("svg").length;
  const found = {wide, smallest: Math.min(...marks), off: off.length, width: innerWidth, charts};
  parent.document.body.dataset.measured = JSON.stringify(found);
});
</script></body>"""


@pytest.mark.parametrize("width", [1280, 390])
def test_a_real_browser_shows_the_page_without_a_complaint(path, page, tmp_path, width):
    out = write_report(path, tmp_path / "report.html", now=NOW)
    done = browse(tmp_path, f"--window-size={width},1200", "--dump-dom", page=out)
    assert "CONSOLE" not in done.stderr
    assert "<title>Drafter acceptance report</title>" in done.stdout
    assert "owned" not in re.search(r"<title>.*?</title>", done.stdout)[0]
    best = read_evaluation(path, "eval-300")["datasets"]["all"]["tau_pooled"]
    assert f'<div class="big">{best:.3f}</div>' in done.stdout
    assert done.stdout.count("<svg") == page.count("<svg")

    # The page's own policy would stop a measuring script, so the measured copy is without it. It lies in a frame,
    # since a headless window is never narrower than 500 pixels.
    measured = re.sub(r"<meta http-equiv=[^>]*>", "", page).replace("</body>", MEASURE)
    frame = (
        f'<body><iframe width="{width}" height="1200" frameborder="0" srcdoc="{html.escape(measured)}"></iframe></body>'
    )
    (tmp_path / "framed.html").write_text(f"<body>{frame}</body>", encoding="utf-8")
    done = browse(tmp_path, "--window-size=1400,1300", "--dump-dom", page=tmp_path / "framed.html")
    assert "CONSOLE" not in done.stderr
    found = json.loads(html.unescape(re.search(r'data-measured="([^"]*)"', done.stdout)[1]))
    assert found["width"] == width
    assert found["wide"] <= 0
    assert found["off"] == 0
    assert found["smallest"] >= 10
    assert found["charts"] == page.count("<svg")


def test_the_policy_of_the_page_stops_a_script_that_got_in(path, page, tmp_path):
    (tmp_path / "tampered.html").write_text(page.replace("</body>", "<script>document.title='owned'</script></body>"))
    done = browse(tmp_path, "--dump-dom", page=tmp_path / "tampered.html")
    assert "owned" not in re.search(r"<title>.*?</title>", done.stdout)[0]
    assert "Content Security Policy" in done.stderr


def test_a_screenshot_is_neither_blank_nor_the_same_in_dark(path, tmp_path):
    out = write_report(path, tmp_path / "report.html", now=NOW)
    sizes = {}
    for name, options in {"light": (), "dark": ("--blink-settings=preferredColorScheme=0",)}.items():
        picture = tmp_path / f"{name}.png"
        browse(tmp_path, "--window-size=1280,1200", f"--screenshot={picture}", *options, page=out)
        data = picture.read_bytes()
        assert struct.unpack(">II", data[16:24]) == (1280, 1200)
        sizes[name] = data
    assert len(sizes["light"]) > 50_000
    assert sizes["light"] != sizes["dark"]
