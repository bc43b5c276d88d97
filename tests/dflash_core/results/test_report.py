"""The report as text: what it says, what it may load, and how it comes to lie where it lies."""

import base64
import hashlib
import html
import re
from html.parser import HTMLParser

import pytest

from dflash_core.errors import InputError, NoResults, ResultsError
from dflash_core.results.database import read_evaluation, write_evaluation
from dflash_core.results.report import write_report
from dflash_core.results.report_data import read_report_data
from dflash_core.results.report_payload import to_script_json
from tests.dflash_core.results.builders import make_failed, make_record
from tests.dflash_core.results.report_scene import EVIL, NOW, make_odd, make_scene


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_scene(tmp_path_factory.mktemp("results") / "acceptance.duckdb")


@pytest.fixture(scope="module")
def page(path):
    return write_report(path, path.with_name("report.html"), now=NOW).read_text(encoding="utf-8")


class Outline(HTMLParser):
    """Collects tags with their attributes, and checks that they nest."""

    VOID = frozenset({"meta", "link", "input"})

    def __init__(self):
        super().__init__()
        self.tags, self.open, self.scripts = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)

    def of(self, tag):
        return [attrs for found, attrs in self.tags if found == tag]


@pytest.fixture(scope="module")
def outline(page):
    outline = Outline()
    outline.feed(page)
    assert outline.open == []
    return outline


