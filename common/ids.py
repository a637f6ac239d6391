"""Names of things that live on several machines.

A process that restarts can get the address of its predecessor. So every message names the
*incarnation* (node id and epoch) that it is for, and a process refuses messages for an earlier one.
"""

from __future__ import annotations

import secrets
from typing import NamedTuple

from common.wire_types import Count, Name


class Incarnation(NamedTuple):
    """One run of a process. The placement store gives each start a higher `epoch`."""

    node_id: Name
    epoch: Count

    def __str__(self) -> str:
        return f"{self.node_id}#{self.epoch}"


class AttemptId(NamedTuple):
    """One try of one choice of a request. A retry is a new attempt, and the old one is fenced."""

    choice_id: str
    attempt: int

    def __str__(self) -> str:
        return f"{self.choice_id}/{self.attempt}"


def new_id(prefix: str) -> str:
    """Return an id that cannot be guessed: `prefix-` and 96 random bits in hexadecimal."""
    return f"{prefix}-{secrets.token_hex(12)}"


def new_lease_token() -> int:
    """Return a random, non-zero 64-bit token, which only its receivers can know."""
    return secrets.randbits(64) or 1
