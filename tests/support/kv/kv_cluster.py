"""Nodes on one network, over each connector."""

from __future__ import annotations

import itertools
import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from common.errors import HandoffFailed
from common.ids import AttemptId, Incarnation
from common.kv.kv_layout import KVLayout
from common.observing.clock import Clock
from kv_transfer.connector.shell import TransportConnector
from kv_transfer.contract import (
    Commit,
    ConnectorEvent,
    ConnectorFailed,
    KVEvent,
    Landed,
    LandingFailed,
    OnEvent,
    Released,
    Ticket,
    TransferEnded,
)
from kv_transfer.lanes.pool_memory import Bytes
from kv_transfer.shared.lanes import VERIFY_AUTO
from kv_transfer.shared.limits import DEFAULT_PEER_TIMEOUT_S, MAX_WAIT_S
from tests.support.clocks.manual_clock import ManualClock
from tests.support.clocks.stall_free_clock import StallFreeClock
from tests.support.kv.kinds import KINDS, MORE_KINDS, Kind, NodeOptions

LAYOUT = KVLayout(
    model_digest="m", num_layers=3, num_kv_heads=2, head_dim=8, block_size=4, dtype="float32"
)
PAIR_BYTES = 2 * LAYOUT.piece_bytes
# Two blocks per frame, five in flight: the handoffs of the suite meet both bounds.
WINDOW_BYTES = 5 * PAIR_BYTES
WAIT_S = 60.0
"""Only against waiting forever: on a loaded machine a thread may wait for a core for seconds."""
NO_LEASE = 0
TIME_STEP_S = 0.02


def wait_until(is_so: Callable[[], object], meanwhile: Callable[[], object] = lambda: None) -> None:
    """Return when something has happened; `meanwhile` is done again and again."""
    ends_at_s = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < ends_at_s, f"not within {WAIT_S:g} s"
        meanwhile()
        time.sleep(0.001)


@dataclass
class Node:
    """A connector with its pool and the events it emitted, in order."""

    incarnation: Incarnation
    pool: Bytes
    connector: TransportConnector
    layout: KVLayout
    events: list[KVEvent] = field(default_factory=list)
    inbox: queue.Queue[KVEvent] = field(default_factory=queue.Queue)
    # What ended the connector, and how many events had come before.
    failures: list[tuple[BaseException, int]] = field(default_factory=list)
    host: Bytes | None = None
    """What it sends from beside its pool."""

    def wait_event(self) -> KVEvent:
        return self.inbox.get(timeout=WAIT_S)

    def lease_ends_at_s(self, lease_token: int) -> float:
        """Return when an open landing ends unless its sender is heard."""
        landing = self.connector.receiving.machine.landings.get(lease_token)
        assert landing is not None
        return landing.expires_at_s

    def look_at_the_time(self) -> None:
        """Wake the connector's thread, which then does what is due."""
        self.connector.revoke(NO_LEASE)

    def have_seen_the_time(self) -> None:
        """Return when the connector's thread has done what is due now: after some milliseconds."""
        ends = self.connector.num_turns + 2  # the turn under way may have looked before
        wait_until(lambda: self.connector.num_turns >= ends, self.look_at_the_time)

    def pass_time_until(self, is_so: Callable[[], object], clock: ManualClock) -> None:
        """Advance the clock in small steps, as for a process that is not suspended."""

        def step() -> None:
            clock.advance(TIME_STEP_S)
            self.look_at_the_time()

        wait_until(is_so, step)

    def wait_failed(self) -> HandoffFailed:
        """Return why a landing failed, once its blocks are released too."""
        error = error_of(failed := self.wait_event())
        assert self.wait_event() == Released(failed.lease_token)
        return error

    def assert_books_are_empty(self) -> None:
        """Check that nothing is open and nothing is held: every block is its owner's again."""
        statistics = self.connector.statistics()
        assert statistics.transfers_open == 0
        assert statistics.landings_open == 0
        assert statistics.blocks_quarantined == 0
        assert statistics.measured.num_open == 0

    def push_all(
        self,
        ticket: Ticket,
        source_blocks: Sequence[int],
        layers: Sequence[int] | None = None,
    ) -> None:
        for layer in range(self.layout.num_layers) if layers is None else layers:
            self.connector.push(
                ticket.lease_token,
                layer=layer,
                ordinals=range(len(source_blocks)),
                source_blocks=source_blocks,
            )


