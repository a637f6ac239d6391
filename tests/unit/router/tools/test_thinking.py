"""Tokens of thinking, counted one at a time."""

from __future__ import annotations

import pytest

from router.tools.thinking import ThinkingFormat, ThinkingTokens, thinking_behind

TAGGED, BEGUN, NONE = ThinkingFormat.TAGGED, ThinkingFormat.BEGUN, ThinkingFormat.NONE


def counted(form: ThinkingFormat, *texts: str) -> tuple[int, bool]:
    tokens = ThinkingTokens(form)
    for text in texts:
        tokens.push(text)
    return tokens.num, tokens.is_over


@pytest.mark.covers("T02")
@pytest.mark.parametrize(
    ("form", "texts", "wanted"),
    [
        (BEGUN, ("hm", "</think>", "Hi"), (2, True)),
        (BEGUN, ("hm", "</thi", "nk>\n", "\n", "Hi", "!"), (3, True)),
        (BEGUN, ("hm", "", "", "so</think>Hi", "!"), (4, True)),
        (BEGUN, ("hm", "so"), (2, False)),
        (BEGUN, ("</think>", "Hi"), (1, True)),
        (TAGGED, ("<think>", "hm", "</think>", "Hi"), (3, True)),
        (TAGGED, ("\n", "<th", "ink>", "hm"), (4, False)),
        (TAGGED, ("\n", "<th"), (0, False)),
        (TAGGED, ("<th", "is is", " <think>hm</think>"), (0, True)),
        (TAGGED, ("Hi", "<think>"), (0, True)),
        (NONE, ("<think>", "hm"), (0, True)),
    ],
)
def test_tokens_up_to_the_last_tag_are_thinking(
    form: ThinkingFormat, texts: tuple[str, ...], wanted: tuple[int, bool]
) -> None:
    assert counted(form, *texts) == wanted


@pytest.mark.covers("T12", "T13")
@pytest.mark.parametrize(
    ("end", "wanted"), [("", TAGGED), ("<think>\n", BEGUN), ("<think>\n\n</think>\n\n", NONE)]
)
@pytest.mark.parametrize("said", ["Hi", "Write <think></think>", "<think>", "</think>"])
def test_how_an_answer_begins_depends_on_the_end_of_the_prompt_alone(
    said: str, end: str, wanted: ThinkingFormat
) -> None:
    """What users write of tags is not at the end: the template begins the answer behind it."""
    prompt = f"[user] {said}\n[assistant] {end}"
    assert thinking_behind(prompt, can_think=True) is wanted
