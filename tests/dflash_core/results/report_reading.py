"""Reading a report in a browser, and the same numbers from its database."""

import html
import json

import pytest

from dflash_core.results.connection import reading

SET = '[data-set="1"]'
# Texts of the plots that are cut off at the picture's edge, or smaller than can be read.
TEXT_OUTSIDE = """[...document.querySelectorAll('.plot')].filter(p => p.offsetParent).flatMap(p => {
    const frame = p.getBoundingClientRect();
    const texts = [...p.querySelectorAll('svg text')].filter(t => t.textContent.trim());
    return texts.map(t => [t, t.getBoundingClientRect()]).filter(([t, r]) =>
        r.left < frame.left - 1 || r.right > frame.right + 1 || r.top < frame.top - 1 || r.bottom > frame.bottom + 1 ||
        parseFloat(getComputedStyle(t).fontSize) < 11).map(([t]) => t.textContent); })"""
# Marks of one axis that run into each other; slanted ones are told apart by their distance.
TEXT_OVERLAPS = """[...document.querySelectorAll('.plot .xaxislayer-above, .plot .yaxislayer-above')].flatMap(layer => {
    const isLevel = t => !/rotate\\(-?[1-9]/.test(t.getAttribute('transform') || '');
    const texts = [...layer.querySelectorAll('text')].filter(isLevel);
    const marks = texts.map(t => [t.textContent, t.getBoundingClientRect()]);
    const meet = (r, s) => r.left < s.right - 1 && s.left < r.right - 1 && r.top < s.bottom - 1 && s.top < r.bottom - 1;
    return marks.flatMap(([a, r], i) => marks.slice(i + 1).filter(([, s]) => meet(r, s)).map(([b]) => [a, b])); })"""


def ask(path, statement, *values):
    with reading(path) as connection:
        return connection.execute(statement, list(values)).fetchall()


def plot(page, name, where=SET):
    """Return the traces of a plot by name, as the library holds them."""
    selector = f"{where} [data-plot={name}] .plot"
    traces = page.run(
        f"""[...document.querySelectorAll({json.dumps(selector)})].map(box => (box.data || []).map(t => ({{
            name: t.name, x: t.x, y: t.y, z: t.z, meta: t.meta,
            high: t.error_y ? t.y.map((y, i) => t.error_y.array[i] === null ? null : y + t.error_y.array[i]) : null,
            low: t.error_y ? t.y.map((y, i) => t.error_y.arrayminus[i] === null ? null : y - t.error_y.arrayminus[i])
                : null}})))"""
    )
    return [{html.unescape(trace.get("name") or ""): trace for trace in one} for one in traces]


def numbers(page, name):
    """Open the table under a plot and return its rows of texts."""
    find = f"document.querySelector({json.dumps(f'{SET} [data-plot={name}]')})"
    page.run(f"{find}.querySelector('details.numbers').open = true")
    page.wait_for(f"{find}.querySelector('.numbers table')")
    return page.run(
        f"[...{find}.querySelectorAll('.numbers table tr')].map(row => [...row.children].map(cell => cell.textContent))"
    )


def taus(path, kind="all", name="all", column="tau_pooled"):
    """Return run to [step, value, low, high] of the first set of conditions."""
    found = {}
    for run, *row in ask(
        path,
        f"""SELECT run, step, {column}, ci_low, ci_high FROM learning_curve
            WHERE slice = ? AND dataset = ? AND block_size = 8 ORDER BY run, step""",
        kind,
        name,
    ):
        found.setdefault(run, []).append(row)
    return found


def assert_is_curve(traces, expected):
    """Compare a learning curve with rows of the database."""
    assert len(traces) == len(expected)
    for run, rows in expected.items():
        trace = traces[run[:60]]
        if rows[0][0] is None:
            assert trace["meta"] == "level"
            assert trace["y"] == [rows[0][1]] * 2
            continue
        assert trace["x"] == [row[0] for row in rows]
        assert trace["y"] == [row[1] for row in rows]
        for place, column in (("low", 2), ("high", 3)):
            assert trace[place] == pytest.approx([row[column] for row in rows], abs=1e-12)
