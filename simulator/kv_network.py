"""KV connectors over a modelled network: the contract of `kv_transfer`, bytes without content.

Every message takes `latency_s`, and the bytes of a transfer share the ports of its two nodes with
all other transfers (`shared_links`). A landing has its KV when the last byte and the commit have
arrived; its sender knows it one message later. There are no faults: no frame is lost and no
connection breaks, so leases do not run out. A connector checks its callers: a commit before every
block was pushed, or a token opened twice, is a bug of the flows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf

from common.errors import HandoffFailed
from common.ids import Incarnation
from common.kv.kv_layout import KVLayout
from kv_transfer.contract import (
    Commit,
    GivenUp,
    KVEvent,
    Landed,
    LandingFailed,
    OnEvent,
    Released,
    Revoked,
    Ticket,
    TransferEnded,
)
from kv_transfer.transfer_timing import TransferTiming
from simulator.shared_links import SharedLinks
from simulator.timeline import Timeline


@dataclass(slots=True)
class Port:
    """Where a node meets the network: what takes its events, and its open landings by token."""

    node: Incarnation
    number: int
    """It stands for the node where flows are compared."""
    on_event: OnEvent
    landings: dict[int, Ticket] = field(default_factory=dict)


@dataclass(slots=True)
class _Transfer:
    ticket: Ticket
    source: Port
    target: Port
    num_missing: int
    """Pieces that were not pushed."""
    is_moving: bool = False
    commit: Commit | None = None
    opened_at_s: float = 0.0
    first_sent_at_s: float | None = None


class ModelledNetwork:
    """The connectors of all nodes, and the transfers between them by lease token."""

    def __init__(
        self, timeline: Timeline, layout: KVLayout, *, bytes_per_s: float, latency_s: float
    ) -> None:
        self._timeline = timeline
        self._piece_bytes = layout.block_bytes / layout.num_layers
        self._num_layers = layout.num_layers
        self._latency_s = latency_s
        self._links = SharedLinks(bytes_per_s)
        self._ports: dict[Incarnation, Port] = {}
        self._transfers: dict[int, _Transfer] = {}
        self._looking_at_s = inf
        """The time of the next look, at the latest the next end of a committed transfer."""
        self._ending: set[int] = set()
        """Transfers that are committed, and have bytes on their way."""
        self.num_bytes = 0.0
        """Bytes of KV that were pushed."""

    @property
    def is_idle(self) -> bool:
        """Whether no transfer and no landing is open."""
        return not self._transfers and not any(port.landings for port in self._ports.values())

    def join(self, node: Incarnation, on_event: OnEvent) -> ModelledConnector:
        """Return the connector of a node; `on_event` takes its events."""
        port = self._ports[node] = Port(node, len(self._ports), on_event)
        return ModelledConnector(self, port)

    # Called for a receiving node.

    def expect(self, port: Port, ticket: Ticket) -> None:
        """Open a landing. Raises `ValueError` for a token that is open."""
        if ticket.lease_token in port.landings:
            raise ValueError(f"lease {ticket.lease_token} is open")
        port.landings[ticket.lease_token] = ticket

    def revoke(self, port: Port, token: int) -> None:
        """Close a landing; it is not written any more."""
        if port.landings.pop(token, None) is None:
            return
        port.on_event(Released(token))
        self._end(token, Revoked(f"{port.node} revoked the lease"))

    # Called for a sending node.

    def open(self, port: Port, ticket: Ticket) -> None:
        """Begin a transfer. Raises `ValueError` for a token that is open."""
        if ticket.lease_token in self._transfers:
            raise ValueError(f"lease {ticket.lease_token} is open")
        target = self._ports[ticket.decode_node]
        num_pieces = len(ticket.target_block_ids) * self._num_layers
        now_s = self._timeline.present_s
        transfer = _Transfer(ticket, port, target, num_pieces, opened_at_s=now_s)
        self._transfers[ticket.lease_token] = transfer
        if ticket.lease_token not in target.landings:
            self._end(ticket.lease_token, HandoffFailed("the landing is closed"))

    def push(self, token: int, num_blocks: int) -> None:
        """Send one layer of blocks. Raises `ValueError` for more blocks than the ticket has."""
        transfer = self._transfers.get(token)
        if transfer is None:
            return
        transfer.num_missing -= num_blocks
        if transfer.num_missing < 0:
            raise ValueError(f"lease {token}: more blocks were pushed than its ticket has")
        num_bytes = num_blocks * self._piece_bytes
        self.num_bytes += num_bytes
        self._catch_up()
        now_s = self._timeline.present_s
        if transfer.first_sent_at_s is None:
            transfer.first_sent_at_s = now_s
        transfer.is_moving = True
        source, target = transfer.source.number, transfer.target.number
        self._links.add(token, source, target, num_bytes, now_s)
        self._look_at_end()

    def commit(self, token: int, commit: Commit) -> None:
        """End a transfer. Raises `ValueError` unless all blocks were pushed, or it may be short."""
        transfer = self._transfers.get(token)
        if transfer is None:
            return
        if transfer.num_missing and not transfer.ticket.may_be_short:
            raise ValueError(f"lease {token}: {transfer.num_missing} pieces were not pushed")
        self._catch_up()
        transfer.commit = commit
        if transfer.is_moving:
            self._ending.add(token)
            self._look_at_end()
        else:
            self._send_commit(token)

    def abort(self, token: int) -> None:
        """Abort a transfer; the landing fails, and its blocks are released."""
        transfer = self._transfers.get(token)
        if transfer is None:
            return
        error = GivenUp("the transfer was aborted by its sender")
        self._timeline.after(self._latency_s, partial(self._fail, transfer, error))
        self._end(token, error)

    # Inside.

    def _catch_up(self) -> None:
        """Handle the ends of flows up to now; every access to transfers begins with this.

        A flow's end is handled at its own time, however late this is called. Only the end of a
        committed transfer requires an event of its own.
        """
        for token in self._links.take_ended(self._timeline.present_s):
            transfer = self._transfers[token]
            transfer.is_moving = False
            if transfer.commit is not None:
                self._ending.discard(token)
                self._send_commit(token)

    def _look_at_end(self) -> None:
        """Schedule a look at the end of the next flow, if a landing waits and none is earlier."""
        if not self._ending:
            return
        at_s = self._links.next_end_s()
        if at_s < self._looking_at_s:
            self._looking_at_s = at_s
            self._timeline.at(max(at_s, self._timeline.present_s), partial(self._on_end, at_s))

    def _on_end(self, looked_for_s: float) -> None:
        if looked_for_s != self._looking_at_s:
            return  # it was looked before
        self._looking_at_s = inf
        self._catch_up()
        self._look_at_end()

    def _send_commit(self, token: int) -> None:
        self._timeline.after(self._latency_s, partial(self._land, token))

    def _land(self, token: int) -> None:
        transfer = self._transfers.get(token)
        if transfer is None:
            return
        port = transfer.target
        assert transfer.commit is not None, "a transfer lands after its commit"
        if port.landings.pop(token, None) is not None:
            port.on_event(Landed(token, transfer.commit))
            self._end(token, None)

    def _fail(self, transfer: _Transfer, error: HandoffFailed) -> None:
        port, token = transfer.target, transfer.ticket.lease_token
        if port.landings.pop(token, None) is not None:
            port.on_event(LandingFailed(token, error))
            port.on_event(Released(token))

    def _end(self, token: int, error: HandoffFailed | None) -> None:
        """End a transfer, if it was begun; its sender hears of it one message later."""
        self._catch_up()
        transfer = self._transfers.pop(token, None)
        if transfer is None:
            return
        self._ending.discard(token)
        self._links.drop(token, self._timeline.present_s)
        self._look_at_end()
        timing = None if error else self._timing(transfer)
        event: KVEvent = TransferEnded(token, error, timing)
        self._timeline.after(self._latency_s, partial(transfer.source.on_event, event))

    def _timing(self, transfer: _Transfer) -> TransferTiming:
        now_s = self._timeline.present_s
        num_blocks = len(transfer.ticket.target_block_ids)
        num_pieces = num_blocks * self._num_layers - transfer.num_missing
        return TransferTiming(
            lease_token=transfer.ticket.lease_token,
            lane="modelled",
            num_bytes=round(num_pieces * self._piece_bytes),
            bytes_hidden=0,
            opened_at_s=transfer.opened_at_s,
            first_sent_at_s=now_s if transfer.first_sent_at_s is None else transfer.first_sent_at_s,
            last_acked_at_s=now_s,
            committed_at_s=now_s,
            ended_at_s=now_s,
        )


class ModelledConnector:
    """One node's connector; see `kv_transfer.contract.KVConnector`."""

    def __init__(self, network: ModelledNetwork, port: Port) -> None:
        self._network = network
        self._port = port

    def expect(self, ticket: Ticket, *, sender_deadline_s: float) -> None:
        """Open a landing."""
        self._network.expect(self._port, ticket)

    def revoke(self, lease_token: int) -> None:
        """Close a landing."""
        self._network.revoke(self._port, lease_token)

    def open(self, ticket: Ticket, *, deadline_s: float, priority: int = 0) -> None:
        """Begin a transfer."""
        self._network.open(self._port, ticket)

    def push(
        self, lease_token: int, *, layer: int, ordinals: Sequence[int], source_blocks: Sequence[int]
    ) -> None:
        """Send one layer of blocks."""
        self._network.push(lease_token, len(ordinals))

    def commit(self, lease_token: int, commit: Commit) -> None:
        """End a transfer whose blocks were all pushed."""
        self._network.commit(lease_token, commit)

    def abort(self, lease_token: int) -> None:
        """Abort a transfer."""
        self._network.abort(lease_token)

    def close(self) -> None:
        """Do nothing: there is no socket to close."""
