"""A grammar is compiled once, however many threads ask for it at a time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from common.errors import InvalidRequest
from common.grammar import Grammar, GrammarKind
from tests.support.grammars.slow_compiler import WAIT_S, SlowCompiler

GOOD = Grammar(GrammarKind.REGEX, "[0-9]{3}")


def test_a_request_that_comes_meanwhile_waits_for_the_same_compilation() -> None:
    compiler = SlowCompiler()
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(compiler.matcher, GOOD)
        assert compiler.has_begun.wait(WAIT_S)
        second = threads.submit(compiler.matcher, GOOD)
        assert compiler.waits_for_another.wait(WAIT_S)
        assert not first.done()
        assert not second.done()
        compiler.let_go.set()
        matchers = [one.result(WAIT_S) for one in (first, second)]
    assert compiler.compiled == [GOOD]
    assert compiler.lookups() == {"cached": 1, "compiled": 1, "refused": 0}
    assert compiler.compile_s()["regex"].count == 1
    assert matchers[0].consume_token(ord("1"))
    assert matchers[1].validate_tokens([ord("1")] * 4) == 3, "each has a state of its own"


def test_both_are_refused_and_each_error_names_its_own_field() -> None:
    compiler = SlowCompiler()
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(compiler.matcher, Grammar(GrammarKind.REGEX, "(", "guided_regex"))
        assert compiler.has_begun.wait(WAIT_S)
        second = threads.submit(compiler.matcher, Grammar(GrammarKind.REGEX, "(", "tools"))
        assert compiler.waits_for_another.wait(WAIT_S)
        compiler.let_go.set()
        errors = [one.exception(WAIT_S) for one in (first, second)]
    assert [error.param for error in errors if isinstance(error, InvalidRequest)] == [
        "guided_regex",
        "tools",
    ]
    assert str(errors[0]) == str(errors[1])
    assert len(compiler.compiled) == 1
    assert compiler.lookups() == {"cached": 0, "compiled": 0, "refused": 2}
    with pytest.raises(InvalidRequest):
        compiler.matcher(Grammar(GrammarKind.REGEX, "("))
    assert len(compiler.compiled) == 2, "what was refused is not kept"


def test_what_is_kept_needs_no_compilation() -> None:
    compiler = SlowCompiler()
    compiler.let_go.set()
    assert not compiler.hold(GOOD)
    compiler.matcher(GOOD)
    assert compiler.hold(GOOD)
    assert compiler.lookups() == {"cached": 0, "compiled": 1, "refused": 0}
