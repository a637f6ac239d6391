"""A compiler of grammars whose compilations last until a test lets them end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

from llguidance import LLMatcher

from common.grammar import Grammar
from grammars.compiler import GrammarCompiler
from tests.support.engine import hash_grammars

WAIT_S = 20.0


class SlowCompiler(GrammarCompiler):
    """That of hash runners. `compiled` are the grammars whose compilations began, in order."""

    def __init__(self, weigh: Callable[[Grammar], int] | None = None) -> None:
        super().__init__(hash_grammars.tokenizer(), weigh=weigh)
        self.compiled: list[Grammar] = []
        self.has_begun = threading.Event()
        self.waits_for_another = threading.Event()
        self.let_go = threading.Event()

    def _compiled(self, grammar: Grammar) -> LLMatcher:
        self.compiled.append(grammar)
        self.has_begun.set()
        assert self.let_go.wait(WAIT_S)
        return super()._compiled(grammar)

    def _waited_for(self, compilation: Future[LLMatcher], grammar: Grammar) -> LLMatcher:
        self.waits_for_another.set()
        return super()._waited_for(compilation, grammar)
