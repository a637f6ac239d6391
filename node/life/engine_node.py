"""A running engine node: its parts made in order, supervised, and stopped in reverse order."""

from __future__ import annotations

import asyncio
import logging
import socket
from functools import partial

from prometheus_client import CollectorRegistry

from common.addresses import host_port
from common.errors import InternalError, StaleEpoch
from common.ids import Incarnation
from common.observing.logs import name_node
from common.settings.config import Config
from http_serving.process_metrics import process_registry
from node.control.control_port import ControlPort
from node.control.drain import NodeDrain
from node.control.role import NodeRole
from node.flow.inbox import Inbox
from node.flow.messages import RoleChanged
from node.flow.step_progress import expected_token_s
from node.life.lease_keeper import RENEWALS_PER_LEASE, LeaseKeeper, refuse_second_life
from node.life.model_loading import load_unless_stopped, wait_unless_stopped
from node.life.node_parts import LoadedModel, NodeConnector, NodeParts
from node.life.possible_roles import refused_roles
from node.life.request_path import RequestPath
from node.life.self_description import advertised_host, log_loaded_model, node_records
from node.life.step_thread import StepThread
from node.watch.metrics import (
    LeaseCollector,
    MemoryCollector,
    SavedPrefillCollector,
    register_node,
)
from node.watch.metrics_server import MetricsServer, bind_metrics
from placement.first_answer import wait_for_store

log = logging.getLogger("pdserve.node")

# Together less than what `pdserve up` waits before it kills.
STEP_GRACE_S = 6.0
STREAMS_GRACE_S = 2.0
DISK_GRACE_S = 0.5


