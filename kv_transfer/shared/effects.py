"""What the effects of both machines name: the other node, and an event."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from common.ids import Incarnation
from kv_transfer.contract import KVEvent


class Peer(NamedTuple):
    """A decode node as a ticket names it; an address alone does not identify it.

    `channel` is which connection to it; see `channels`.
    """

    endpoint: str
    incarnation: Incarnation
    channel: int = 0

    @property
    def main(self) -> Peer:
        """The first connection to the same node."""
        return self._replace(channel=0) if self.channel else self

    def __str__(self) -> str:
        which = f", channel {self.channel}" if self.channel else ""
        return f"{self.incarnation} at {self.endpoint}{which}"


@dataclass(frozen=True, slots=True)
class Emit:
    """Emit an event to the connector's owner."""

    event: KVEvent
