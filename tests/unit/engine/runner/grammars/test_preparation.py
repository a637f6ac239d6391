"""Grammars are compiled ahead, each once, and only so many wait for it."""

from __future__ import annotations

import gc
import threading
from dataclasses import replace

import pytest

from common.errors import InvalidRequest, Overloaded
from common.grammar import Grammar, GrammarKind
from engine.runner.grammars import compiling
from engine.runner.grammars.masks import GrammarMasks
from grammars import kept
from tests.support.engine.hash_grammars import EOS_TOKEN_ID, VOCAB_SIZE
from tests.support.grammars.slow_compiler import WAIT_S, SlowCompiler

GOOD, OTHER = Grammar(GrammarKind.REGEX, "[0-9]{3}"), Grammar(GrammarKind.REGEX, "[a-c]{3}")


def masks_of(compiler: SlowCompiler) -> GrammarMasks:
    return GrammarMasks(compiler, VOCAB_SIZE, frozenset({EOS_TOKEN_ID}), proposes=True)


def test_requests_of_one_grammar_wait_for_one_compilation() -> None:
    compiler = SlowCompiler()
    masks = masks_of(compiler)
    first, second = masks.prepare(GOOD), masks.prepare(GOOD)
    assert first is not None
    assert second is first
    assert not first.done()
    compiler.let_go.set()
    assert first.result(WAIT_S) is None
    assert masks.prepare(GOOD) is None, "it is compiled"
    assert compiler.compiled == [GOOD]


@pytest.mark.covers("G12")
def test_a_refused_grammar_is_an_error_of_each_request_that_waits() -> None:
    compiler = SlowCompiler()
    masks = masks_of(compiler)
    bad = Grammar(GrammarKind.REGEX, "(")
    first, second = masks.prepare(bad), masks.prepare(bad)
    compiler.let_go.set()
    for one in (first, second):
        assert one is not None
        assert isinstance(one.exception(WAIT_S), InvalidRequest)
    again = masks.prepare(bad)
    assert again is not None, "an error is not kept"
    assert isinstance(again.exception(WAIT_S), InvalidRequest)
    assert masks.statistics().failures == {"compile": 3, "follow": 0}


def test_only_so_many_grammars_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "MAX_PREPARING", 1)
    compiler = SlowCompiler()
    masks = masks_of(compiler)
    one = masks.prepare(GOOD)
    assert one is not None
    assert masks.prepare(GOOD) is one, "it waits already"
    with pytest.raises(Overloaded, match="1 grammars wait to be compiled"):
        masks.prepare(OTHER)
    compiler.let_go.set()
    one.result(WAIT_S)
    other = masks.prepare(OTHER)
    assert other is not None
    other.result(WAIT_S)


def test_a_grammar_that_takes_long_holds_up_no_other() -> None:
    waits, go_on = threading.Event(), threading.Event()

    def weigh(grammar: Grammar) -> int:
        """Try a grammar; a trial of `GOOD` gets no CPU."""
        if grammar == GOOD:
            waits.set()
            assert go_on.wait(WAIT_S)
        return 1000

    compiler = SlowCompiler(weigh)
    compiler.let_go.set()
    masks = masks_of(compiler)
    slow = masks.prepare(GOOD)
    assert slow is not None
    assert waits.wait(WAIT_S)
    other = masks.prepare(OTHER)
    assert other is not None
    other.result(WAIT_S)
    assert not slow.done()
    go_on.set()
    slow.result(WAIT_S)


def test_what_is_prepared_is_kept_while_its_request_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the requests that waited for one compilation, and those that found it done."""
    monkeypatch.setattr(kept, "MAX_KEPT_BYTES", 1500)
    compiler = SlowCompiler(weigh=lambda grammar: 1000)
    masks = masks_of(compiler)
    requests = [replace(GOOD) for _ in range(3)]
    waiting = [masks.prepare(one) for one in requests[:2]]
    compiler.let_go.set()
    for one in waiting:
        assert one is not None
        one.result(WAIT_S)
    waiting.clear()
    compiler.compiled.clear()
    for number in range(3):
        if number == 1:
            assert masks.prepare(requests[-1]) is None
        with pytest.raises(Overloaded, match="requests in progress"):
            compiler.matcher(OTHER)
        assert compiler.kept(GOOD)
        requests.pop(0)
        gc.collect()
    compiler.matcher(OTHER)
    assert not compiler.hold(GOOD)