class EngineNode:
    """One prefill, decode or mixed node."""

    def __init__(self, config: Config, parts: NodeParts) -> None:
        self._config = config
        self._parts = parts
        self._exit_code = 0
        self._why_not_serving = "loading the model"

    async def run(
        self,
        stop: asyncio.Event,
        drain: asyncio.Event | None = None,
        told_to_end: asyncio.Event | None = None,
    ) -> int:
        """Serve until `stop` is set; return the exit code, which is 1 after a crash or a stall.

        `drain`, which a router's call sets as well, ends the node in order (`node.control.drain`).
        `told_to_end` is set with the first signal. With `stay_drained` a node that a router drained
        waits for it, alive and not ready: an orchestrator would restart a process that ends.

        Raises `ConfigError`, `CheckpointError` or `PlacementForbidden` when it cannot start.
        """
        server, keys = self._config.server, self._parts.keys
        # Bound first: a port in use is reported before a model is loaded.
        control = ControlPort(server.host, server.port, keys)
        with bind_metrics(server.host, server.metrics_port) as listener:
            leaving = NodeDrain(drain or asyncio.Event(), timeout_s=server.drain_timeout_s)
            role = NodeRole(self._config.role, leaving, refused_roles(self._config))
            registry = process_registry(lambda: role.current, keys)
            # Started first: probes are answered while the model is loaded.
            metrics = MetricsServer(
                registry,
                listener,
                lambda: self._why_not_serving or ("draining" if leaving.is_on else ""),
                token=keys.metrics_token if keys else "",
            )
            metrics.start()
            try:
                metrics_port = listener.getsockname()[1]
                await self._load_and_serve(control, registry, metrics_port, stop, leaving, role)
                if told_to_end and self._stays_drained(stop, leaving):
                    log.info("drained; the process stays until SIGTERM")
                    self._why_not_serving = "drained"
                    await told_to_end.wait()
            finally:
                await metrics.stop()
        return self._exit_code

    async def _load_and_serve(
        self,
        control: ControlPort,
        registry: CollectorRegistry,
        metrics_port: int,
        stop: asyncio.Event,
        leaving: NodeDrain,
        role: NodeRole,
    ) -> None:
        """Load the model, unless the node is told to end before, and serve it until the end."""
        self._why_not_serving = "waiting for the placement store"
        new_incarnation = self._new_incarnation(control.port)
        incarnation = await wait_unless_stopped(new_incarnation, stop, leaving.requested)
        if incarnation is None:
            return
        self._why_not_serving = "loading the model"
        name_node(incarnation.node_id)
        log.info("%s loads %s", incarnation, self._config.model.model)
        model = await load_unless_stopped(self._load_model, stop, leaving.requested)
        if model is None:
            return
        log_loaded_model(self._config, model)
        inbox = Inbox(max_requests=self._config.handoff.max_queued_requests)
        connector = self._parts.make_connector(model, incarnation, inbox.put)
        try:
            path = RequestPath(
                self._config, self._parts, incarnation, model, connector, inbox, leaving, role
            )
            _register_metrics(registry, model, path, connector)
            ports = (control.port, metrics_port)
            records = node_records(self._config, model, incarnation, ports, role.possible)
            keeper = LeaseKeeper(
                self._parts.store,
                lambda: records[role.current],
                path.load,
                lease_s=self._config.placement.node_lease_s,
                clock=self._parts.clock,
            )
            role.on_change(
                lambda: inbox.put(RoleChanged()),
                keeper.renew,
                lambda claimed, others: keeper.claim(records[claimed], others),
            )
            registry.register(LeaseCollector(keeper.failures))
            await self._serve(control, path, keeper, inbox, stop, leaving)
        finally:
            await asyncio.to_thread(connector.close)

    async def _serve(
        self,
        control: ControlPort,
        path: RequestPath,
        keeper: LeaseKeeper,
        inbox: Inbox,
        stop: asyncio.Event,
        leaving: NodeDrain,
    ) -> None:
        """Start the parts, wait for the node's end, and stop them: the lease goes first."""
        await control.serve(path.service)
        step_thread = path.start_step_thread(on_crash=partial(self._crash, stop))
        self._why_not_serving = ""
        try:
            await self._wait_for_end(step_thread, path, keeper, inbox, stop, leaving)
        finally:
            self._why_not_serving = "stopping"
            await keeper.leave()
            await step_thread.stop(STEP_GRACE_S)
            path.close_recording()
            path.end_streams("the node ends by a fault" if self._exit_code else "")
            await control.stop(STREAMS_GRACE_S)
            await path.close_disk(DISK_GRACE_S)

    async def _wait_for_end(
        self,
        step_thread: StepThread,
        path: RequestPath,
        keeper: LeaseKeeper,
        inbox: Inbox,
        stop: asyncio.Event,
        leaving: NodeDrain,
    ) -> None:
        """Keep the lease until the node is stopped, has drained, hangs or loses its lease."""
        renewal = asyncio.create_task(keeper.run())
        stall = asyncio.create_task(step_thread.wait_for_stall(path.progress))
        hang = asyncio.create_task(path.wait_for_hung_connector())
        stopping = asyncio.create_task(stop.wait())
        draining = asyncio.create_task(leaving.run(inbox, keeper.renew_soon))
        tasks = (renewal, stall, hang, stopping, draining)
        log.info("ready")
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        # Awaited, so that no late heartbeat restores the lease after the node has left.
        await asyncio.gather(*tasks, return_exceptions=True)
        if stall in done or hang in done:
            self._exit_code = 1
        if renewal in done:
            self._exit_code = 1
            error = renewal.exception()
            if not isinstance(error, StaleEpoch):
                raise error or InternalError("the lease keeper ended by itself")

    def _stays_drained(self, stop: asyncio.Event, leaving: NodeDrain) -> bool:
        has_drained = leaving.is_on and not stop.is_set() and self._exit_code == 0
        return has_drained and self._config.server.stay_drained

    def _crash(self, stop: asyncio.Event) -> None:
        self._exit_code = 1
        stop.set()

    async def _new_incarnation(self, port: int) -> Incarnation:
        server = self._config.server
        role = self._config.role.value
        node_id = server.node_id or f"{role}-{socket.gethostname()}-{port}"
        lease_s, clock = self._config.placement.node_lease_s, self._parts.clock
        asked_at_s = clock.now_s()
        epoch = await wait_for_store(partial(self._parts.store.next_epoch, node_id))
        await refuse_second_life(
            self._parts.store,
            node_id,
            host_port(advertised_host(server), port),
            lease_s=lease_s,
            clock=clock,
            was_away=clock.now_s() - asked_at_s > lease_s / RENEWALS_PER_LEASE,
        )
        return Incarnation(node_id, epoch)

    def _load_model(self) -> LoadedModel:
        log.info("loading")
        model = self._parts.load_model()
        log.info("warming up")
        model.warm_up()
        return model


def _register_metrics(
    registry: CollectorRegistry, model: LoadedModel, path: RequestPath, connector: NodeConnector
) -> None:
    """Add the metrics of a node with its model, its requests and its KV transfers."""
    register_node(
        registry,
        path.statistics,
        path.refusals,
        connector.statistics,
        path.progress,
        model.grammar_statistics,
    )
    token_s = expected_token_s(model.step_costs)
    block_size, block_bytes = model.layout.block_size, model.layout.block_bytes
    registry.register(
        SavedPrefillCollector(path.statistics, block_size=block_size, token_s=token_s)
    )
    registry.register(
        MemoryCollector(
            model.memory,
            kv_bytes=model.num_blocks * block_bytes,
            swap_bytes=model.num_host_blocks * block_bytes,
        )
    )
