"""The attempts of one choice that go on now: one, or two while a node is suspected. No I/O.

While a node of the main attempt is suspected, a second attempt runs elsewhere; where the node is
heard and only not reached, for an attempt that waits for its first word alone. When one of the two
ends, the other one is the main attempt from then on.
"""

from __future__ import annotations

from common.ids import AttemptId, Incarnation
from router.core.attempt import Attempt, State
from router.core.effects import Effect, SendAbort
from router.core.token_ledger import TokenLedger


class Attempts:
    """Begins and ends attempts. When that is due, its owner decides.

    Methods that end an attempt return the effects to perform, in order.
    """

    def __init__(self, choice_id: str, ledger: TokenLedger) -> None:
        self.main = self.newest = Attempt(AttemptId(choice_id, 1), ledger)
        self.second: Attempt | None = None
        self.suspects: dict[Incarnation, bool] = {}
        """Nodes that are suspected, but not lost yet, and whether each is heard."""
        self._aborted: set[tuple[Incarnation, AttemptId]] = set()

    @property
    def is_done(self) -> bool:
        return self.main.state is State.DONE

    def is_held_up(self, attempt: Attempt) -> bool:
        """Return whether a suspected node may hold it up: one that is silent, or is heard, was
        asked, and may not know it."""
        return any(
            attempt.waits_for(node) if is_heard else attempt.is_on(node)
            for node, is_heard in self.suspects.items()
        )

    def find(self, attempt_id: AttemptId) -> Attempt | None:
        """Return the attempt with this id, if it is one of those that go on."""
        main, second = self.main, self.second
        if main.id == attempt_id:
            return main
        return second if second is not None and second.id == attempt_id else None

    def on(self, node: Incarnation) -> list[Attempt]:
        """Return the attempts with an open leg on the node, the second one first."""
        return [one for one in reversed(self._all()) if one.is_on(node)]

    def beside(self, attempt: Attempt) -> Attempt | None:
        """Return the other one of two attempts."""
        return self.main if attempt is self.second else self.second

    def answer_late_grant(
        self, node: Incarnation, attempt_id: AttemptId, is_grant: bool
    ) -> list[Effect]:
        """Abort what a node grants after it was asked to end it: the abort may have overtaken."""
        was_aborted = (node, attempt_id) in self._aborted
        return [SendAbort(node, attempt_id)] if is_grant and was_aborted else []

    def begin_second(self) -> Attempt:
        """Begin an attempt beside the main one, after the tokens that were emitted."""
        self.second = self._new()
        return self.second

    def restart(self) -> list[Effect]:
        """End the main attempt, and begin another one after the tokens that were emitted."""
        ending = self._end(self.main)
        self.main = self._new()
        return ending

    def drop(self, attempt: Attempt) -> list[Effect]:
        """End one of two attempts; the other one goes on alone."""
        ending = self._end(attempt)
        if attempt is self.main and self.second is not None:
            self.main = self.second
        self.second = None
        return ending

    def end(self) -> list[Effect]:
        """End all of them."""
        ending = [effect for attempt in self._all() for effect in self._end(attempt)]
        self.second = None
        self.main.state = State.DONE
        return ending

    def _all(self) -> tuple[Attempt, ...]:
        return (self.main,) if self.second is None else (self.main, self.second)

    def _new(self) -> Attempt:
        choice_id, number = self.newest.id
        self.newest = Attempt(AttemptId(choice_id, number + 1), self.main.ledger.continued())
        return self.newest

    def _end(self, attempt: Attempt) -> list[Effect]:
        ending = attempt.end()
        self._aborted |= {(e.node, e.attempt) for e in ending if isinstance(e, SendAbort)}
        return ending