class Cluster:
    """Makes nodes of one kind of connector, and closes them."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.nodes: list[Node] = []
        # Both sides are in this process: where it stalls, neither is dead. A test in which somebody
        # is silent lets a `ManualClock` pass: how fast the other side is then decides nothing.
        self.clock = StallFreeClock(MAX_WAIT_S)
        self._tokens = itertools.count(101)

    @property
    def lane(self) -> str:
        """Return the lane that its pairs agree on."""
        return self.kind.lane

    def node(
        self,
        name: str,
        *,
        epoch: int = 1,
        layout: KVLayout = LAYOUT,
        window_bytes: int = WINDOW_BYTES,
        peer_timeout_s: float = DEFAULT_PEER_TIMEOUT_S,
        num_blocks: int = 12,
        num_host_blocks: int = 0,
        verify: str = VERIFY_AUTO,
        on_event: OnEvent | None = None,
        clock: Clock | None = None,
    ) -> Node:
        incarnation = Incarnation(name, epoch)
        rng = np.random.default_rng(len(self.nodes))
        pool = self.kind.pool(layout, num_blocks)
        pool[:] = rng.integers(0, 256, pool.shape, dtype=np.uint8)
        host = self.kind.beside(layout, num_host_blocks) if num_host_blocks else None
        if host is not None:
            host[:] = rng.integers(0, 256, host.shape, dtype=np.uint8)
        events: list[KVEvent] = []
        inbox: queue.Queue[KVEvent] = queue.Queue()
        failures: list[tuple[BaseException, int]] = []

        def take(event: ConnectorEvent) -> None:
            if isinstance(event, ConnectorFailed):
                failures.append((event.error, len(events)))
                return
            events.append(event)
            inbox.put(event)

        options = NodeOptions(
            layout=layout,
            incarnation=incarnation,
            window_bytes=window_bytes,
            peer_timeout_s=peer_timeout_s,
            verify=verify,
            clock=clock or self.clock,
            host=host,
        )
        connector = self.kind.connector(pool, options, on_event or take)
        self.nodes.append(Node(incarnation, pool, connector, layout, events, inbox, failures, host))
        return self.nodes[-1]

    def ticket(
        self, decode: Node, target_blocks: Sequence[int], *, num_cached_tokens: int = 0
    ) -> Ticket:
        token = next(self._tokens)
        return Ticket(
            attempt=AttemptId(f"r{token}", 0),
            decode_node=decode.incarnation,
            kv_endpoint=decode.connector.endpoint,
            lease_token=token,
            generation=7,
            target_block_ids=tuple(target_blocks),
            num_cached_tokens=num_cached_tokens,
            fingerprint=decode.layout.fingerprint,
            lease_s=30.0,
        )

    def silent_endpoint(self) -> str:
        """Return an endpoint that accepts connections and never sends."""
        return self.kind.silent_endpoint()

    def close(self) -> None:
        for node in self.nodes:
            node.connector.close()
        self.kind.close()


def cluster_of(kind: str) -> Cluster:
    return Cluster((KINDS | MORE_KINDS)[kind]())


def commit_for(ticket: Ticket, layout: KVLayout = LAYOUT, *, missing: int = 0) -> Commit:
    """Return the commit of a prompt whose last block lacks `missing` tokens."""
    num_new = len(ticket.target_block_ids) * layout.block_size - missing
    return Commit(
        num_tokens=ticket.num_cached_tokens + num_new, first_token_id=42, draft_token_ids=(5, 6)
    )


def begin(
    cluster: Cluster, *, targets: tuple[int, ...] = (1, 2, 3), clock: Clock | None = None
) -> tuple[Node, Node, Ticket]:
    """Expect and open a handoff between two new nodes, both on `clock` where one is given."""
    prefill, decode = (cluster.node(name, clock=clock) for name in "pd")
    ticket = cluster.ticket(decode, targets)
    decode.connector.expect(ticket, sender_deadline_s=30)
    prefill.connector.open(ticket, deadline_s=30)
    return prefill, decode, ticket


def error_of(event: object) -> HandoffFailed:
    assert isinstance(event, TransferEnded | LandingFailed)
    assert isinstance(event.error, HandoffFailed)
    return event.error


def send(prefill: Node, decode: Node, ticket: Ticket, source_blocks: Sequence[int]) -> None:
    """Start a whole handoff."""
    decode.connector.expect(ticket, sender_deadline_s=30)
    prefill.connector.open(ticket, deadline_s=30)
    prefill.push_all(ticket, source_blocks)
    prefill.connector.commit(ticket.lease_token, commit_for(ticket, prefill.layout))


_ENDINGS = ([Landed], [LandingFailed, Released], [Released])


def endings(node: Node) -> dict[int, list[type[KVEvent]]]:
    """Return the kinds of events of each lease, in order."""
    kinds: dict[int, list[type[KVEvent]]] = {}
    for event in list(node.events):
        kinds.setdefault(event.lease_token, []).append(type(event))
    return kinds


def assert_ended_once(*nodes: Node) -> None:
    """Check that each handoff ended once, and late calls and `close` add no event."""
    before = [list(node.events) for node in nodes]
    for node in nodes:
        node.assert_books_are_empty()
        for token, kinds in endings(node).items():
            assert kinds == [TransferEnded] or kinds in _ENDINGS
            node.connector.push(token, layer=0, ordinals=[0], source_blocks=[0])
            node.connector.abort(token)
            node.connector.revoke(token)
        node.connector.close()
        node.connector.close()
    assert [node.events for node in nodes] == before
