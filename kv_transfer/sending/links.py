"""All links of a sender: the window that they share, which sends now, and which to look at when.

Nothing here visits every link for one acknowledgement or one turn of the thread: the bytes in
flight are a running sum, links that wait for the shared window stand in a queue, and times in a
heap.

Links that wait for the shared window are served by deficit round robin: on each turn a link earns
so many bytes and sends no more than that. It keeps what its next frame is too large for, so links
with small frames and with large ones get the same.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence

from kv_transfer.sending.channels import Channel
from kv_transfer.sending.effects import SendChunk, SenderEffect, SendToPeer, asking_for_credit
from kv_transfer.sending.link import Link
from kv_transfer.sending.link_rates import RateMeter, UsualRates
from kv_transfer.sending.shared_window import SharedWindow
from kv_transfer.sending.transfer import Transfer
from kv_transfer.shared.deadlines import Deadlines
from kv_transfer.shared.effects import Peer
from kv_transfer.shared.handshake import LinkState
from kv_transfer.shared.limits import MAX_TURNS_PER_ACK, Limits
from kv_transfer.wire import frames


class Links:
    """Links by their peer."""

    def __init__(self, limits: Limits, block_bytes: Sequence[int]) -> None:
        """Make a record without links; `block_bytes` is the size of a block in each layer."""
        self._limits = limits
        self._block_bytes = block_bytes
        self._by_peer: dict[Peer, Link] = {}
        self._window = SharedWindow(limits.node_window_bytes)
        self._waiting: OrderedDict[Peer, None] = OrderedDict()
        self._quantum_bytes = limits.max_frame_bytes
        self._deadlines: Deadlines[Peer] = Deadlines()
        self._meters: dict[Hashable, RateMeter] = {}
        self._usual = UsualRates()

    @property
    def in_flight_bytes(self) -> int:
        """Bytes of all links that count against the node's window."""
        return self._window.in_flight_bytes

    def get(self, peer: Peer) -> Link | None:
        return self._by_peer.get(peer)

    def all(self) -> list[Link]:
        return list(self._by_peer.values())

    def open(self, peer: Peer, now_s: float) -> Link:
        """Add a link to `peer`, which has none."""
        link = Link(peer, self._limits, self._block_bytes, self._window, now_s)
        self._by_peer[peer] = link
        self._meters[peer] = link.rate
        self.look_at(link, link.next_deadline_s())
        return link

    def drop(self, link: Link) -> None:
        """Remove a link; what it had in flight is room for the others."""
        link.let_go()
        del self._by_peer[link.peer], self._meters[link.peer]
        self._waiting.pop(link.peer, None)
        self._deadlines.discard(link.peer)

    # Time.

    def look_at(self, link: Link, at_s: float) -> None:
        """Return the link from `take_due` at this time at the latest."""
        self._deadlines.set_no_later(link.peer, at_s)

    def take_due(self, now_s: float) -> list[Link]:
        """Return the links to look at now; follow with `look_at` for each."""
        return [self._by_peer[peer] for peer in self._deadlines.take_due(now_s)]

    def next_deadline_s(self) -> float | None:
        return self._deadlines.next_s()

    def rate_beside(self, link: Link, now_s: float) -> float | None:
        """Return what another link would usually carry, in bytes/s; None if nothing is known."""
        return self._usual.beside(link.peer, self._meters, now_s)

    # The shared window.

    def note_wait(self, link: Link) -> None:
        """Note whether the link, which has just sent, waits for the shared window.

        One that waited already keeps its place.
        """
        if link.waits_for_node:
            self._waiting[link.peer] = None
        else:
            self._waiting.pop(link.peer, None)

    def others_wait(self, link: Link) -> bool:
        """Return whether a link other than this one waits for the shared window."""
        return len(self._waiting) > (link.peer in self._waiting)

    def turns(self, first: Link) -> Iterator[Link]:
        """Yield `first`, then a few of the links that wait, each to send within its budget."""
        link = first
        for _ in range(MAX_TURNS_PER_ACK):
            if self.others_wait(link):
                link.budget_bytes = link.deficit_bytes + self._quantum_bytes
            self._waiting.pop(link.peer, None)  # It waits behind the others after its turn.
            yield link
            link.deficit_bytes = max(0.0, link.budget_bytes) if link.lacks_budget else 0.0
            link.budget_bytes = math.inf
            if not self._waiting:
                return
            link = self._by_peer[next(iter(self._waiting))]


Effects = list[SenderEffect]


class Pump:
    """Makes the frames that the windows have room for, on one link or on all that wait."""

    def __init__(self, links: Links) -> None:
        self._links = links

    def out_of_turn(self, link: Link) -> Effects:
        """Send on a link that has something new.

        While others wait for the shared window, only what every link may have in flight: the rest
        of the room is theirs, and the link waits behind them.
        """
        link.budget_bytes = 0.0 if self._links.others_wait(link) else math.inf
        effects = self._send(link)
        link.budget_bytes = math.inf
        return effects

    def in_turn(self, first: Link) -> Effects:
        """Send on `first`, then on those that wait for the shared window, in turn."""
        return [effect for link in self._links.turns(first) for effect in self._send(link)]

    def on_ack(self, link: Link, channel: Channel, ack: frames.Ack, now_s: float) -> Effects:
        """Take credit for a connection of a link, and use it.

        Raises `PeerProtocolError` for more than was sent.
        """
        link.acknowledge(channel, ack.consumed, now_s)
        if ack.window_bytes:
            link.grant(ack.window_bytes)
        return self.in_turn(link)

    def _send(self, link: Link) -> Effects:
        """Send while the windows have space, the most urgent transfer first."""
        effects: Effects = []
        while link.state is LinkState.READY and (transfer := link.next_turn()):
            if transfer.pending:
                effects.append(self._launch(link, transfer))
                link.has_work(transfer.token)
            elif commit := transfer.take_commit():
                effects.append(SendToPeer(link.peer, commit))
            elif transfer.misuse:
                self._links.look_at(link, 0.0)
        self._links.note_wait(link)
        return asking_for_credit(effects)

    def _launch(self, link: Link, transfer: Transfer) -> SendChunk:
        chunk, ticket = link.take_chunk(transfer), transfer.ticket
        channel, seq = link.launch(transfer.token, chunk)
        if channel.peer.channel and len(channel) == 1:
            self._links.look_at(link, link.next_deadline_s())  # It was not watched.
        return SendChunk(
            peer=channel.peer,
            seq=seq,
            lease_token=transfer.token,
            generation=ticket.generation,
            chunk=chunk,
            target_blocks=transfer.targets_of(chunk),
            verify=link.verify,
        )
