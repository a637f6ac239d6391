"""Names of things that live on several machines.

An address proves nothing: every message names the *incarnation* (node id and epoch) that it is
for, and a process refuses what is meant for an earlier life of the same address.
"""

from __future__ import annotations

import secrets
from typing import NamedTuple

from common.wire_types import Count, Name


class Incarnation(NamedTuple):
    """One life of a process. `epoch` rises at each start, handed out by the placement store."""

    node_id: Name
    epoch: Count

    def __str__(self) -> str:
        return f"{self.node_id}#{self.epoch}"


class AttemptId(NamedTuple):
    """One try of one request. A retry is a new attempt, and the old one is fenced."""

    request_id: str
    attempt: int

    def __str__(self) -> str:
        return f"{self.request_id}/{self.attempt}"


def new_request_id(prefix: str = "req") -> str:
    """A request id that nobody can guess: `prefix-` and 96 random bits in hexadecimal."""
    return f"{prefix}-{secrets.token_hex(12)}"


def new_lease_token() -> int:
    """A random, non-zero 64-bit token; whoever names it was given it."""
    return secrets.randbits(64) or 1
