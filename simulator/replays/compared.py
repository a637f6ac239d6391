"""How far a replay is, and the decision that differs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first decision that is another one. The time counts from the recording's beginning."""

    line: int
    at_s: float
    what: str
    recorded: str
    replayed: str


@dataclass(slots=True)
class Compared:
    """How far a replay is."""

    num_decisions: int = 0
    difference: Difference | None = None
