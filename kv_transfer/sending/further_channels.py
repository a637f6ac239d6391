"""What the sender does with further connections: their answers, their losses, their time."""

from __future__ import annotations

from common.errors import PeerProtocolError
from kv_transfer.sending.channels import FurtherChannel
from kv_transfer.sending.effects import Disconnect, SenderEffect, TakeLane
from kv_transfer.sending.link import Link
from kv_transfer.sending.links import Links, Pump
from kv_transfer.sending.transfer_errors import error_of_peer
from kv_transfer.shared.effects import Peer
from kv_transfer.wire import frames

Effects = list[SenderEffect]


class FurtherChannels:
    """The further connections of all links; see `channels`."""

    def __init__(self, links: Links, pump: Pump) -> None:
        self._links = links
        self._pump = pump

    def on_frame(self, link: Link, peer: Peer, frame: frames.Frame, now_s: float) -> Effects:
        """Handle a frame of a further connection.

        Raises `PeerProtocolError` when the peer breaks the protocol, and the `HandoffFailed` of a
        peer that refuses for good.
        """
        channel = link.channels.further.get(peer.channel)
        if channel is None:
            return []
        channel.heard()
        match frame:
            case frames.Welcome():
                return self._on_welcome(link, channel, frame)
            case frames.Rejected(code, message) if code != frames.NO_SESSION:
                raise error_of_peer(code, message)
            case frames.Rejected():
                return self.lose(link, peer, now_s)
            case frames.Pong():
                return []
            case frames.Ack():
                return self._pump.on_ack(link, channel, frame, now_s)
            case _:
                raise PeerProtocolError(f"{peer} sent a {type(frame).__name__}")

    def lose(self, link: Link, peer: Peer, now_s: float) -> Effects:
        """Handle a connection that is over: the others send what was in flight on it."""
        channel = link.channels.further.get(peer.channel)
        if channel is None:
            return []
        link.lose(channel, now_s)
        self._links.look_at(link, link.next_deadline_s())
        return [Disconnect(peer), *self._pump.out_of_turn(link)]

    def on_tick(self, link: Link, now_s: float) -> Effects:
        """Open, ask and give up connections whose time has come."""
        effects: Effects = []
        for channel in list(link.channels.further.values()):
            if channel.is_silent(now_s):
                effects += self.lose(link, channel.peer, now_s)
            else:
                effects += channel.on_tick(now_s)
        return effects

    def _on_welcome(self, link: Link, channel: FurtherChannel, welcome: frames.Welcome) -> Effects:
        if welcome.receiver != link.peer.incarnation:
            raise PeerProtocolError(f"{channel.peer} answered as {welcome.receiver}")
        if not channel.welcome():
            return []  # HELLO was repeated and both were answered.
        return [TakeLane(channel.peer, link.lane, b""), *self._pump.out_of_turn(link)]
