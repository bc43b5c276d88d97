"""The report in a real browser: plots against the database, controls, keys, accessibility, and what must not happen."""

import importlib.resources
import json
import re
import struct

import pytest

from dflash_core.results.report import write_report
from tests.dflash_core.results.report_reading import (
    SET,
    TEXT_OUTSIDE,
    TEXT_OVERLAPS,
    ask,
    assert_is_curve,
    numbers,
    plot,
    taus,
)
from tests.dflash_core.results.report_scene import EVIL, EVIL_DATASET, NOW, make_many, make_odd, make_scene
from tests.support.browser import Browser

WINDOWS = {
    "light": {"width": 1280},
    "dark": {"width": 1280, "dark": True},
    "phone": {"width": 390, "height": 844},
    "dark phone": {"width": 390, "height": 844, "dark": True},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("report")


@pytest.fixture(scope="module")
def path(folder):
    return make_scene(folder / "acceptance.duckdb")


@pytest.fixture(scope="module")
def report(path, folder):
    return write_report(path, folder / "report.html", now=NOW)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture(scope="module")
def untouched(browser, report):
    """Return the page as it opens, for tests that only look."""
    with browser.open(report) as page:
        page.wait_for("document.documentElement.dataset.drawn === 'yes'")
        yield page


@pytest.fixture
def page(browser, report):
    with browser.open(report) as page:
        page.wait_for("document.documentElement.dataset.drawn === 'yes'")
        yield page


def test_learning_curves_hold_the_taus_and_intervals_of_the_database(untouched, path):
    assert_is_curve(plot(untouched, "curve")[0], taus(path))
    parts = [("dataset", name) for name in sorted((EVIL_DATASET, "chat", "code"))]
    parts += [("group", "held out"), ("group", "trained on")]
    drawn = plot(untouched, "parts")
    assert len(drawn) == len(parts)
    for traces, (kind, name) in zip(drawn, parts, strict=True):
        assert_is_curve(traces, taus(path, kind, name))
    rows = numbers(untouched, "curve")
    for run, points in taus(path).items():
        for step, tau, low, high in points:
            label = run if step is None else f"{run}, step {step}"
            row = next(row for row in rows if row[0] == label)
            assert row[1:3] == [f"{tau:.3f}", f"{low:.3f} to {high:.3f}"]


def test_the_difference_to_the_baseline_is_that_of_compare(page, path):
    from dflash_core.results.compare import compare

    page.choose(f"{SET} [data-control=values]", "difference")
    comparison = compare(path, ["run-a:100", "run-a:400", "eval-evil"], baseline="published")
    traces = plot(page, "curve")[0]
    assert traces["published"]["y"] == [0, 0]
    for row in comparison.rows[1:]:
        trace = traces[row.run[:60]]
        place = trace["x"].index(row.step)
        found = row.difference
        assert trace["y"][place] == pytest.approx(found.difference, abs=1e-12)
        assert trace["low"][place] == pytest.approx(found.ci_low, abs=1e-9)
        assert trace["high"][place] == pytest.approx(found.ci_high, abs=1e-9)


def test_the_heat_map_is_dataset_by_checkpoint(untouched, path):
    (trace,) = plot(untouched, "heat")[0].values()
    rows = [("group", "trained on"), ("group", "held out")]
    rows += [("dataset", name) for name in sorted((EVIL_DATASET, "chat", "code"), reverse=True)] + [("all", "all")]
    order = ask(path, "SELECT evaluation_id FROM leaderboard WHERE block_size = 8 ORDER BY run, step NULLS FIRST")
    expected = [
        [
            ask(
                path,
                "SELECT tau_pooled FROM acceptance WHERE evaluation_id = ? AND slice = ? AND dataset = ?",
                *one,
                kind,
                name,
            )[0][0]
            for one in order
        ]
        for kind, name in rows
    ]
    assert trace["z"] == expected


CHOSEN = {"run-a, step 300": "eval-300", "run-a, step 400": "eval-400", "published": "eval-published"}


def test_detailed_plots_hold_what_sql_counts_from_blocks(untouched, path):
    survival, histogram, answer, context = (
        plot(untouched, name)[0] for name in ("survival", "histogram", "answer", "context")
    )
    assert set(survival) == set(histogram) == set(answer) == set(context) == set(CHOSEN)
    for label, evaluation_id in CHOSEN.items():
        rows = ask(
            path,
            """SELECT p, avg((num_accepted_drafts >= p)::INT) FROM blocks, range(1, 8) AS positions(p)
            WHERE is_on_walk AND evaluation_id = ? GROUP BY p ORDER BY p""",
            evaluation_id,
        )
        assert survival[label]["x"] == [p for p, _ in rows]
        assert survival[label]["y"] == pytest.approx([share for _, share in rows], abs=1e-12)
        rows = ask(
            path,
            """SELECT k, avg((num_emitted_tokens = k)::INT) FROM blocks, range(1, 9) AS numbers(k)
            WHERE is_on_walk AND evaluation_id = ? GROUP BY k ORDER BY k""",
            evaluation_id,
        )
        assert histogram[label]["x"] == [k for k, _ in rows]
        assert histogram[label]["y"] == pytest.approx([share for _, share in rows], abs=1e-12)
        for traces, place in ((answer, "anchor_index"), (context, "num_prompt_tokens + anchor_index")):
            rows = ask(
                path,
                f"""
                WITH edges(edge) AS (VALUES (0), (16), (32), (64), (128))
                SELECT lower || '–' || (lower + greatest(16, lower) - 1), avg(num_emitted_tokens) FROM (
                    SELECT num_emitted_tokens, (SELECT max(edge) FROM edges WHERE edge <= {place}) AS lower
                    FROM blocks JOIN evaluations USING (evaluation_id)
                    JOIN prompts USING (transcripts_digest, prompt_id)
                    WHERE is_on_walk AND evaluation_id = ?) GROUP BY lower ORDER BY lower""",
                evaluation_id,
            )
            assert traces[label]["x"] == [name for name, _ in rows]
            assert traces[label]["y"] == pytest.approx([tau for _, tau in rows], abs=1e-12)


def test_extras_and_costs_are_those_of_their_tables(untouched, path):
    sweep, trees, recall = (plot(untouched, name)[0] for name in ("sweep", "trees", "recall"))
    for label, evaluation_id in list(CHOSEN.items())[:2]:
        rows = ask(
            path,
            """SELECT block_size, tau_pooled FROM block_sizes WHERE evaluation_id = ? AND slice = 'all'
            ORDER BY block_size""",
            evaluation_id,
        )
        assert list(zip(sweep[label]["x"], sweep[label]["y"], strict=True)) == rows
        rows = ask(
            path,
            """SELECT budget::VARCHAR, tau_pooled FROM trees WHERE evaluation_id = ? AND slice = 'all'
            ORDER BY budget""",
            evaluation_id,
        )
        assert list(zip(trees[label]["x"], trees[label]["y"], strict=True))[1:] == rows
    rows = ask(
        path,
        """SELECT draft_position, recall_conditional FROM recall WHERE evaluation_id = 'eval-300'
        AND slice = 'all' AND k = 4 ORDER BY draft_position""",
    )
    assert recall["k = 4"]["x"] == [position for position, _ in rows]
    assert recall["k = 4"]["y"] == pytest.approx([share for _, share in rows], abs=1e-12)
    cost = plot(untouched, "cost")[0]
    assert list(cost) == ["stream_checkpoint", "run_drafter"]
    assert cost["run_drafter"]["y"] == [2.25] * 7


def test_every_control_changes_what_it_says(page, path):
    page.choose(f"{SET} [data-control=values]", "mean")
    expected = taus(path, column="tau_prompt_mean")
    traces = plot(page, "curve")[0]
    assert traces["run-a"]["y"] == [row[1] for row in expected["run-a"]]
    assert traces["run-a"]["high"] == [None] * 4, "there is no interval of this mean"
    page.choose(f"{SET} [data-control=values]", "untied")
    assert plot(page, "curve")[0]["run-a"]["y"] == [
        row[1] for row in taus(path, column="tau_without_near_ties")["run-a"]
    ]
    page.choose(f"{SET} [data-control=values]", "tau")

    options = page.run(f"[...document.querySelectorAll('{SET} [data-control=slice] option')].map(o => o.textContent)")
    page.choose(f"{SET} [data-control=slice]", str(options.index("Dataset code")))
    assert_is_curve(plot(page, "curve")[0], taus(path, "dataset", "code"))
    rows = ask(
        path,
        """SELECT survival, conditional_acceptance FROM survival WHERE evaluation_id = 'eval-300'
        AND slice = 'dataset' AND dataset = 'code' ORDER BY draft_position""",
    )
    assert plot(page, "survival")[0]["run-a, step 300"]["y"] == pytest.approx([row[0] for row in rows], abs=1e-12)
    page.choose(f"{SET} [data-control=survival]", "conditional")
    assert plot(page, "survival")[0]["run-a, step 300"]["y"] == pytest.approx([row[1] for row in rows], abs=1e-12)
    assert numbers(page, "survival")[1][1] == f"{100 * rows[0][1]:.1f} %"

    # A checkpoint that is ticked joins the plots and one that is unticked leaves; the others keep their colours.
    boxes = page.run(f"[...document.querySelectorAll('{SET} .choices label')].map(l => l.textContent)")
    step_100 = boxes.index("run-a, step 100")
    first = f"{SET} .choices label:nth-child({{}}) input"
    tint = "document.querySelector(\"[data-plot=survival] .plot\").data.find(t => t.name === 'published').line.color"
    before = page.run(tint)
    page.click(first.format(boxes.index("run-a, step 300 (best)") + 1))
    page.click(first.format(step_100 + 1))
    assert set(plot(page, "survival")[0]) == {"run-a, step 100", "run-a, step 400", "published"}
    assert page.run(tint) == before
    for place in range(len(boxes)):
        if not page.run(f"document.querySelector({json.dumps(first.format(place + 1))}).checked"):
            page.click(first.format(place + 1))
    assert len(plot(page, "survival")[0]) == 6
    free = page.run(f"[...document.querySelectorAll('{SET} .choices input')].filter(b => b.disabled).length")
    assert free == len(boxes) - 6, "no more than can be told apart"
    page.click(f"{SET} [data-control=reset]")
    assert set(plot(page, "survival")[0]) == set(CHOSEN)
    for place, label in enumerate(boxes):
        if "best" in label or "latest" in label or "baseline" in label:
            page.click(first.format(place + 1))
    words = page.run(f"document.querySelector('{SET} [data-plot=survival] .empty').textContent")
    assert words == "No checkpoint is chosen: tick one above."


def test_other_conditions_are_shown_by_choice_and_never_in_one_plot(page, path):
    shown = "[...document.querySelectorAll('.conditions-set')].map(s => !s.hidden)"
    assert page.run(shown) == [True, False]
    page.choose("#which-conditions", "2")
    assert page.run(shown) == [False, True]
    rows = ask(path, "SELECT tau_pooled FROM leaderboard WHERE evaluation_id = 'eval-other'")
    assert plot(page, "curve", "[data-set='2']")[0]["run-a"]["y"] == [rows[0][0]]
    page.choose("#which-conditions", "all")
    assert page.run(shown) == [True, True]
    page.choose("#which-conditions", "1")
    page.click("nav a[href='#section-2']")
    page.wait_for("!document.querySelector(\"[data-set='2']\").hidden")


def test_texts_of_models_and_files_run_nothing(untouched):
    assert untouched.run("window.owned") is None
    assert untouched.run("document.title") == "Drafter acceptance report"
    untouched.run("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert untouched.run("document.querySelectorAll('.plot a, .plot img, main script, main img').length") == 0
    text = untouched.run("document.querySelector('main').textContent")
    assert EVIL in text
    assert "</script><script>window.owned=4</script> ]]> {{7*7}} ${7*7} %{y}" in text
    assert untouched.run("window.owned") is None
    shown = untouched.run("[...document.querySelectorAll('[data-plot=curve] .legend li')].map(l => l.textContent)")
    assert EVIL in shown


def test_a_script_that_got_in_is_stopped_by_the_page_itself(browser, report, tmp_path):
    page = report.read_text(encoding="utf-8").replace("</main>", "<script>window.owned = 1</script></main>")
    (tmp_path / "tampered.html").write_text(page, encoding="utf-8")
    with browser.open(tmp_path / "tampered.html") as page:
        page.wait_for("document.documentElement.dataset.drawn")
        assert page.run("window.owned") is None
        assert any("Content Security Policy" in words for words in page.complaints())


def test_without_its_library_the_page_says_so_and_keeps_its_tables(browser, report, tmp_path):
    page = report.read_text(encoding="utf-8")
    page = re.sub(r'(id="plotly-packed">)[^<]{100}', r"\g<1>" + 100 * "A", page)
    (tmp_path / "broken.html").write_text(page, encoding="utf-8")
    with browser.open(tmp_path / "broken.html") as page:
        page.wait_for("document.documentElement.dataset.drawn === 'no'")
        assert "cannot be drawn in this browser" in page.run("document.getElementById('problem').textContent")
        assert page.run("[...document.querySelectorAll('figure')].every(f => f.offsetParent === null)")
        assert page.run("document.querySelector('table').offsetParent !== null")


def test_the_keyboard_reaches_everything(page):
    page.press("Tab", key_code=9)
    assert page.run("document.activeElement.textContent") == "Skip to the results"
    assert page.run("document.activeElement.getBoundingClientRect().x >= 0"), "it shows when it has the focus"
    page.press("Enter", key_code=13, text="\r")
    page.wait_for("document.activeElement.id === 'main'")
    seen = []
    for _ in range(200):
        page.press("Tab", key_code=9)
        what = page.run(
            """(() => { const e = document.activeElement; return [e.tagName, e.dataset.control || e.id || e.textContent,
                getComputedStyle(e).outlineStyle] })()"""
        )
        if what[0] == "BODY":
            break
        seen.append(what)
    names = [name for _, name, _ in seen]
    for control in ("values", "slice", "survival", "checkpoint", "reset", "which-conditions"):
        assert control in names
    assert sum(tag == "SUMMARY" for tag, *_ in seen) >= 10
    assert all(outline != "none" for _, _, outline in seen)
    page.run(f"document.querySelector('{SET} .choices input:checked').focus()")
    page.press(" ", code="Space", key_code=32, text=" ")
    assert len(plot(page, "survival")[0]) == 2


@pytest.mark.parametrize("name", WINDOWS)
def test_it_looks_right_and_is_usable_in_each_window(browser, report, tmp_path, name):
    window = WINDOWS[name]
    with browser.open(report, **window) as page:
        page.wait_for("document.documentElement.dataset.drawn === 'yes'")
        page.picture(tmp_path / f"{name}.png".replace(" ", "-"))
        data = (tmp_path / f"{name}.png".replace(" ", "-")).read_bytes()
        assert struct.unpack(">I", data[16:20]) == (window["width"],)
        assert len(data) > 100_000
        brightness = page.run("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)[0]")
        assert (brightness < 64) == window.get("dark", False)
        assert page.run("document.documentElement.scrollWidth - innerWidth") <= 0
        overhang = """[...document.querySelectorAll('.plot svg.main-svg')].filter(
            s => s.getBoundingClientRect().right > innerWidth + 0.5).length"""
        assert page.run(overhang) == 0
        assert page.run(TEXT_OUTSIDE) == []
        assert page.run(TEXT_OVERLAPS) == []
        page.run("document.querySelectorAll('details').forEach(d => d.open = true)")
        page.wait_for("document.querySelectorAll('.numbers table').length >= 10")
        axe = importlib.resources.files("axe_core_python").joinpath("axe.min.js").read_text(encoding="utf-8")
        page.run(axe + "; 0")
        found = page.run("axe.run(document, {resultTypes: ['violations']})")
        problems = [(one["id"], [node["html"][:120] for node in one["nodes"][:3]]) for one in found["violations"]]
        assert problems == []
        assert page.run("document.querySelectorAll('.plot[role=img][aria-label*=\":\"]').length") >= 14
        assert page.requests() == []
        assert len(page.files()) == 1
        assert page.complaints() == []


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    folder = tmp_path_factory.mktemp("odd")
    return make_odd(folder) | {"a hundred": make_many(folder / "many.duckdb")}


WORDS = {
    "empty": "The database holds no evaluations yet",
    "single checkpoint": "Best: run-a, step 100",
    "single prompt": "One prompt only: there is no interval",
    "no steps": "Nothing was measured under these conditions",
    "without margins": "how many steps a near-tie decided was not recorded",
    "long names": "a-very-long-name-",
    "failures alone": "No evaluation is done yet",
    "vanished alone": "rotated away",
    "a hundred": "of 100 checkpoints cannot be told from the best",
}


@pytest.mark.parametrize("name", WORDS)
def test_odd_databases_are_shown_and_said_in_words(browser, odd, tmp_path, name):
    report = write_report(odd[name], tmp_path / "report.html", now=NOW)
    assert report.stat().st_size < 5_000_000
    with browser.open(report, width=390, height=844) as page:
        if "plotly-packed" in report.read_text(encoding="utf-8"):
            page.wait_for("document.documentElement.dataset.drawn === 'yes'")
        page.picture(tmp_path / "page.png")
        text = " ".join(page.run("document.body.innerText").split())
        assert WORDS[name] in text
        assert not re.search(r"\bNaN\b|\bNone\b|undefined|\bnull\b", text)
        assert page.run("document.documentElement.scrollWidth - innerWidth") <= 0
        assert page.run(TEXT_OUTSIDE) == []
        assert page.run(TEXT_OVERLAPS) == []
        assert page.complaints() == []
        if name == "a hundred":
            expected = ask(odd[name], "SELECT tau_pooled FROM learning_curve WHERE slice = 'all' ORDER BY step")
            assert plot(page, "curve")[0]["run-a"]["y"] == [tau for (tau,) in expected]


def test_without_scripts_the_tables_are_all_there(browser, report):
    with browser.open(report, scripts=False) as page:
        page.call("Emulation.setScriptExecutionDisabled", value=True)
        root = page.call("DOM.getDocument", depth=0)["root"]["nodeId"]
        figure = page.call("DOM.querySelector", nodeId=root, selector="figure")["nodeId"]
        style = {
            one["name"]: one["value"]
            for one in page.call("CSS.getComputedStyleForNode", nodeId=figure)["computedStyle"]
        }
        assert style["display"] == "none"
        assert len(page.call("DOM.querySelectorAll", nodeId=root, selector=".conditions-set[hidden]")["nodeIds"]) == 0
        assert len(page.call("DOM.querySelectorAll", nodeId=root, selector="table")["nodeIds"]) >= 7
