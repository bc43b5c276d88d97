"""Which thinking switches a template has is what changes when it is rendered."""

from __future__ import annotations

import pytest
from jinja2 import Environment

from dflash_core.errors import TargetError
from dflash_core.target.thinking import thinking_support

TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
QWEN = TURNS + (
    "{% if add_generation_prompt %}<assistant>"
    "{%- if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>{% endif %}{% endif %}"
)
TEMPLATES = {
    "qwen": (QWEN, True, (), True),
    "set to itself": (TURNS + "{% set enable_thinking = enable_thinking | default(true) %}", True, (), False),
    "in a comment": (TURNS + "{# enable_thinking #}", False, (), False),
    "in a text": (TURNS + "enable_thinking", False, (), False),
    "its own variable": (TURNS + "{% set enable_thinking = true %}{{ enable_thinking }}", False, (), False),
    "another's attribute": (TURNS + "{{ messages.enable_thinking }}", False, (), False),
    "gpt-oss": (TURNS + "Reasoning: {{ reasoning_effort or 'medium' }}", False, ("reasoning_effort",), False),
    "deepseek": (TURNS + "{% if thinking %}<think>{% endif %}", False, ("thinking",), True),
    "always": (TURNS + "<assistant><think>\n", False, (), True),
    "generation tags": (
        TURNS + "{%- generation -%}{{ enable_thinking }}{% endgeneration %}",
        True,
        (),
        False,
    ),
    "loop controls": (
        "{% for m in messages %}{% if enable_thinking %}{% break %}{% endif %}{% endfor %}",
        True,
        (),
        False,
    ),
}


@pytest.mark.parametrize(("template", "reads_flag", "others", "tag"), TEMPLATES.values(), ids=TEMPLATES)
def test_switches_are_the_variables_that_the_template_reads(
    template: str, reads_flag: bool, others: tuple[str, ...], tag: bool
) -> None:
    assert thinking_support(template) == (reads_flag, others, tag)


def test_a_template_that_reads_the_flag_renders_otherwise_with_it() -> None:
    rendered = {
        flag: Environment().from_string(QWEN).render(messages=[], add_generation_prompt=True, enable_thinking=flag)
        for flag in (True, False)
    }
    assert rendered[True] != rendered[False]


def test_a_template_that_is_no_jinja_is_refused_in_one_line() -> None:
    with pytest.raises(TargetError, match="chat template is not Jinja") as refused:
        thinking_support("{% if %}\n{{")
    assert "\n" not in str(refused.value)
