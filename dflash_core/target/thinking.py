"""Whether a chat template lets the user switch the target's thinking on and off: what variables it reads."""

from __future__ import annotations

import re
from typing import NamedTuple

from dflash_core.errors import TargetError

FLAG = "enable_thinking"
"""The variable that rendering hands to the template."""
_OTHER_SWITCHES = ("thinking", "reasoning_effort", "enable_reasoning", "thinking_budget", "think_mode")
# transformers' own tag, which plain Jinja does not know; what it marks does not matter here.
_GENERATION_TAG = re.compile(r"\{%-?\+?\s*(end)?generation\s*-?\+?%\}")


class ThinkingSupport(NamedTuple):
    """What a chat template does with thinking."""

    reads_flag: bool
    """Does it read `enable_thinking`? If not, the user's flag changes nothing."""
    other_switches: tuple[str, ...]
    """Other variables known to steer thinking that it reads, for example gpt-oss's `reasoning_effort`."""
    writes_think_tag: bool
    """Does its text hold `<think>`? With no switch at all, the target thinks always or never."""


def thinking_support(template: str) -> ThinkingSupport:
    """Read off a chat template's source which thinking switches it has; nothing is rendered.

    Raises:
        TargetError: the template is not Jinja.
    """
    from jinja2 import Environment, TemplateError, meta

    environment = Environment(extensions=["jinja2.ext.loopcontrols"])  # only parsed
    try:
        parsed = environment.parse(_GENERATION_TAG.sub("", template))
    except TemplateError as error:
        raise TargetError(f"the target's chat template is not Jinja: {' '.join(str(error).split())}") from error
    read = meta.find_undeclared_variables(parsed)
    return ThinkingSupport(
        reads_flag=FLAG in read,
        other_switches=tuple(name for name in _OTHER_SWITCHES if name in read),
        writes_think_tag="<think>" in template,
    )
