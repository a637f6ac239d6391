"""What the connector's thread needs from a network. Only `wake` may be called by other threads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kv_transfer.core.effects import Peer

Parts = Sequence[memoryview]
"""A message: the header, then payload parts."""


@dataclass(frozen=True, slots=True)
class FromPeer:
    """A decode node answered on the connection opened to it."""

    peer: Peer
    parts: Parts


@dataclass(frozen=True, slots=True)
class FromSession:
    """A sender wrote on a connection that it opened."""

    session: bytes
    parts: Parts


@dataclass(frozen=True, slots=True)
class LinkLost:
    """The connection opened to `peer` broke, as far as the transport can tell."""

    peer: Peer


Arrival = FromPeer | FromSession | LinkLost


class Transport(Protocol):
    """Message boundaries and order are kept per connection; nothing else is promised."""

    @property
    def endpoint(self) -> str:
        """Where others connect to."""

    def connect(self, peer: Peer) -> None:
        """Open a fresh connection, dropping an earlier one. Raises `HandoffFailed`."""

    def disconnect(self, peer: Peer) -> None:
        """Close the connection, if any."""

    def send(self, peer: Peer, parts: Parts) -> bool:
        """Send to `peer` without copying or blocking; False when the connection cannot take it."""

    def reply(self, session: bytes, parts: Parts) -> None:
        """Send on a connection opened by the other side; dropped when it is gone or full."""

    def wait(self, timeout_s: float) -> None:
        """Return when something arrived, `wake` was called, or the time is over."""

    def receive_nowait(self) -> Arrival | None:
        """The next arrival, fair among connections; None when there is none."""

    def wake(self) -> None:
        """End the current or the next `wait`. Callable from any thread."""

    def close(self) -> None:
        """Close every connection, letting what was sent leave for a moment."""
