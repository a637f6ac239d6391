"""Pulls that were passed on: those that wait for a node that is lost are told at once."""

from __future__ import annotations

from collections import deque

from common.ids import Incarnation

MOST_PER_SOURCE = 64
"""As many as a node answers at once; one passed on before these has ended, or is refused."""


class PassedPulls:
    """The latest pulls of each source: who asked, and with which lease token.

    Whether one of them has ended is not known here: a node ignores what it does not wait for.
    """

    def __init__(self) -> None:
        self._pulls: dict[Incarnation, deque[tuple[Incarnation, int]]] = {}

    def add(self, source: Incarnation, node: Incarnation, lease_token: int) -> None:
        """Take that a pull of `node` was passed on to `source`."""
        latest = self._pulls.setdefault(source, deque(maxlen=MOST_PER_SOURCE))
        latest.append((node, lease_token))

    def take(self, source: Incarnation) -> list[tuple[Incarnation, int]]:
        """Return and forget the pulls of a source that is lost."""
        return list(self._pulls.pop(source, ()))
