"""The nodes of the cluster as this router knows them: membership, and one client per member."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress

from common.errors import NodeLost, PlacementUnavailable
from common.files.keys_folder import Keys
from common.ids import Incarnation
from common.kv.prefix_source import PrefixSource
from common.nodes import NodeRecord, Role
from common.observing.clock import Clock
from common.observing.lasting_failure import LastingFailure
from placement.store import PlacementStore
from protos import pdserve_node_pb2 as pb
from router.core.known.block_reports import BlockReport
from router.core.known.changes import ChangesUnderWay
from router.core.known.member_effects import (
    MembershipEffect,
    NodeDecodes,
    NodeGone,
    NodeHeard,
    NodeLeftOut,
    NodeSuspected,
    NodeTrusted,
    NodeUnlisted,
    StreamLost,
)
from router.core.known.roster import Roster
from router.core.membership import Membership
from router.dispatch.between_nodes import BetweenNodes
from router.dispatch.client.node_clients import UNREACHED, NodeClient
from router.dispatch.client.node_listener import OnOutputs
from router.dispatch.liveness.pace import ALARM_TICKS, WIDE_NODES
from router.dispatch.liveness.silence import LOSS_S, TICK_S
from router.watch.router_metrics import RouterMetrics

log = logging.getLogger("pdserve.router.nodes")

OnNode = Callable[[Incarnation], None]
OnSuspected = Callable[[Incarnation, bool], None]
"""A node, and whether it is heard."""


OnBlocks = Callable[[Incarnation, BlockReport], int]
"""Takes what a node says of its prefix cache; returns how many blocks had no room."""


def tick_all(
    clients: Mapping[Incarnation, NodeClient | None],
    used: Set[Incarnation],
    missed: Set[Incarnation],
    *,
    is_alarm: bool,
) -> None:
    """Tick every client; where there are many, most of them rest.

    `used` are the nodes with requests, `missed` those that are asked often without: all of them if
    `is_alarm`.
    """
    is_wide = len(clients) >= WIDE_NODES
    can_rest = is_wide and not is_alarm
    awake = used | missed
    for node, client in list(clients.items()):
        if client is None or (can_rest and node not in awake and client.liveness.rest()):
            continue
        is_used = not is_wide or node in used
        client.tick(is_wide=is_wide, is_used=is_used, is_alarm=is_alarm or node in missed)


class NodePool:
    """Refreshed from the store every quarter of a lease, and soon after a node was lost."""

    def __init__(
        self,
        store: PlacementStore,
        membership: Membership,
        *,
        lease_s: float,
        clock: Clock,
        metrics: RouterMetrics,
        num_running: Callable[[], int],
        on_outputs: OnOutputs,
        on_blocks: OnBlocks,
        on_lost: Callable[[Incarnation, bool], None],
        on_suspected: OnSuspected,
        on_trusted: OnNode,
        on_decodes: OnNode,
        keys: Keys | None,
    ) -> None:
        self._store = store
        self.membership = membership
        self._keys = keys
        self._refresh_s = lease_s / 4
        self._clock = clock
        self._metrics = metrics
        self._num_running = num_running
        self._on_outputs = on_outputs
        self._on_blocks = on_blocks
        self._on_lost = on_lost
        self._on_suspected = on_suspected
        self._on_trusted = on_trusted
        self._on_decodes = on_decodes
        self._clients: dict[Incarnation, NodeClient | None] = {}
        """None: it could not be made, and is tried again."""
        self._between = BetweenNodes(self.client, membership, clock)
        self._alarm_ticks = 0
        """The ticks for which all nodes are asked often, because one fell silent."""
        self._should_refresh = asyncio.Event()
        self._closing: set[asyncio.Task[None]] = set()
        self._all_heard = asyncio.Event()
        self.changes = ChangesUnderWay()
        self._store_failing = LastingFailure(clock)
        self.store_error = ""
        """Why the placement store did not answer when it was asked last; '' where it did."""

    @property
    def is_store_away(self) -> bool:
        """Whether the placement store did not answer when it was asked last."""
        return self.membership.is_store_away

    def nodes(self) -> Roster:
        """Return the nodes that can be chosen now, until the next event."""
        return self.membership.nodes()

    def client(self, node: Incarnation) -> NodeClient | None:
        """Return the client of a node; None when the node is no member any more."""
        return self._clients.get(node)

    def source_that_sends(self, source: PrefixSource | None) -> PrefixSource | None:
        """Return the source unless its node cannot be asked for cached blocks by their hashes."""
        client = None if source is None else self.client(source.node)
        return source if client is not None and client.calls.sends_blocks else None

    async def set_role(
        self,
        node: Incarnation,
        role: Role,
        *,
        number: int = 0,
        others: Sequence[str] | None = None,
    ) -> Role:
        """Change the role of a node for new work; return the one that it had until now.

        It finishes the requests that it has. The role that it already has is accepted. When this
        returns, the store and this router know it; other routers learn it from the store. Which
        roles a node can be given says `NodeRecord.can_become`. `number` is that of a change that
        the placement store allowed the leader; 0: a person asks. One of `others` must stay in
        another role than `role`; None: nobody has to.

        Raises `InvalidRequest` where the node cannot have the role, `Draining` when it leaves,
        `LastInRole` where none of `others` stays, `PlacementUnavailable` where the node cannot ask
        the store for that, `StaleEpoch` when it has restarted or was told a higher number, and
        `NodeLost` or `DeadlineExceeded` when it has left or does not answer.
        """
        client = self._client_of(node)
        with self.changes.of_role():
            earlier = await client.beside.set_role(role, number, others)
        self._perform(self.membership.on_role(node, role))
        self._should_refresh.set()
        return earlier

    async def drain(self, node: Incarnation) -> float:
        """Ask a node to leave; return the seconds that it gives to running requests.

        Raises `NodeLost` when it has left, or the typed error of the failed call.
        """
        client = self._client_of(node)
        with self.changes.of_leaving(self.nodes(), node):
            timeout_s = await client.beside.drain()
        self._should_refresh.set()
        return timeout_s

    def _client_of(self, node: Incarnation) -> NodeClient:
        client = self.client(node)
        if client is None:
            raise NodeLost(f"{node} has left")
        return client

    def is_member(self, node: Incarnation) -> bool:
        """Return whether a node may be heard, now or again."""
        return node in self._clients

    async def run(self, router: Incarnation) -> None:
        """Refresh, and watch the nodes, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.watch_silence(), name="silence of nodes")
            while True:
                await self.refresh(router)
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._refresh_s):
                        await self._should_refresh.wait()
                    self._should_refresh.clear()

    async def watch_silence(self) -> None:
        """Tick every client; one that the store misses is asked often. One task for all: a
        thousand timers cost more."""
        while True:
            await asyncio.sleep(TICK_S)
            is_alarm, self._alarm_ticks = self._alarm_ticks > 0, max(0, self._alarm_ticks - 1)
            members = self.membership
            tick_all(self._clients, members.used, members.last_unlisted, is_alarm=is_alarm)

    def _open_clients(self) -> list[NodeClient]:
        return [client for client in self._clients.values() if client is not None]

    async def refresh(self, router: Incarnation) -> None:
        """Ask the store once, then open and close clients to match."""
        self.membership.on_asking()
        try:
            listing = await self._store.live_nodes()
        except PlacementUnavailable as away:
            self.store_error = str(away)
            if self._store_failing.is_news():
                log.warning("the placement store is away, going on without: %s", away)
            self._metrics.store_errors.labels("live_nodes").inc()
            effects = self.membership.on_store_away(self._clock.now_s())
        else:
            self.store_error = ""
            if self._store_failing.end():
                log.info("the placement store is back")
            effects = self.membership.on_listing(listing, self._clock.now_s())
        self._perform(effects)
        self._match_clients(router)
        self._check_all_heard()
        while self.membership.has_unread:
            self.nodes()
            await asyncio.sleep(0)
        self._between.warm()
        self._count_nodes()

    async def wait_heard(self) -> None:
        """Return when the store was asked, and every node that it listed then was heard or left."""
        await self._all_heard.wait()

    async def wait_for_nodes(self, unless: asyncio.Event) -> None:
        """Return when every node there is was heard, or `unless` is set. A silent one is waited for
        as long as it takes to lose one.

        A request before that would find fewer nodes than there are, or none.
        """
        tasks = {asyncio.create_task(one) for one in (self.wait_heard(), unless.wait())}
        await asyncio.wait(tasks, timeout=LOSS_S, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()

    async def close(self) -> None:
        """Close every client."""
        clients, self._clients = self._open_clients(), {}
        await asyncio.gather(*(client.close() for client in clients), *self._closing)

    async def wait_sent(self) -> None:
        """Return when every node has what is queued for it."""
        await asyncio.gather(*(client.calls.wait_sent() for client in self._open_clients()))

    # NodeListener

    @property
    def num_running(self) -> int:
        """Requests in progress, on whatever node."""
        return self._num_running()

    def on_heard(self, node: Incarnation, stuck_s: float, *, is_reached: bool) -> None:
        """Handle a message of a node's stream; see `NodeListener`."""
        unreached = "" if is_reached else UNREACHED
        self._perform(self.membership.on_heard(node, stuck_s=stuck_s, unreached=unreached))

    def on_blocks(self, node: Incarnation, report: BlockReport) -> None:
        """Take blocks that entered or left the node's prefix cache."""
        num_dropped = self._on_blocks(node, report)
        if num_dropped:
            self._metrics.blocks_dropped.inc(num_dropped)

    def on_for_others(self, node: Incarnation, message: pb.NodeMessage) -> None:
        """Pass on what is for other nodes; see `NodeListener`."""
        self._between.take(node, message)

    def on_suspected(self, node: Incarnation, reason: str, *, is_heard: bool) -> None:
        """Take the suspicion that a node is gone or hangs, or is heard and not reached: others are
        chosen if there are any. What silences one node may silence others: idle ones are asked."""
        if not is_heard:
            self._alarm_ticks = ALARM_TICKS
        self._perform(self.membership.on_suspected(node, reason, is_heard=is_heard))

    def on_lost(self, node: Incarnation, reason: str) -> None:
        """Take the end of a stream: the store's next listing shows whether the node has left."""
        self._between.on_lost(node)
        self._perform(self.membership.on_lost(node, reason))

    def _perform(self, effects: Sequence[MembershipEffect]) -> None:
        for effect in effects:
            match effect:
                case NodeLeftOut(node, reason):
                    log.warning("%s is left out: %s", node, reason)
                case NodeHeard(node, was_lost):
                    if was_lost:
                        log.info("%s is heard again", node)
                    self._check_all_heard()
                case NodeTrusted(node, was_suspected):
                    if was_suspected:
                        log.info("%s is trusted again", node)
                    self._between.warm()
                    self._on_trusted(node)
                case NodeDecodes(node):
                    self._on_decodes(node)
                case NodeSuspected(node, reason, is_heard, was_trusted):
                    self._metrics.nodes_suspected.inc(was_trusted)
                    log.warning("%s is suspected: %s", node, reason)
                    self._on_suspected(node, is_heard)
                case StreamLost(node, is_orderly):
                    self._on_lost(node, is_orderly)
                    self._should_refresh.set()
                case NodeGone(node, _, True):
                    log.info("%s has left: it ended the stream", node)
                    self._metrics.nodes_left.inc()
                case NodeGone(node, reason):
                    log.warning("lost %s: %s", node, reason)
                    self._metrics.nodes_lost.inc()
                case NodeUnlisted(node):
                    log.warning("%s is heard, but the placement store does not list it", node)

    def _match_clients(self, router: Incarnation) -> None:
        wanted = {record.incarnation: record for record in self.membership.records()}
        for node in self._clients.keys() - wanted.keys():
            client = self._clients.pop(node)
            if client is not None:
                log.info("%s is forgotten", node)
                task = asyncio.create_task(self._close(node, client))
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)
        for node, record in wanted.items():
            if self._clients.get(node) is None:
                self._connect(record, router)

    async def _close(self, node: Incarnation, client: NodeClient) -> None:
        """Close the client of one that is no member any more; its stream may be in order, and
        brings reports until it ends. No request is on it: histories check that."""
        await client.close()
        self._between.on_lost(node)
        if node not in self._clients:
            self._on_lost(node, True)

    def _connect(self, record: NodeRecord, router: Incarnation) -> None:
        """Open a client. A bad record of one node keeps no other node out."""
        node = record.incarnation
        try:
            client = NodeClient(
                record, router, self, self._on_outputs, clock=self._clock, keys=self._keys
            )
        except Exception:
            if node not in self._clients:
                log.exception("%s at %r cannot be called", node, record.control_address)
                self._clients[node] = None
            return
        log.info("%s joined: %s at %s", node, record.role.value, record.control_address)
        self._clients[node] = client
        client.start()

    def _check_all_heard(self) -> None:
        if self._all_heard.is_set():
            return
        clients = self._clients.items()
        if all(client is None or self.membership.was_heard(node) for node, client in clients):
            self._all_heard.set()

    def _count_nodes(self) -> None:
        self._metrics.unlisted_nodes.set(len(self.membership.unlisted()))
        kinds = self.nodes().kinds()
        for role in (Role.PREFILL, Role.DECODE, Role.MIXED):
            num_nodes = sum(kind.num_nodes for kind in kinds if kind.record.role is role)
            self._metrics.nodes.labels(role.value).set(num_nodes)
