"""What the connector's thread needs from a network. Other threads may call only `wake`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from common.errors import HandoffFailed
from kv_transfer.shared.effects import Peer

Parts = Sequence[memoryview]
"""A message: the header, then payload parts."""


@dataclass(frozen=True, slots=True)
class FromPeer:
    """A message of a decode node on the connection opened to it."""

    peer: Peer
    parts: Parts


@dataclass(frozen=True, slots=True)
class FromSession:
    """A message of a sender on a connection that it opened."""

    session: bytes
    parts: Parts


@dataclass(frozen=True, slots=True)
class LinkLost:
    """The connection opened to `peer` broke, as far as the transport can tell."""

    peer: Peer


@dataclass(frozen=True, slots=True)
class NoConnection:
    """The connection to `peer` cannot be opened, for example because its name is unknown."""

    peer: Peer
    error: HandoffFailed


@dataclass(frozen=True, slots=True)
class NobodyListens:
    """Nobody listens where a connection to `peer` was opened; the transport tries on."""

    peer: Peer


Arrival = FromPeer | FromSession | LinkLost | NoConnection | NobodyListens


class Transport(Protocol):
    """A network that keeps message boundaries and order per connection, and nothing else."""

    @property
    def endpoint(self) -> str:
        """The address that others connect to."""

    @property
    def is_short_of_files(self) -> bool:
        """Whether this process can open hardly any more files, so that it can take no sender."""

    def connect(self, peer: Peer) -> None:
        """Open a fresh connection, dropping an earlier one; returns at once.

        Raises `HandoffFailed` for an address that cannot be. What is found out later arrives as
        `NoConnection` or `NobodyListens`.
        """

    def disconnect(self, peer: Peer) -> None:
        """Close the connection, if any."""

    def send(self, peer: Peer, parts: Parts) -> bool:
        """Send to `peer` without copying or blocking; return False if the connection is full."""

    def reply(self, session: bytes, parts: Parts) -> None:
        """Send on a connection opened by the other side; dropped when it is gone or full."""

    def wait(self, timeout_s: float) -> None:
        """Return when something arrived, `wake` was called, or the time is over."""

    def receive_nowait(self) -> Arrival | None:
        """Return the next arrival, fair among connections; None when there is none."""

    def wake(self) -> None:
        """End the current or the next `wait`. Callable from any thread."""

    def close(self) -> None:
        """Close every connection, after a short time for queued messages to be sent."""
