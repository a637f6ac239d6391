"""A running engine node: inbox, step thread, control service, KV connector and lease, wired up."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Coroutine
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Protocol

import grpc.aio

from common.addresses import host_port
from common.clock import Clock
from common.config import Config
from common.errors import ConfigError, InternalError, StaleEpoch
from common.ids import Incarnation
from common.keys_folder import Keys
from common.logs import name_node
from common.nodes import NodeLoad, NodeRecord
from common.token_budget import num_speculative_tokens
from common.tracing import NO_TRACING, Tracing
from engine.core.plan import Runner
from engine.core.scheduler import Scheduler
from kv_transfer.connector import KVConnector, OnEvent
from kv_transfer.statistics import ConnectorStatistics
from node.attempt_watch import AttemptWatch
from node.control_port import SERVER_OPTIONS
from node.control_service import ControlService
from node.drain import NodeDrain
from node.inbox import Inbox
from node.kv_metrics import kv_links
from node.lease_keeper import LeaseKeeper
from node.make_scheduler import SchedulableModel, make_scheduler, speculation_of
from node.messages import RouterGone
from node.metrics import node_registry
from node.metrics_server import MetricsServer, bind_metrics
from node.model_loading import load_unless_stopped
from node.node_flow import FlowLimits, NodeFlow
from node.output_streams import OutputStreams
from node.perform_effects import NodeEffects, StagedModel
from node.router_calls import Replies
from node.step_thread import StepThread
from node.watchdog import wait_for_stall
from placement.store import PlacementStore, retry_while_slow
from protos import pdserve_node_pb2_grpc as pb_grpc
from protos.transport_security import add_port, make_server

log = logging.getLogger("pdserve.node")

# Together less than what `pdserve up` waits before it kills.
STEP_GRACE_S = 6.0
STREAMS_GRACE_S = 2.0


class LoadedModel(Runner, SchedulableModel, StagedModel, Protocol):
    """A runner with the facts that the node needs to know about its model and its cache."""

    @property
    def vocab_size(self) -> int: ...
    def warm_up(self) -> None: ...


class NodeConnector(KVConnector, Protocol):
    """A connector that knows where its landings are reached, and counts what it does."""

    @property
    def endpoint(self) -> str: ...
    def statistics(self) -> ConnectorStatistics: ...


MakeConnector = Callable[[LoadedModel, Incarnation, OnEvent], NodeConnector]
MakeFlow = Callable[[Scheduler, LoadedModel, Incarnation, NodeConnector], NodeFlow]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeParts:
    """The concrete parts of a node, chosen at the edge."""

    load_model: Callable[[], LoadedModel]
    make_connector: MakeConnector
    make_flow: MakeFlow
    store: PlacementStore
    clock: Clock
    keys: Keys | None = None
    tracing: Tracing = NO_TRACING


class EngineNode:
    """One prefill, decode or mixed node."""

    def __init__(self, config: Config, parts: NodeParts) -> None:
        self._config = config
        self._parts = parts
        self._exit_code = 0

    async def run(self, stop: asyncio.Event, drain: asyncio.Event | None = None) -> int:
        """Serve until `stop` is set; the exit code says whether the node ended well.

        `drain`, which a router's call sets as well, ends it in order: see `node.drain`.

        Raises `ConfigError`, `CheckpointError` or `PlacementUnavailable` when it cannot start.
        """
        keys = self._parts.keys
        server = make_server(SERVER_OPTIONS, keys)
        port = _bind(server, self._config.server.host, self._config.server.port, keys)
        with bind_metrics(self._config.server.host, self._config.server.metrics_port) as listener:
            requested = drain or asyncio.Event()
            leaving = NodeDrain(requested, timeout_s=self._config.server.drain_timeout_s)
            return await self._run(server, port, listener, stop, leaving)

    async def _run(
        self,
        server: grpc.aio.Server,
        port: int,
        listener: socket.socket,
        stop: asyncio.Event,
        drain: NodeDrain,
    ) -> int:
        incarnation = await self._new_incarnation(port)
        name_node(incarnation.node_id)
        log.info("%s loads %s", incarnation, self._config.model.model)
        model = await load_unless_stopped(self._load_model, stop, drain.requested)
        if model is None:
            return 0
        _say_what_loaded(self._config, model)
        loop = asyncio.get_running_loop()
        inbox = Inbox(max_requests=self._config.handoff.max_queued_requests)
        connector = self._parts.make_connector(model, incarnation, inbox.put)
        try:
            flow = self._parts.make_flow(
                make_scheduler(self._config, model), model, incarnation, connector
            )
            streams = OutputStreams(loop, lambda router: inbox.put(RouterGone(router)))
            replies = Replies(loop)
            service = ControlService(
                incarnation=incarnation,
                role=self._config.role,
                inbox=inbox,
                replies=replies,
                streams=streams,
                clock=self._parts.clock,
                drain=drain,
            )
            pb_grpc.add_NodeServicer_to_server(service, server)  # type: ignore[no-untyped-call]
            await server.start()
            step_thread = StepThread(
                inbox=inbox,
                flow=flow,
                runner=model,
                perform=NodeEffects(
                    connector, replies, streams, model, on_drained=drain.on_drained
                ).perform_effect,
                flush=self._flush_of(streams, flow),
                on_crash=lambda: loop.call_soon_threadsafe(self._crash, stop),
                clock=self._parts.clock,
            )
            registry = node_registry(
                lambda: flow.statistics, service.refusals, connector.statistics
            )
            keys = self._parts.keys
            metrics = MetricsServer(registry, listener, token=keys.metrics_token if keys else "")
            metrics.start()
            keeper = self._lease_keeper(
                incarnation,
                model,
                partial(_load, flow, connector, drain),
                port,
                listener,
            )
            try:
                await self._serve(keeper, step_thread, stop, drain.run(inbox, keeper.renew_soon))
            finally:
                await keeper.leave()
                await step_thread.stop(STEP_GRACE_S)
                streams.stop()
                await server.stop(STREAMS_GRACE_S)
                await metrics.stop()
        finally:
            await asyncio.to_thread(connector.close)
        return self._exit_code

    async def _serve(
        self,
        keeper: LeaseKeeper,
        step_thread: StepThread,
        stop: asyncio.Event,
        draining: Coroutine[Any, Any, None],
    ) -> None:
        renewal = asyncio.create_task(keeper.run())
        stall = asyncio.create_task(wait_for_stall(step_thread.busy_since_s, self._parts.clock))
        leaving = (asyncio.create_task(stop.wait()), asyncio.create_task(draining))
        tasks = (renewal, stall, *leaving)
        log.info("ready")
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        # Awaited, so that no late heartbeat brings the lease back after the node has left.
        await asyncio.gather(*tasks, return_exceptions=True)
        if stall in done:
            self._exit_code = 1
        if renewal in done:
            self._exit_code = 1
            error = renewal.exception()
            if not isinstance(error, StaleEpoch):
                raise error or InternalError("the lease keeper ended by itself")

    def _flush_of(self, streams: OutputStreams, flow: NodeFlow) -> Callable[[], None]:
        """What the step thread does at the end of a turn: tokens first, then who ended."""
        loop = asyncio.get_running_loop()
        watch = AttemptWatch(flow.attempts, self._parts.tracing, loop, self._parts.clock)

        def flush() -> None:
            streams.flush()
            watch.look()

        return flush

    def _crash(self, stop: asyncio.Event) -> None:
        self._exit_code = 1
        stop.set()

    async def _new_incarnation(self, port: int) -> Incarnation:
        server = self._config.server
        role = self._config.role.value
        node_id = server.node_id or f"{role}-{socket.gethostname()}-{port}"
        epoch = await retry_while_slow(partial(self._parts.store.next_epoch, node_id))
        return Incarnation(node_id, epoch)

    def _load_model(self) -> LoadedModel:
        model = self._parts.load_model()
        log.info("warming up; the first start on a machine compiles kernels for about a minute")
        model.warm_up()
        return model

    def _lease_keeper(
        self,
        incarnation: Incarnation,
        model: LoadedModel,
        current_load: Callable[[], NodeLoad],
        port: int,
        metrics_listener: socket.socket,
    ) -> LeaseKeeper:
        config = self._config
        host = advertised_host(config.server.host)
        record = NodeRecord(
            incarnation=incarnation,
            role=config.role,
            control_address=host_port(host, port),
            metrics_address=host_port(host, metrics_listener.getsockname()[1]),
            model=config.model.served_model_name,
            fingerprint=model.layout.fingerprint,
            block_size=config.engine.block_size,
            num_blocks=model.num_blocks,
            max_num_seqs=config.engine.max_num_seqs,
            max_model_len=model.max_model_len,
            kv_description=kv_description(config, model),
            speculative_method=speculation_of(config).speculative_method,
        )
        return LeaseKeeper(
            self._parts.store, record, current_load, lease_s=config.placement.node_lease_s
        )


def _bind(server: grpc.aio.Server, host: str, port: int, keys: Keys | None) -> int:
    address = host_port(host, port)
    try:
        return add_port(server, address, keys)
    except RuntimeError as error:
        raise ConfigError(
            f"cannot listen on {address}: the port is in use or the address is not this machine's"
        ) from error


def flow_limits(config: Config, model: LoadedModel) -> FlowLimits:
    """What a node of this configuration takes with this model."""
    return FlowLimits(
        vocab_size=model.vocab_size,
        max_model_len=model.max_model_len,
        max_queued_requests=config.handoff.max_queued_requests,
    )


def kv_description(config: Config, model: LoadedModel) -> str:
    """What a node's KV cache holds, for people who wonder why two nodes do not pair up."""
    has_mtp = config.speculation.speculative_method == "mtp"
    return f"{model.layout.description}, {'with' if has_mtp else 'without'} mtp"


def _load(flow: NodeFlow, connector: NodeConnector, drain: NodeDrain) -> NodeLoad:
    """The load that the next heartbeat carries."""
    links = kv_links(connector.statistics())
    return replace(flow.load, kv_links=links, is_draining=drain.is_on)


def _say_what_loaded(config: Config, model: LoadedModel) -> None:
    log.info("%s", _in_words(config, model))
    settings = asdict(config.scheduling)
    log.info("scheduling: %s", ", ".join(f"{key}={value}" for key, value in settings.items()))


def _in_words(config: Config, model: LoadedModel) -> str:
    """What came out of configuration and checkpoint, for whoever reads the log."""
    speculation = speculation_of(config)
    most = num_speculative_tokens(
        speculation.speculative_method, speculation.num_speculative_tokens
    )
    drafts = f"at most {most} drafts by {speculation.speculative_method}" if most else "no drafts"
    return (
        f"{kv_description(config, model)}: {model.num_blocks} blocks, sequences of up to "
        f"{model.max_model_len} tokens, {drafts}"
    )


def advertised_host(host: str) -> str:
    """The name under which others reach what listens on `host`."""
    return socket.gethostname() if host in ("0.0.0.0", "::") else host  # noqa: S104
