"""Sends what the windows have room for: on one link, and on links that wait for the shared one."""

from __future__ import annotations

import math

from kv_transfer.sending.channels import Channel
from kv_transfer.sending.effects import SendChunk, SenderEffect, SendToPeer, asking_for_credit
from kv_transfer.sending.link import Link
from kv_transfer.sending.links import Links
from kv_transfer.sending.transfer import Transfer
from kv_transfer.shared.handshake import LinkState
from kv_transfer.wire import frames

Effects = list[SenderEffect]


class Pump:
    """Makes the frames of `links` that may be sent now."""

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
