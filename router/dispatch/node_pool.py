"""The nodes of the cluster as this router knows them: membership, and one client per member."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress

from common.files.keys_folder import Keys
from common.ids import Incarnation
from common.nodes import NodeRecord, Role
from common.observing.clock import Clock
from common.request import RequestOutput
from common.version import PROTOCOL_VERSION, can_speak
from placement.store import LiveNode, PlacementStore, PlacementUnavailable
from router.core.membership import MAX_NODES, Membership
from router.core.policies.query import NodeView
from router.dispatch.node_clients import UNREACHED, NodeClient
from router.dispatch.node_listener import ENDED_BY_NODE
from router.dispatch.silence import TICK_S
from router.watch.router_metrics import RouterMetrics

log = logging.getLogger("pdserve.router.nodes")

OnOutputs = Callable[[Incarnation, Sequence[RequestOutput]], None]
OnNode = Callable[[Incarnation], None]
OnSuspected = Callable[[Incarnation, bool], None]
"""A node, and whether it is heard."""


class NodePool:
    """Refreshed from the store every quarter of a lease, and soon after a node was lost.

    Nodes that serve another model than `model`, or speak a protocol that this router does not, are
    left out.
    """

    def __init__(
        self,
        store: PlacementStore,
        *,
        model: str,
        lease_s: float,
        clock: Clock,
        metrics: RouterMetrics,
        num_running: Callable[[], int],
        on_outputs: OnOutputs,
        on_lost: OnNode,
        on_suspected: OnSuspected,
        on_trusted: OnNode,
        keys: Keys | None = None,
    ) -> None:
        self._store = store
        self._keys = keys
        self._model = model
        self._refresh_s = lease_s / 4
        self._clock = clock
        self._metrics = metrics
        self._num_running = num_running
        self._on_outputs = on_outputs
        self._on_lost = on_lost
        self._on_suspected = on_suspected
        self._on_trusted = on_trusted
        self._suspected: dict[Incarnation, bool] = {}
        """Whether each of them is heard."""
        self._gone: dict[Incarnation, str] = {}
        self._lost: set[Incarnation] = set()
        self._foreign_nodes: dict[Incarnation, str] = {}
        self._other_protocols: dict[Incarnation, int] = {}
        self._unusable: set[Incarnation] = set()
        self._clients: dict[Incarnation, NodeClient] = {}
        self._should_refresh = asyncio.Event()
        self._closing: set[asyncio.Task[None]] = set()
        self._unheard: set[Incarnation] = set()
        self._unlisted: set[Incarnation] = set()
        self._all_heard = asyncio.Event()
        self.membership = Membership(lease_s=lease_s)

    @property
    def other_models(self) -> list[str]:
        """The models of the nodes that are left out, ordered."""
        return sorted(set(self._foreign_nodes.values()))

    def nodes(self) -> list[NodeView]:
        """Return the nodes that can be chosen now."""
        return self.membership.nodes()

    def client(self, node: Incarnation) -> NodeClient | None:
        """Return the client of a node; None when the node is no member any more."""
        return self._clients.get(node)

    async def run(self, router: Incarnation) -> None:
        """Refresh, and watch the nodes, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch(), name="silence of nodes")
            while True:
                await self.refresh(router)
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._refresh_s):
                        await self._should_refresh.wait()
                    self._should_refresh.clear()

    async def _watch(self) -> None:
        """Tick every client. One task for all: a thousand timers cost more."""
        while True:
            await asyncio.sleep(TICK_S)
            for client in list(self._clients.values()):
                client.tick()

    async def refresh(self, router: Incarnation) -> None:
        """Ask the store once, then open and close clients to match."""
        gone, self._gone = self._gone, {}
        try:
            listing = await self._store.live_nodes()
        except PlacementUnavailable as away:
            if not self.membership.is_store_away:
                log.warning("the placement store is away, going on without: %s", away)
            self._metrics.store_errors.labels("live_nodes").inc()
            self.membership.on_store_away(self._clock.now_s())
            self._count_gone(gone, None)
        else:
            if self.membership.is_store_away:
                log.info("the placement store is back")
            ours = self._of_this_protocol(self._of_this_model(listing))
            now_s = self._clock.now_s()
            unusable = self._foreign_nodes.keys() | self._other_protocols.keys()
            self.membership.on_listing(ours, now_s, unusable=unusable)
            self._count_gone(gone, {node.record.incarnation for node in listing})
        self._match_clients(router)
        self._count_nodes()
        self._log_unlisted()
        self._check_all_heard()

    async def wait_heard(self) -> None:
        """Return when the store was asked, and every node that it listed then was heard or left."""
        await self._all_heard.wait()

    async def close(self) -> None:
        """Close every client."""
        clients, self._clients = list(self._clients.values()), {}
        await asyncio.gather(*(client.close() for client in clients), *self._closing)

    async def wait_sent(self) -> None:
        """Return when every node has what is queued for it."""
        await asyncio.gather(*(client.wait_sent() for client in self._clients.values()))

    # NodeListener

    @property
    def num_running(self) -> int:
        """Requests in progress, on whatever node."""
        return self._num_running()

    def on_heard(
        self,
        node: Incarnation,
        outputs: list[RequestOutput],
        stuck_s: float,
        *,
        is_reached: bool,
    ) -> None:
        """Take a message of a node's stream; see `NodeListener`."""
        self.membership.on_heard(node)
        is_new = node in self._lost or node in self._unheard
        if is_new:
            self._welcome(node)
        if stuck_s:
            self.on_suspected(node, f"its step has lasted {stuck_s:g} s", is_heard=False)
        elif not is_reached:
            self.on_suspected(node, UNREACHED, is_heard=True)
        elif is_new or node in self._suspected:
            self._trust(node)
        self._on_outputs(node, outputs)

    def _welcome(self, node: Incarnation) -> None:
        """Take the first message of a stream."""
        if node in self._lost:
            log.info("%s is heard again", node)
        self._lost.discard(node)
        self._unheard.discard(node)
        self._check_all_heard()

    def _trust(self, node: Incarnation) -> None:
        """Take a message of a node that was new or suspected: it makes progress."""
        if node in self._suspected:
            log.info("%s is trusted again", node)
            del self._suspected[node]
        self._on_trusted(node)

    def on_suspected(self, node: Incarnation, reason: str, *, is_heard: bool) -> None:
        """Take the suspicion that a node is gone or hangs, or is heard and not reached: others are
        chosen if there are any."""
        self.membership.on_suspected(node)
        if self._suspected.get(node) is is_heard:
            return
        if node not in self._suspected:
            self._metrics.nodes_suspected.inc()
        self._suspected[node] = is_heard
        log.warning("%s is suspected: %s", node, reason)
        self._on_suspected(node, is_heard)

    def on_lost(self, node: Incarnation, reason: str) -> None:
        """Take the end of a stream: the store's next listing shows whether the node has left."""
        self.membership.on_lost(node)
        self._suspected.pop(node, None)
        self._gone[node] = reason
        self._lost.add(node)
        self._on_lost(node)
        self._should_refresh.set()

    def _count_gone(
        self, gone: Mapping[Incarnation, str], listed: Collection[Incarnation] | None
    ) -> None:
        """Count lost and left nodes. One that left in order was unlisted before its stream ended;
        `listed` None: the store is away."""
        for node, reason in gone.items():
            if reason == ENDED_BY_NODE and listed is not None and node not in listed:
                log.info("%s has left: it ended the stream", node)
                self._metrics.nodes_left.inc()
            else:
                log.warning("lost %s: %s", node, reason)
                self._metrics.nodes_lost.inc()

    def _of_this_model(self, listing: Sequence[LiveNode]) -> list[LiveNode]:
        foreign = {
            node.record.incarnation: node.record.model
            for node in listing[:MAX_NODES]
            if node.record.role is not Role.ROUTER and node.record.model != self._model
        }
        for node, model in foreign.items():
            if node not in self._foreign_nodes:
                log.warning("%s is left out: it serves %s, not %s", node, model, self._model)
        self._foreign_nodes = foreign
        return [node for node in listing if node.record.model == self._model]

    def _of_this_protocol(self, listing: Sequence[LiveNode]) -> list[LiveNode]:
        others = {
            node.record.incarnation: node.record.protocol
            for node in listing[:MAX_NODES]
            if not can_speak(node.record.protocol)
        }
        for node, protocol in others.items():
            if node not in self._other_protocols:
                log.warning(
                    "%s is left out: its protocol version is %d, this router's %d",
                    node,
                    protocol,
                    PROTOCOL_VERSION,
                )
        self._other_protocols = others
        return [node for node in listing if can_speak(node.record.protocol)]

    def _match_clients(self, router: Incarnation) -> None:
        wanted = {record.incarnation: record for record in self.membership.records()}
        self._unheard &= wanted.keys()
        for node in self._clients.keys() - wanted.keys():
            log.info("%s is forgotten", node)
            task = asyncio.create_task(self._clients.pop(node).close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        self._unusable &= wanted.keys()
        self._lost &= wanted.keys()
        self._suspected = {node: it for node, it in self._suspected.items() if node in wanted}
        for node, record in wanted.items():
            if node not in self._clients:
                self._connect(record, router)

    def _connect(self, record: NodeRecord, router: Incarnation) -> None:
        """Open a client. A bad record of one node keeps no other node out."""
        node = record.incarnation
        try:
            client = NodeClient(record, router, self, keys=self._keys)
        except Exception:
            if node not in self._unusable:
                log.exception("%s at %r cannot be called", node, record.control_address)
                self._unusable.add(node)
            return
        self._unusable.discard(node)
        log.info("%s joined: %s at %s", node, record.role.value, record.control_address)
        self._clients[node] = client
        self._unheard.add(node)
        client.start()

    def _log_unlisted(self) -> None:
        unlisted = set(self.membership.unlisted())
        for node in sorted(unlisted - self._unlisted):
            log.warning("%s is heard, but the placement store does not list it", node)
        self._unlisted = unlisted
        self._metrics.unlisted_nodes.set(len(unlisted))

    def _check_all_heard(self) -> None:
        if not self._unheard:
            self._all_heard.set()

    def _count_nodes(self) -> None:
        nodes = self.nodes()
        for role in (Role.PREFILL, Role.DECODE, Role.MIXED):
            num_nodes = sum(node.record.role is role for node in nodes)
            self._metrics.nodes.labels(role.value).set(num_nodes)
