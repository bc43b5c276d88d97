"""The colours of the report: light enough against their ground, and apart for eyes that lack a kind of cone."""

import doctest
import itertools
import re
from pathlib import Path

import numpy as np
import pytest

from dflash_core.results import report, report_payload, report_steps

CSS = (Path(report.__file__).parent / report.STYLE).read_text(encoding="utf-8")
THEMES = dict(zip(("light", "dark"), re.findall(r":root \{(.*?)\}", CSS, flags=re.DOTALL), strict=True))
# Machado, Oliveira and Fernandes (2009), severity 1.0, on linear RGB.
SEEN = {
    "all cones": np.eye(3),
    "no long": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "no middle": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "no short": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}


def linear(colour):
    values = np.array([int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)])
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def contrast(one, other):
    """Return the contrast ratio of WCAG 2."""
    high, low = sorted((float(linear(c) @ [0.2126, 0.7152, 0.0722]) + 0.05 for c in (one, other)), reverse=True)
    return high / low


def lab(rgb):
    """Return CIE L*a*b* of linear RGB."""
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = to_xyz @ np.clip(rgb, 0, 1) / [0.9505, 1.0, 1.089]
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.fixture(params=THEMES)
def colours(request):
    return dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", THEMES[request.param]))


def test_lines_and_texts_stand_out_from_what_they_lie_on(colours):
    for name in ("c0", "c1", "c2", "c3", "c4", "c5"):
        assert contrast(colours[name], colours["card"]) >= 3, name
    for name in ("ink", "faint", "accent", "bad", "good", "own"):
        for ground in ("card", "page"):
            assert contrast(colours[name], colours[ground]) >= 4.5, (name, ground)


@pytest.mark.parametrize("eyes", SEEN)
def test_the_first_three_series_are_apart_for_all_eyes(colours, eyes):
    seen = [lab(SEEN[eyes] @ linear(colours[f"c{place}"])) for place in range(3)]
    for one, other in itertools.combinations(seen, 2):
        assert np.linalg.norm(one - other) > 20


def test_colours_are_never_all_that_tells_series_apart():
    script = (Path(report.__file__).parent / "report_drawing.js").read_text(encoding="utf-8")
    for name in ("DASHES", "MARKERS", "PATTERNS"):
        entries = re.findall(r'"([^"]*)"', re.search(rf"const {name} = \[(.*?)\]", script)[1])
        assert len(entries) == len(set(entries)) == report.MAX_SERIES
    assert f"const MAX_SERIES = {report.MAX_SERIES};" in script


@pytest.mark.parametrize("module", [report_payload, report_steps])
def test_examples_in_the_docstrings_run(module):
    found = doctest.testmod(module)
    assert found.attempted
    assert found.failed == 0
