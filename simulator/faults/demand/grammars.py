"""Grammars of requests: how long a node compiles each, and what comes of it. Pure.

All force the same tokens: they differ in the time and the result of their compilation.
"""

from __future__ import annotations

from typing import NamedTuple

from common.errors import InvalidRequest, Overloaded, PdserveError
from common.grammar import Grammar, GrammarKind
from router.core.request_flow import RequestFlow

NO_ROOM, WRONG = "no room for a grammar", "the grammar cannot be followed"
"""The errors with which a node refuses a grammar."""


class Compiling(NamedTuple):
    """The time of a grammar's first compilation on a node, and its result."""

    span_s: float
    is_refused: bool = False
    """Whether every node refuses it."""
    is_late: bool = False
    """Whether its trial takes too long the first time; the next time it is compiled at once."""


GRAMMARS = {
    "quick": Compiling(0.0),
    "slow": Compiling(0.2),
    "slower": Compiling(3.0),
    "late": Compiling(0.5, is_late=True),
    "refused": Compiling(0.2, is_refused=True),
}
"""The name of a grammar is its text."""


def grammar_of(name: str) -> Grammar | None:
    """Return the grammar of this name; empty: there is none."""
    return Grammar(GrammarKind.REGEX, name) if name else None


class Compilations:
    """The grammars that one node has compiled."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def begin(self, grammar: Grammar | None) -> float | None:
        """Return how long a grammar is compiled; None: it is known, or there is none."""
        if grammar is None or grammar.text in self._known or not GRAMMARS[grammar.text].span_s:
            return None
        return GRAMMARS[grammar.text].span_s

    def end(self, grammar: Grammar) -> PdserveError | None:
        """Record the end of a compilation; return the grammar's error, if it has one."""
        compiling, is_new = GRAMMARS[grammar.text], grammar.text not in self._known
        if compiling.is_refused:
            return InvalidRequest(WRONG)
        self._known.add(grammar.text)
        return Overloaded(NO_ROOM) if compiling.is_late and is_new else None


def is_refused(name: str) -> bool:
    """Return whether no node follows this grammar."""
    return bool(name) and GRAMMARS[name].is_refused


def refusals_of_grammar(name: str) -> frozenset[str]:
    """Return how a request may end because of its grammar."""
    refusals = set()
    if is_refused(name):
        refusals.add(InvalidRequest.code)
    if name and GRAMMARS[name].is_late:
        refusals.add(Overloaded.code)
    return frozenset(refusals)


def is_hopeless(flow: RequestFlow) -> bool:
    """Return whether no node follows the grammar of a request."""
    grammar = flow._sampling.grammar
    return grammar is not None and is_refused(grammar.text)
