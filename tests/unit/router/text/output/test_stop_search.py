"""A stop string ends a choice after its first tokens, and where its text is searched."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from router.text.output.stop_search import StopSearch
from router.tools.answer_parser import AnswerSyntax
from router.tools.stop_scope import stop_scope
from router.tools.thinking import ThinkingFormat

THINKS = AnswerSyntax(thinking=ThinkingFormat.BEGUN)


def shown(
    tokens: Sequence[str],
    *,
    min_tokens: int = 0,
    is_shown: bool = False,
    syntax: AnswerSyntax | None = None,
    rest: str = "",
) -> tuple[str, str | None]:
    """The text of a choice of these tokens, and the stop string that ended it."""
    scope = None if syntax is None else stop_scope(syntax)
    search = StopSearch(["END", "\n\n"], is_shown=is_shown, min_tokens=min_tokens, scope=scope)
    text = ""
    for token in tokens:
        text += search.push(token)
        if search.found:
            return text, search.found
    return text + search.end(rest), search.found


@pytest.mark.parametrize(
    ("tokens", "settings", "wanted"),
    [
        (("a", "E", "ND", "b"), {}, ("a", "END")),
        (("a", "E", "ND", "b"), {"is_shown": True}, ("aEND", "END")),
        (("a", "E", "x"), {}, ("aEx", None)),
        (("a", "E"), {}, ("aE", None)),
        (("a", "E"), {"rest": "ND"}, ("a", "END")),
        (("END", "b", "END"), {"min_tokens": 1}, ("ENDb", "END")),
        (("E", "ND", "b"), {"min_tokens": 1}, ("", "END")),
        (("E", "ND", "b"), {"min_tokens": 2}, ("ENDb", None)),
        (("END", "</think>", "\n\n", "b", "END"), {"syntax": THINKS}, ("END</think>\n\nb", "END")),
        (("a", "</think>END"), {"syntax": THINKS, "min_tokens": 2}, ("a</think>END", None)),
        (("a", "</think>", "END"), {"syntax": THINKS, "min_tokens": 2}, ("a</think>", "END")),
    ],
)
def test_a_stop_string_ends_the_text_that_is_searched(
    tokens: Sequence[str], settings: dict[str, object], wanted: tuple[str, str | None]
) -> None:
    assert shown(tokens, **settings) == wanted  # type: ignore[arg-type]
