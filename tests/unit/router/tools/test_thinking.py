"""Where the thinking of an answer begins and ends: one rule, for all that follows from it."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.tools.answer_parser import AnswerParser, AnswerSyntax, whole_answer
from router.tools.stop_scope import stop_scope
from router.tools.thinking import (
    THINK,
    Cut,
    ThinkingCut,
    ThinkingFormat,
    ThinkingTokens,
    tags_in,
    thinking_behind,
    thinking_of_continued,
)
from tests.support.examples import everyday

TAGGED, BEGUN, NONE = ThinkingFormat.TAGGED, ThinkingFormat.BEGUN, ThinkingFormat.NONE

SPACE = " " * 512
NUM_SPACES = 2048
MOST_COPIED = len(SPACE) * NUM_SPACES // 16


def cut(form: ThinkingFormat, *pieces: str) -> Cut:
    """The four parts of an answer, each of which comes after the one before it."""
    thinking = ThinkingCut(form)
    new = [*(thinking.push(piece) for piece in pieces), thinking.push("", is_last=True)]
    parts = [part for one in new for part in enumerate(one) if part[1]]
    assert [at for at, _ in parts] == sorted(at for at, _ in parts)
    return Cut(*("".join(text for at, text in parts if at == kind) for kind in range(4)))


def counted(form: ThinkingFormat, *texts: str) -> tuple[int, bool]:
    tokens = ThinkingTokens(form)
    for text in texts:
        tokens.push(text)
    return tokens.num, tokens.is_over


@pytest.mark.parametrize(
    ("form", "wanted"),
    [
        (NONE, Cut(answer=" <think>a</think>")),
        (TAGGED, Cut("\n<think>", " a\n", "</think>\n\n", "b </think>")),
        (TAGGED, Cut("<think>", "", "</think>", "<think>b</think>")),
        (TAGGED, Cut("<think>", "<think>", "</think> ", "")),
        (TAGGED, Cut("<think>", " a </think", "", "")),
        (TAGGED, Cut(answer="\n<thin")),
        (TAGGED, Cut(answer=" \n")),
        (TAGGED, Cut(answer=" b <think>a</think>")),
        (TAGGED, Cut(answer="<th<think>a</think>")),
        (BEGUN, Cut("", "a <<", "</think>", "b")),
        (BEGUN, Cut("", " <think>a\n", "</think>\n", "b\n")),
        (BEGUN, Cut("", "", "</think>", "b")),
        (BEGUN, Cut("", "a </thi", "", "")),
    ],
)
def test_an_answer_is_cut_at_its_tags_however_it_comes(form: ThinkingFormat, wanted: Cut) -> None:
    text = "".join(wanted)
    assert cut(form, text) == cut(form, *text) == wanted
    for at in range(len(text)):
        assert cut(form, text[:at], text[at:]) == wanted, at


def test_thinking_is_held_only_while_it_may_end() -> None:
    thinking = ThinkingCut(TAGGED)
    assert thinking.push(" <think>a <") == Cut(" <think>", "a ")
    assert thinking.push("b") == Cut(thought="<b")
    assert thinking.push("</think>") == Cut(closing="</think>")
    assert thinking.push(" ") == Cut(closing=" ")
    assert thinking.push("c <") == Cut(answer="c <")


PIECES = st.sampled_from(
    ["<think>", "</think>", "<th", "</thi", "<", ">", "/", "think", " ", "\n", "\u2028", "a"]
)


@settings(max_examples=everyday(60, of=300))
@given(
    st.sampled_from(ThinkingFormat),
    st.lists(PIECES, max_size=10),
    st.lists(st.integers(0, 60), max_size=4),
)
def test_all_that_follows_from_the_thinking_agrees(
    form: ThinkingFormat, pieces: list[str], at: list[int]
) -> None:
    text = "".join(pieces)
    ends = [0, *sorted(min(one, len(text)) for one in at), len(text)]
    whole = cut(form, text)
    assert "".join(whole) == text
    assert cut(form, *(text[a:b] for a, b in pairwise(ends))) == whole
    parts = whole_answer(AnswerParser(AnswerSyntax(thinking=form)), text)
    assert (parts.thinking, parts.text) == (whole.thought.strip(), whole.answer)
    if scope := stop_scope(AnswerSyntax(thinking=form)):
        thought = whole.opening + whole.thought + whole.closing
        assert scope.push(text, is_last=True) == [(thought, whole.answer, "")]
    tagged = whole.opening + whole.thought + (THINK.end if whole.closing else "")
    assert counted(form, *text)[0] == len(tagged)


@pytest.mark.covers("T41")
@pytest.mark.parametrize("tags", [("<seed:think>", "</seed:think>"), ("[THINK]", "[/THINK]")])
def test_tags_are_those_of_the_template(tags: tuple[str, str]) -> None:
    found = tags_in(["{{ x }}", f"{{{{ '{tags[1]}' }}}}"])
    assert found == tags
    prompt = "[user] </think>\n[assistant] "
    assert thinking_behind(prompt, found) is TAGGED
    assert thinking_behind(f"{prompt}{tags[0]}\n", found) is BEGUN
    assert thinking_behind(f"{prompt}{tags[0]}\n{tags[1]}\n", found) is NONE


def test_a_template_without_tags_says_nothing_of_thinking() -> None:
    assert tags_in(["{{ 'think' }}", "<think>"]) is None
    assert thinking_behind("[assistant] <think>", None) is NONE


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


def num_copied(push: Callable[[str], object]) -> int:
    """The most bytes that are taken at once for one more piece of endless white space."""
    for _ in range(NUM_SPACES):
        push(SPACE)
    tracemalloc.start()
    try:
        push(SPACE)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("form", ThinkingFormat)
@pytest.mark.parametrize("call_format", ["hermes", "llama3_json"])
def test_white_space_that_is_held_is_not_copied_again(
    form: ThinkingFormat, call_format: str
) -> None:
    """All of it would be copied and searched with each token, for minutes in a long answer."""
    syntax = AnswerSyntax(thinking=form, call_format=call_format, calls_alone=True)
    for one in (syntax, replace(syntax, calls_alone=False)):
        scope = stop_scope(one)
        assert scope is not None
        assert num_copied(scope.push) < MOST_COPIED
        assert num_copied(AnswerParser(one).push) < MOST_COPIED
    assert num_copied(ThinkingTokens(form).push) < MOST_COPIED


@pytest.mark.covers("T12", "T13")
@pytest.mark.parametrize(
    ("end", "wanted"), [("", TAGGED), ("<think>\n", BEGUN), ("<think>\n\n</think>\n\n", NONE)]
)
@pytest.mark.parametrize("said", ["Hi", "Write <think></think>", "<think>", "</think>"])
def test_how_an_answer_begins_depends_on_the_end_of_the_prompt_alone(
    said: str, end: str, wanted: ThinkingFormat
) -> None:
    """What users write of tags is not at the end: the template begins the answer after it."""
    prompt = f"[user] {said}\n[assistant] {end}"
    assert thinking_behind(prompt, THINK) is wanted


@pytest.mark.covers("T43")
@pytest.mark.parametrize(
    ("begun", "wanted"),
    [
        ("<think>\n", BEGUN),
        (" <think>hm", BEGUN),
        ("<think>hm</think>", NONE),
        ("<think></think>Four <think>", NONE),
        ("Four", NONE),
        ("Four <think>", NONE),
        ("", TAGGED),
        (" \n", TAGGED),
    ],
)
def test_a_continued_answer_thinks_on_where_it_has_begun_to(
    begun: str, wanted: ThinkingFormat
) -> None:
    assert thinking_of_continued(begun, f"[assistant] {begun}", THINK) is wanted
    assert thinking_of_continued(begun, f"[assistant] {begun}", None) is NONE


def test_an_empty_answer_is_continued_behind_what_the_template_thinks() -> None:
    assert thinking_of_continued("", "[assistant] <think>\n\n</think>\n\n", THINK) is NONE
    assert thinking_of_continued("\n", "[assistant] <think>\n", THINK) is BEGUN
