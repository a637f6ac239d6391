"""The sending side as a machine without I/O: transfers, grouped by their decode node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from common.errors import HandoffFailed, LayoutMismatch, PeerProtocolError
from common.ids import Incarnation
from common.kv.kv_layout import KVLayout
from kv_transfer.contract import Commit, Ticket, TransferEnded
from kv_transfer.sending.effects import (
    Connect,
    Disconnect,
    PeerAnswers,
    PeerSilent,
    SayHello,
    SenderEffect,
    SendToPeer,
    TakeLane,
)
from kv_transfer.sending.further_channels import FurtherChannels
from kv_transfer.sending.link import Link
from kv_transfer.sending.links import Links, Pump
from kv_transfer.sending.transfer import Source, Transfer
from kv_transfer.sending.transfer_errors import (
    PeerUnreachable,
    TransferAborted,
    TransferSlow,
    error_of_peer,
)
from kv_transfer.sending.unreachable import UnreachablePeers
from kv_transfer.shared.chunks import MAX_SOURCE_BLOCKS, BlockSums, LayerChunk
from kv_transfer.shared.deadlines import earliest_s
from kv_transfer.shared.effects import Emit, Peer
from kv_transfer.shared.handshake import HandoffState, HandoffStep, LinkState
from kv_transfer.shared.lanes import ONE_SIDED_LANES
from kv_transfer.shared.limits import (
    MAX_DAMAGED_HEADERS,
    MAX_TRANSFERS_PER_LINK,
    MAX_WAIT_S,
    Limits,
)
from kv_transfer.wire import frames

Effects = list[SenderEffect]


class Sender:
    """A state machine: `on_…` methods return effects, to be performed in order. Nothing raises:
    misuse by the connector's owner ends the transfer at the next tick.

    `links`, and `link_of` by the token of a transfer, are there to be read.
    """

    def __init__(
        self,
        me: Incarnation,
        layout: KVLayout,
        limits: Limits,
        num_blocks: int = MAX_SOURCE_BLOCKS,
        num_host_blocks: int = 0,
    ) -> None:
        """Make it, for a pool of `num_blocks`; further blocks of host memory follow behind it."""
        self._me = me
        self._layout = layout
        self._source = Source(
            num_blocks + num_host_blocks,
            limits.blocks_per_chunk(layout),
            num_pool_blocks=num_blocks,
        )
        self.links = Links(limits, [layer.num_bytes for layer in layout.layers])
        self.link_of: dict[int, Link] = {}
        self._pump = Pump(self.links)
        self._further = FurtherChannels(self.links, self._pump)
        self._max_channels = limits.max_channels
        self._num_connections = 0
        self._unreachable = UnreachablePeers()
        self._longest_turn_s = MAX_WAIT_S + limits.ping_interval_s
        self._ticked_at_s = float("inf")

    @property
    def num_transfers(self) -> int:
        return len(self.link_of)

    @property
    def in_flight_bytes(self) -> dict[Peer, int]:
        """Unacknowledged bytes per peer; never above the window."""
        return {link.peer: link.in_flight_bytes for link in self.links.all()}

    @property
    def unreachable(self) -> tuple[Incarnation, ...]:
        """The peers that did not answer and are being tried again, the latest first."""
        return self._unreachable.tried_again

    # -- calls of the owner ----------------------------------------------------------------------

    def on_open(
        self, ticket: Ticket, deadline_s: float, now_s: float, priority: int = 0
    ) -> Effects:
        """Begin a transfer. Its token must not be open, and its ticket has target blocks."""
        peer = Peer(ticket.kv_endpoint, ticket.decode_node)
        refusal = self._unreachable.refusal(peer)
        if refusal is not None:
            return [Emit(TransferEnded(ticket.lease_token, refusal))]
        link = self.links.get(peer)
        effects: Effects = []
        if link is None:
            link = self.links.open(peer, now_s)
            effects += self._connect(link)
        if len(link.transfers) >= MAX_TRANSFERS_PER_LINK:
            error = HandoffFailed(f"{peer} has {MAX_TRANSFERS_PER_LINK} open transfers already")
            return [*effects, Emit(TransferEnded(ticket.lease_token, error))]
        transfer = Transfer(
            ticket, self._source, deadline_at_s=now_s + deadline_s, now_s=now_s, priority=priority
        )
        link.add(transfer)
        self.link_of[transfer.token] = link
        self.links.look_at(link, link.next_deadline_s())
        if link.state is LinkState.READY:
            effects += self._begin(link, transfer, now_s)
        return effects

    def on_push(
        self,
        token: int,
        layer: int,
        ordinals: Sequence[int],
        source_blocks: Sequence[int],
        *,
        is_last: bool = True,
    ) -> Effects:
        """Take a push. Unless it `is_last`, the next call is a further one of this transfer, and
        the frames of both are made then: the last of them asks for the credit of all."""
        link = self.link_of.get(token)
        if link is None or link.transfers[token].is_stopped:
            return []
        link.transfers[token].push(layer, ordinals, source_blocks)
        if link.transfers[token].misuse:
            self.links.look_at(link, 0.0)
        link.has_work(token)
        return self._pump.out_of_turn(link) if is_last and not link.waits_for_node else []

    def on_commit(self, token: int, commit: Commit) -> Effects:
        link = self.link_of.get(token)
        if link is None:
            return []
        link.transfers[token].commit(commit)
        link.has_work(token)
        self.links.look_at(link, 0.0)
        return self._pump.out_of_turn(link)

    def on_abort(self, token: int, now_s: float) -> Effects:
        """Abort a transfer. It ends when its peer has confirmed it, or at once if no BEGIN was ever
        sent: then nothing can have been committed, and the peer is told when it is connected."""
        link = self.link_of.get(token)
        if link is None:
            return []
        transfer = link.transfers[token]
        is_first = transfer.state is not HandoffState.ABORTING
        transfer.advance(HandoffStep.ABORT)
        transfer.drop_pieces()
        if not transfer.was_begun:
            link.abort_when_ready(transfer.ticket)
            return self._end(link, transfer, HandoffStep.CONFIRM, _aborted(), now_s)
        return link.abort_frames(transfer.ticket) if is_first else []

    def on_close(self, now_s: float) -> Effects:
        """End every transfer; notify the peers that can be reached."""
        effects: Effects = []
        for link in self.links.all():
            error = HandoffFailed("the sending connector was closed")
            effects += self._give_up(link, link.all(), HandoffStep.FAIL, error, now_s)
            self.links.drop(link)
        return effects

    # -- events of the shell ----------------------------------------------------------------------

    def hello(self, peer: Peer, offers: Mapping[str, bytes], verify: str) -> frames.Hello:
        """Return the frame for a `SayHello`, and record that it is sent now."""
        hello = frames.Hello(
            self._me, peer.incarnation, self._layout, offers, verify, can_repeat=True
        )
        link = self.links.get(peer.main)
        if link is None:
            return hello
        if peer.channel:
            return replace(hello, channel=peer.channel, group=link.channels.group)
        link.greet(offers, verify)
        return replace(hello, number=link.number, num_channels=self._max_channels)

    def is_sending(self, token: int) -> bool:
        """Return whether the pieces of a transfer are still needed: not ended nor aborted."""
        link = self.link_of.get(token)
        return link is not None and not link.transfers[token].is_stopped

    def on_summed(self, token: int, chunk: LayerChunk, sums: BlockSums) -> None:
        """Add the piece sums of a chunk's blocks to the commit's digest."""
        link = self.link_of.get(token)
        if link is not None:
            link.transfers[token].add_sums(chunk, sums)

    # -- events of the network --------------------------------------------------------------------

    def on_frame(self, peer: Peer, frame: frames.Frame, now_s: float) -> Effects:
        link = self.links.get(peer.main)
        if link is None:
            return []
        try:
            if peer.channel and not isinstance(frame, frames.Repeat):
                return self._further.on_frame(link, peer, frame, now_s)
            if not peer.channel:
                link.asked_at_s = None
            effects: Effects = [PeerAnswers(peer)] if self._unreachable.answered(peer) else []
            return effects + self._dispatch(link, frame, now_s)
        except HandoffFailed as error:
            return self.on_peer_failed(link.peer, error, now_s)

    def on_link_lost(self, peer: Peer, now_s: float) -> Effects:
        """Handle a broken connection; with transfers on it, it is opened again until a timeout.

        What was in flight on a further connection is sent on the others.
        """
        link = self.links.get(peer.main)
        if link is None:
            return []
        if peer.channel:
            return self._further.lose(link, peer, now_s)
        if not link.transfers and not link.has_late_aborts:
            return self._drop(link)
        link.break_off(now_s)
        self.links.look_at(link, link.next_deadline_s())
        return [Disconnect(peer), *link.channels.close()]

    def on_refused(self, peer: Peer, now_s: float) -> Effects:
        """Handle that no process listens at the address of the first connection to `peer`.

        One that has answered before has the time of a silent one to listen again.
        """
        link = self.links.get(peer)
        if link is None or link.lane:
            return []
        error = PeerUnreachable(f"{peer} takes no connection: is it up?")
        return self._on_no_answer(link, error, now_s)

    def on_damaged_header(self, peer: Peer, error: PeerProtocolError, now_s: float) -> Effects:
        """Take a header with a wrong checksum: the connection is opened again, a few times."""
        link = self.links.get(peer.main)
        if link is not None and link.count_damaged_header() > MAX_DAMAGED_HEADERS:
            return self.on_peer_failed(peer, error, now_s)
        return self.on_link_lost(peer, now_s)

    def on_peer_failed(self, peer: Peer, error: HandoffFailed, now_s: float) -> Effects:
        """End every transfer to `peer` with `error` and close the connections.

        A further connection that cannot be had fails nothing.
        """
        link = self.links.get(peer.main)
        if link is None:
            return []
        if peer.channel and not isinstance(error, PeerProtocolError):
            return self.on_link_lost(peer, now_s)
        fail = HandoffStep.FAIL
        ended = [e for one in link.all() for e in self._end(link, one, fail, error, now_s)]
        return ended + self._drop(link)

    def on_tick(self, now_s: float) -> Effects:
        effects: Effects = []
        span_s, self._ticked_at_s = now_s - self._ticked_at_s, now_s
        if span_s > self._longest_turn_s:
            for link in self.links.all():
                link.on_suspended(span_s, now_s)
        for link in self.links.take_due(now_s):
            effects += self._end_overdue(link, now_s)
            if link.is_silent(now_s):
                effects += self._on_no_answer(link, link.silence(), now_s)
            elif link.is_idle(now_s):
                effects += self._drop(link)
            elif link.retry(now_s):
                effects += self._connect(link)
            elif link.take_ping(now_s):
                effects.append(link.question())
            if self.links.get(link.peer) is link:
                effects += self._further.on_tick(link, now_s)
                self.links.look_at(link, link.next_deadline_s())
        for peer in self._unreachable.take_due(now_s):
            if self.links.get(peer) is None:
                effects += self._connect(self.links.open(peer, now_s))
        return effects

    def next_deadline_s(self) -> float | None:
        return earliest_s(self.links.next_deadline_s(), self._unreachable.next_deadline_s())

    # -- inside ----------------------------------------------------------------------------------

    def _connect(self, link: Link) -> Effects:
        """Begin a connection, later than all that were begun before."""
        self._num_connections += 1
        link.number = self._num_connections
        return [Connect(link.peer), SayHello(link.peer)]

    def _dispatch(self, link: Link, frame: frames.Frame, now_s: float) -> Effects:
        match frame:
            case frames.Welcome():
                return self._on_welcome(link, frame, now_s)
            case frames.Rejected(code, message):
                if code == frames.NO_SESSION:
                    return self.on_link_lost(link.peer, now_s)
                return self.on_peer_failed(link.peer, error_of_peer(code, message), now_s)
            case frames.Pong():
                return []
            case frames.Ack():
                return self._pump.on_ack(link, link.channels.main, frame, now_s)
            case frames.Begun():
                return self._on_begun(link, frame)
            case frames.Repeat():
                return self._on_repeat(link, frame)
            case frames.Committed():
                return self._on_committed(link, frame, now_s)
            case frames.Failed(_, _, code, message):
                error = error_of_peer(code, message)
                effects = link.stop_report(frame)
                return effects + self._on_end(link, frame, HandoffStep.FAIL, error, now_s)
            case frames.Aborted():
                return self._on_end(link, frame, HandoffStep.CONFIRM, _aborted(), now_s)
            case _:
                raise PeerProtocolError(f"{link.peer} sent a {type(frame).__name__}")

    def _on_welcome(self, link: Link, welcome: frames.Welcome, now_s: float) -> Effects:
        if welcome.receiver != link.peer.incarnation:
            raise PeerProtocolError(f"{link.peer} answered as {welcome.receiver}")
        take = TakeLane(link.peer, welcome.lane, welcome.lane_reply)
        if not link.welcome(welcome):
            # HELLO was repeated and both were answered, or the lane's other end changed.
            return [take] if link.takes_anew(welcome) else []
        effects: Effects = [take]
        effects += link.channels.open(welcome.num_channels, welcome.group, now_s)
        effects += link.take_late_aborts()
        for transfer in link.all():
            effects += self._begin(link, transfer, now_s)
        self.links.look_at(link, link.next_deadline_s())  # Pings depend on the lane.
        return effects + self._pump.out_of_turn(link)

    def _begin(self, link: Link, transfer: Transfer, now_s: float) -> Effects:
        """Begin or resume a transfer on a fresh connection."""
        if transfer.state is HandoffState.ABORTING:
            return link.abort_frames(transfer.ticket)
        if transfer.ticket.fingerprint != self._layout.fingerprint:
            error = LayoutMismatch(
                f"the ticket is for KV layout {transfer.ticket.fingerprint}, "
                f"this cache has {self._layout.fingerprint}"
            )
            return self._give_up(link, [transfer], HandoffStep.FAIL, error, now_s)
        transfer.was_begun = True
        transfer.is_begun, transfer.may_spread = link.lane not in ONE_SIDED_LANES, False
        link.has_work(transfer.token)
        begin = frames.Begin(transfer.token, transfer.ticket.generation)
        return [SendToPeer(link.peer, begin)]

    def _on_begun(self, link: Link, frame: frames.Begun) -> Effects:
        transfer = link.transfer_named(frame)
        if transfer is None:
            return []
        transfer.is_begun = transfer.may_spread = True
        link.has_work(transfer.token)
        return self._pump.out_of_turn(link)

    def _on_repeat(self, link: Link, frame: frames.Repeat) -> Effects:
        """Send damaged pieces again; a transfer that is over is reported so."""
        transfer = link.transfer_named(frame)
        if transfer is None:
            return link.abort_frames(frame)
        if transfer.is_stopped:
            return []
        transfer.repeat(frame.layer, frame.ordinals)
        link.has_work(transfer.token)
        return self._pump.out_of_turn(link)

    def _on_committed(self, link: Link, frame: frames.Committed, now_s: float) -> Effects:
        transfer = link.transfer_named(frame)
        if transfer and not transfer.has_promised:
            raise PeerProtocolError(f"{link.peer} acknowledged a commit that was not sent")
        return self._on_end(link, frame, HandoffStep.COMPLETE, None, now_s)

    def _on_end(
        self,
        link: Link,
        frame: frames.LeaseFrame,
        step: HandoffStep,
        error: HandoffFailed | None,
        now_s: float,
    ) -> Effects:
        # A late answer, for a transfer that ended meanwhile or for another generation.
        transfer = link.transfer_named(frame)
        return self._end(link, transfer, step, error, now_s) if transfer else []

    def _end(
        self,
        link: Link,
        transfer: Transfer,
        step: HandoffStep,
        error: HandoffFailed | None,
        now_s: float,
    ) -> Effects:
        if not transfer.advance(step):
            return []
        link.remove(transfer.token, now_s)
        del self.link_of[transfer.token]
        return [Emit(TransferEnded(transfer.token, error))]

    def _on_no_answer(self, link: Link, error: PeerUnreachable, now_s: float) -> Effects:
        num_failures, pause_s = self._unreachable.failed(link.peer, now_s)
        ended = self.on_peer_failed(link.peer, error, now_s)
        return [PeerSilent(link.peer, num_failures, pause_s), *ended]

    def _end_overdue(self, link: Link, now_s: float) -> Effects:
        """End transfers that were misused, are late, or are much slower than on other links."""
        effects: Effects = []
        for one in link.all():
            if one.misuse is not None:
                effects += self._give_up(link, [one], HandoffStep.FAIL, one.misuse, now_s)
        late = HandoffFailed(f"{link.peer} did not acknowledge the KV by the deadline")
        effects += self._give_up(link, link.expired(now_s), HandoffStep.EXPIRE, late, now_s)
        waiting = link.waiting_long(now_s)
        usual_per_s = self.links.rate_beside(link, now_s) if waiting else None
        moved = link.slow(waiting, usual_per_s, now_s)
        slow = TransferSlow(f"{link.peer} takes KV much more slowly than other decode nodes")
        return effects + self._give_up(link, moved, HandoffStep.FAIL, slow, now_s)

    def _give_up(
        self,
        link: Link,
        transfers: Sequence[Transfer],
        step: HandoffStep,
        error: HandoffFailed,
        now_s: float,
    ) -> Effects:
        effects: Effects = []
        for transfer in transfers:
            effects += link.abort_frames(transfer.ticket)
            effects += self._end(link, transfer, step, error, now_s)
        return effects

    def _drop(self, link: Link) -> Effects:
        self.links.drop(link)
        return [Disconnect(link.peer), *link.channels.close()]


def _aborted() -> TransferAborted:
    return TransferAborted("the transfer was aborted by its sender")
