"""The rotary embedding is read from every form of draft config alike, and forms that disagree are refused."""

from __future__ import annotations

from typing import Any

import pytest

from dflash_core.errors import DraftConfigError, UnsupportedCheckpoint
from tests.support.draft_configs import one_line, read


class TestRope:
    YARN = {"factor": 4.0, "original_max_position_embeddings": 64}

    @pytest.mark.parametrize(
        ("changes", "theta"),
        [
            ({"rope_theta": 1e7}, 1e7),
            ({"rope_theta": None, "rope_parameters": {"rope_theta": 1e6}}, 1e6),
            ({"rope_theta": 1e6, "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}}, 1e6),
            ({"rope_theta": 500000, "rope_scaling": None}, 5e5),
        ],
        ids=["old form", "new form", "both alike", "null scaling"],
    )
    def test_either_form_gives_the_base(self, changes: dict[str, Any], theta: float) -> None:
        assert read(**changes).rope == {"rope_theta": theta, "rope_type": "default"}

    @pytest.mark.parametrize(
        ("changes", "named"),
        [
            ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}, ("10000.0", "1000000.0")),
            (
                {"rope_scaling": {"type": "yarn", **YARN}, "rope_parameters": {"rope_type": "default"}},
                ("yarn", "default"),
            ),
            (
                {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "rope_parameters": {"factor": 8.0}},
                ("4.0", "8.0"),
            ),
            ({"rope_scaling": {"type": "linear", "rope_type": "yarn", **YARN}}, ("linear", "yarn")),
        ],
        ids=["two bases", "two types", "two factors", "old and new type"],
    )
    def test_forms_that_disagree_are_an_error_that_names_both(
        self, changes: dict[str, Any], named: tuple[str, str]
    ) -> None:
        with pytest.raises(DraftConfigError, match="contradict") as error:
            read(**changes)
        assert all(name in one_line(error) for name in named)

    @pytest.mark.parametrize(
        "changes",
        [
            {"rope_scaling": {"type": "yarn", **YARN}},
            {"rope_scaling": {"rope_type": "yarn", **YARN}},
            {"rope_theta": None, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "yarn", **YARN}},
            {"rope_scaling": {"type": "yarn", "rope_type": "yarn", **YARN}},
        ],
        ids=["old key", "old form", "new form", "both keys alike"],
    )
    def test_yarn_is_read_from_every_form_alike(self, changes: dict[str, Any]) -> None:
        assert read(**changes).rope == {"rope_theta": 10000.0, "rope_type": "yarn", **self.YARN}

    @pytest.mark.parametrize(
        "parameters",
        [
            {"rope_theta": 1e4, "rope_type": "longrope"},
            {"rope_theta": 1e4, "rope_type": "dynamic"},
            {"rope_theta": 1e4, "partial_rotary_factor": 0.25},
            {"sliding_attention": {"rope_theta": 1e4}, "full_attention": {"rope_theta": 1e6}},
        ],
        ids=["longrope", "dynamic", "half heads", "per layer type"],
    )
    def test_kinds_that_are_not_computed_are_refused(self, parameters: dict[str, Any]) -> None:
        with pytest.raises(UnsupportedCheckpoint):
            read(rope_theta=None, rope_parameters=parameters)

    @pytest.mark.parametrize(
        ("changes", "named"),
        [
            ({"rope_scaling": {"rope_type": "yarn"}}, "needs factor"),
            ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "needs low_freq_factor"),
            ({"rope_scaling": {"rope_type": "linear", "factor": "4"}}, "rope_parameters.factor = '4'"),
            ({"rope_theta": "1e4"}, "rope_theta = '1e4'"),
            ({"rope_theta": None, "rope_parameters": {"rope_theta": "x"}}, "rope_parameters.rope_theta = 'x'"),
            ({"rope_parameters": [1]}, r"rope_parameters = \[1\]"),
            ({"rope_scaling": "yarn"}, "rope_scaling = 'yarn'"),
        ],
    )
    def test_what_a_kind_cannot_do_without_is_named(self, changes: dict[str, Any], named: str) -> None:
        with pytest.raises(DraftConfigError, match=named):
            read(**changes)