def text_of(page):
    page = re.sub(r"<(style|script).*?</\1>", "", page, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", page)).split())


def test_the_page_shows_the_stored_numbers(path, page):
    text = text_of(page)
    for name in ("eval-100", "eval-300", "eval-published"):
        numbers = read_evaluation(path, name)["datasets"]["all"]
        assert f"{numbers['tau_pooled']:.3f} {numbers['ci_low']:.3f} to {numbers['ci_high']:.3f}" in text
        share = 100 * numbers["num_near_ties"] / numbers["num_verification_steps"]
        assert f"{share:.1f} % {numbers['tau_without_near_ties']:.3f}" in text
    assert "Best: run-a, step 300" in text
    assert "Latest: run-a, step 400" in text
    assert "Latest against the baseline, published" in text
    assert "chat 8, code 8" in text
    assert "20.5 MB 20.0 MB 100.0 MB 0.5 2.2 2.8" in text
    assert "Made 2026-03-02 08:30 UTC" in text


def test_conditions_stand_beside_the_numbers(page):
    text = text_of(page)
    for words in (
        "Target SmolLM2-135M-Instruct",
        "Block size 8",
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


def test_other_conditions_have_a_section_of_their_own_and_are_told_apart(page, outline):
    assert page.count("(conditions ") == 2
    assert text_of(page).index("d1d1d1d1d1d1") < text_of(page).index("other prompt")
    assert '<td class="text other">4</td>' in page
    assert len(outline.of("h1")) == 1


def test_failures_that_are_news_are_listed_with_their_reason(page):
    text = text_of(page)
    assert f"cut off: {EVIL}" in html.unescape(page)
    assert "Evaluations that failed" in text
    assert "was down" not in text
    assert "was asleep" not in text
    failed, vanished = html.unescape(page).split('id="vanished">', maxsplit=1)
    assert f"gone: {EVIL}" in vanished
    assert f"gone: {EVIL}" not in failed
    assert "was cut off" not in text
    assert "was away" not in text


def test_only_the_two_scripts_that_the_policy_names_can_run(page, outline):
    policy = next(a["content"] for a in outline.of("meta") if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none';")
    assert "unsafe-eval" not in policy
    assert "unsafe-inline" not in policy.split("script-src")[1]
    kinds = [attrs.get("type") for attrs in outline.of("script")]
    assert kinds == ["application/json", "text/plain", None]
    digest = base64.b64encode(hashlib.sha256(outline.scripts[2].encode()).digest()).decode()
    assert f"'sha256-{digest}'" in policy
    assert policy.count("'sha256-") == 2
    assert outline.of("img") == outline.of("iframe") == []
    assert [link["href"] for link in outline.of("link")] == ["data:,"]
    assert all(not attrs.get("src") for _, attrs in outline.tags)
    assert not [name for _, attrs in outline.tags for name in attrs if name.startswith("on")]
    assert all(attrs["href"].startswith("#") for attrs in outline.of("a"))
    outside = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    assert "url(" not in outside
    assert "@import" not in outside


def test_the_page_can_be_used_without_seeing_it(page, outline):
    assert outline.of("html")[0]["lang"] == "en"
    assert "<title>Drafter acceptance report</title>" in page
    assert len(outline.of("table")) == len(outline.of("caption")) >= 7
    assert all(head.get("scope") in ("col", "row") for head in outline.of("th"))
    ids = [attrs["id"] for _, attrs in outline.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    assert all(attrs["aria-labelledby"] in ids for _, attrs in outline.tags if "aria-labelledby" in attrs)
    levels = [int(tag[1]) for tag, _ in outline.tags if re.fullmatch(r"h[1-6]", tag)]
    assert all(after - before <= 1 for before, after in zip(levels, levels[1:], strict=False))
    assert outline.of("main")[0]["id"] == outline.of("a")[0]["href"][1:]


def test_json_in_the_page_cannot_end_its_element():
    value = ["</script>", "<!--", "\u2028\u2029", "&amp;", "\ud800", 'quote " and \\']
    text = to_script_json(value)
    assert not set("<>&\u2028\u2029\ud800") & set(text)
    import json

    assert json.loads(text) == value
    with pytest.raises(ValueError, match="not JSON compliant"):
        to_script_json(float("nan"))


def test_the_baseline_is_what_was_asked_for_and_must_be_there(path, tmp_path):
    by_default = read_report_data(path).sections[0]
    assert by_default.baseline["run"] == "published"
    asked = read_report_data(path, baseline="run-a:100").sections[0]
    assert (asked.baseline["run"], asked.baseline["step"]) == ("run-a", 100)
    assert ("eval-100", ("all", "all")) not in asked.differences
    assert len([key for key in asked.differences if key[1] == ("all", "all")]) == 6
    with pytest.raises(InputError, match="no evaluation matches 'run-z'"):
        write_report(path, tmp_path / "report.html", baseline="run-z")
    assert not (tmp_path / "report.html").exists()


def test_without_a_published_drafter_the_first_step_is_the_baseline(tmp_path):
    for place, step in enumerate((300, 100, 200)):
        write_evaluation(tmp_path / "db", make_record(f"eval-{step}", step=step, seed=place, minutes=place))
    section = read_report_data(tmp_path / "db").sections[0]
    assert section.baseline["step"] == 100
    assert section.latest["step"] == 200


def test_a_published_drafter_is_the_baseline_also_where_it_was_scored_last(tmp_path):
    write_evaluation(tmp_path / "db", make_record("eval-100", step=100))
    write_evaluation(tmp_path / "db", make_record("eval-p", run="published", step=None, seed=1, minutes=9))
    section = read_report_data(tmp_path / "db").sections[0]
    assert section.latest["run"] == section.baseline["run"] == "published"
    assert ("eval-100", ("all", "all")) in section.differences


def test_best_worst_and_lost_prompts_are_those_of_the_database(path):
    section = read_report_data(path).sections[0]
    (latest, best) = section.prompt_lists
    assert (latest.role, latest.step, best.role, best.step) == ("latest", 400, "best", 300)
    taus = {
        prompt_id: tau
        for evaluation_id, prompt_id, tau in section.steps.prompts.with_columns(
            tau=section.steps.prompts["num_emitted_tokens"] / section.steps.prompts["num_verification_steps"]
        )
        .select("evaluation_id", "prompt_id", "tau")
        .iter_rows()
        if evaluation_id == "eval-400"
    }
    ordered = sorted(taus, key=lambda name: (taus[name], name))
    kinds = {kind: [p.prompt_id for p in latest.prompts if p.kind == kind] for kind in ("worst", "lost", "best")}
    assert kinds["worst"] == ordered[:3]
    assert kinds["best"] == ordered[:-4:-1]
    assert all(prompt.tau == taus[prompt.prompt_id] for prompt in latest.prompts)
    assert all(prompt.tau < prompt.tau_baseline for prompt in latest.prompts if prompt.kind == "lost")
    for prompt in latest.prompts:
        assert len(prompt.walk) == prompt.num_steps
        assert prompt.walk[0].anchor_index == 0


def test_what_a_person_would_have_to_quote_is_quoted(tmp_path):
    write_evaluation(tmp_path / "db", make_record(run="my run; rm -rf /"))
    page = write_report(tmp_path / "db", tmp_path / "report.html").read_text(encoding="utf-8")
    assert "dflash-eval show 'my run; rm -rf /:100' prompt-" in html.unescape(page)


@pytest.mark.parametrize("name", ["empty", "failures alone", "vanished alone"])
def test_a_page_without_numbers_needs_no_script(tmp_path, name):
    out = write_report(make_odd(tmp_path)[name], tmp_path / "report.html")
    page = out.read_text(encoding="utf-8")
    assert "<script" not in page
    assert "script-src" not in page
    assert out.stat().st_size < 30_000


def test_warnings_are_given_where_there_is_reason(tmp_path):
    odd = make_odd(tmp_path)
    for name, words in {
        "single prompt": "One prompt only: there is no interval",
        "no steps": "One checkpoint is without a single verification step",
        "without margins": "One checkpoint is with unknown margins",
        "single checkpoint": "Only 9 prompts: take the intervals as a rough guide.",
    }.items():
        page = write_report(odd[name], tmp_path / "report.html").read_text(encoding="utf-8")
        assert words in text_of(page), name
        assert not re.search(r"\bnan\b|\bNone\b", text_of(page)), name


def test_an_older_report_is_replaced_whole_and_a_missing_database_makes_none(path, tmp_path):
    out = tmp_path / "new folder" / "report.html"
    assert write_report(path, out, now=NOW) == out
    first = out.read_bytes()
    write_report(path, out, now=NOW)
    assert out.read_bytes() == first
    assert [found.name for found in out.parent.iterdir()] == ["report.html"]
    with pytest.raises(NoResults):
        write_report(tmp_path / "none.duckdb", tmp_path / "none.html")
    assert not (tmp_path / "none.html").exists()
    with pytest.raises(ResultsError, match="cannot be written"):
        write_report(path, out / "below a file.html")


def test_a_failure_alone_is_shown_with_its_reason(tmp_path):
    write_evaluation(tmp_path / "db", make_failed())
    page = write_report(tmp_path / "db", tmp_path / "report.html").read_text(encoding="utf-8")
    assert "the file is cut off" in page
