"""Grammars that are compiled before their requests get a seat, beside the steps.

No step compiles: what is compiled here is kept as long as the `Grammar` of a request lives.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Lock

from common.errors import Overloaded
from common.grammar import Grammar
from engine.runner.grammars.held_matcher import Matchers

MAX_PREPARING = 256
"""Grammars that wait for a thread or are compiled there: as many as requests wait on a node."""
_NUM_THREADS = 2
"""A trial that gets no CPU on a busy node holds up no other one. More than a client's slots
(`grammars.trying.queue`) would end trials that have been stopped too often."""


@dataclass(slots=True)
class _Preparing:
    """A compilation that has not ended, and the grammars of the requests that it is for."""

    compiled: Future[None]
    grammars: list[Grammar] = field(default_factory=list)


class Preparation:
    """Compiles grammars on threads of its own, in the order asked. Any thread may call it."""

    def __init__(self, matchers: Matchers) -> None:
        self._matchers = matchers
        self._lock = Lock()
        self._preparing: dict[Grammar, _Preparing] = {}
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="pdserve-grammars")
        self.num_failed = 0
        """Requests whose grammar did not compile."""

    def begin(self, grammar: Grammar) -> Future[None] | None:
        """Begin to compile a grammar, which is kept as long as this object lives; None: it is.

        The future has the error, `InvalidRequest`, of a grammar that cannot be followed. Raises
        `Overloaded` while too many wait.
        """
        with self._lock:
            if self._matchers.hold(grammar):
                return None
            found = self._preparing.get(grammar)
            if found is not None:
                found.grammars.append(grammar)
                return found.compiled
            if len(self._preparing) >= MAX_PREPARING:
                raise Overloaded(
                    f"{MAX_PREPARING} grammars wait to be compiled: wanted less for a new one"
                )
            compiled = self._threads.submit(self._compile, grammar)
            self._preparing[grammar] = _Preparing(compiled, [grammar])
        return compiled

    def _compile(self, grammar: Grammar) -> None:
        is_good = False
        try:
            self._matchers.matcher(grammar)
            is_good = True
        finally:
            with self._lock:
                ended = self._preparing.pop(grammar)
                for one in ended.grammars if is_good else ():
                    self._matchers.hold(one)
                if not is_good:
                    self.num_failed += len(ended.grammars)
