"""Templates that take some efforts and refuse the others, in the shapes of known ones."""

from __future__ import annotations

import pytest

from router.text.chat.chat_template import ChatOptions, ChatTemplate, TemplateRefused
from router.text.chat.efforts import EFFORTS

MESSAGES = [{"role": "user", "content": "Hi"}]
SHOWN = "{{ reasoning_effort | default('-') }} {{ enable_thinking | default('-') }}"
QWEN = (
    "{%- if enable_thinking is not defined or enable_thinking %}"
    "{%- set effort = reasoning_effort | default('xhigh') %}"
    "{%- if effort not in ('xhigh', 'medium', 'low') %}"
    "{{- raise_exception('Unexpected reasoning effort ' ~ effort) }}{%- endif %}{%- endif %}"
    + SHOWN
)
"""It looks at the effort only where it is to think."""
MISTRAL = (
    "{%- set effort = reasoning_effort if reasoning_effort is defined else 'none' %}"
    "{%- if effort not in ['none', 'high'] %}"
    "{{- raise_exception('reasoning_effort must be either none or high') }}{%- endif %}" + SHOWN
)
HUNYUAN = (
    "{%- if reasoning_effort is defined and reasoning_effort not in ['high', 'no_think'] %}"
    "{{- raise_exception('reasoning_effort error') }}{%- endif %}" + SHOWN
)
NUMBERS = (
    "{%- set known = {'low': 0.2, 'medium': 0.5, 'high': 0.9} %}"
    "{%- if reasoning_effort is defined %}{% set _ = 1 / known[reasoning_effort] %}{% endif %}"
    + SHOWN
)
"""It does not refuse the others, but fails."""


def rendered(source: str, **variables: object) -> str:
    return ChatTemplate(source, {}).render(MESSAGES, ChatOptions(variables=variables))


@pytest.mark.covers("J30")
@pytest.mark.parametrize(
    ("source", "shown"),
    [
        (QWEN, ("-", "low", "low", "medium", "xhigh", "xhigh", "xhigh", "xhigh")),
        (MISTRAL, ("none", "high", "high", "high", "high", "high", "high", "high")),
        (HUNYUAN, ("no_think", "high", "high", "high", "high", "high", "high", "high")),
        (NUMBERS, ("-", "low", "low", "medium", "high", "high", "high", "high")),
        (SHOWN, EFFORTS),
    ],
)
def test_an_effort_that_a_template_refuses_is_the_next_one_that_it_takes(
    source: str, shown: tuple[str, ...]
) -> None:
    found = [rendered(source, reasoning_effort=effort).split()[0] for effort in EFFORTS]
    assert tuple(found) == shown


def test_no_effort_is_told_where_none_is_asked_for() -> None:
    for source in (QWEN, MISTRAL, HUNYUAN, NUMBERS, SHOWN):
        assert rendered(source, enable_thinking=False) == "- False"


def test_thinking_can_be_switched_off_beside_an_effort() -> None:
    assert rendered(QWEN, reasoning_effort="none", enable_thinking=False) == "- False"
    assert rendered(QWEN, reasoning_effort="high", enable_thinking=False) == "xhigh False"


@pytest.mark.parametrize("effort", ["hihg", "", "no_think", 5])
def test_what_is_no_effort_is_the_templates_affair(effort: object) -> None:
    with pytest.raises(TemplateRefused, match="Unexpected reasoning effort"):
        rendered(QWEN, reasoning_effort=effort)
    assert rendered(SHOWN, reasoning_effort=effort).split(" ")[0] == str(effort)


def test_a_template_that_refuses_all_efforts_refuses_them() -> None:
    refusing = "{% if reasoning_effort is defined %}{{ raise_exception('no') }}{% endif %}"
    with pytest.raises(TemplateRefused):
        rendered(refusing, reasoning_effort="high")
    assert rendered(refusing) == ""
