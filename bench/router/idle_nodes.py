"""Nodes that a router hears and gives no request: heartbeats and repeated numbers, over real gRPC.

All of them are one process behind one port, with the code of a node at the end of each stream.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, cast

import grpc.aio
import uvloop

from bench.router.node_stand_in import CLUSTER, LEASE_S, node_record
from common.ids import Incarnation
from common.nodes import NodeLoad, NodeRecord, Role
from common.version import PROTOCOL_VERSION
from node.control.control_port import SERVER_OPTIONS
from node.control.output_streams import OutputStreams, RouterStream
from placement.redis_store import RedisStore
from protos import pdserve_node_pb2 as pb
from protos.pdserve_node_pb2_grpc import NodeServicer, add_NodeServicer_to_server

_ROUTER = Incarnation("router", 1)
_OTHER_LAYOUT = "e" * 32
_NUM_SEATS = 8
_FULL = NodeLoad(
    free_blocks=0, free_seats=0, num_running=_NUM_SEATS, num_waiting=0, queued_tokens=0
)


class IdleService(cast(Any, NodeServicer)):  # type: ignore[misc]
    """Every stream is that of a node of its own. A call ends it: nothing is to be placed here."""

    def __init__(self) -> None:
        self.num_calls = 0

    async def Stream(  # noqa: N802
        self, messages: AsyncIterator[pb.RouterMessage], _context: object
    ) -> AsyncIterator[pb.NodeMessage]:
        await anext(messages)
        streams = OutputStreams(asyncio.get_running_loop(), lambda _: None)
        stream = streams.open(_ROUTER)
        listening = asyncio.create_task(self._listen(messages, stream, streams))
        try:
            async for _ in streams.read(stream):
                yield pb.NodeMessage(echo=stream.echo)
        finally:
            listening.cancel()

    async def _listen(
        self,
        messages: AsyncIterator[pb.RouterMessage],
        stream: RouterStream,
        streams: OutputStreams,
    ) -> None:
        async for message in messages:
            if message.calls:
                self.num_calls += len(message.calls)
                streams.close(stream)
            stream.take_echo(message.echo, message.beat_ms)


async def serve_idle_nodes(service: IdleService) -> tuple[Any, int]:
    """Return a server, and the port that all the nodes share."""
    name = "grpc.max_allowed_incoming_connections"
    options = [(name, 1 << 16) if option[0] == name else option for option in SERVER_OPTIONS]
    server = grpc.aio.server(options=options)
    add_NodeServicer_to_server(service, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, port


def idle_record(number: int, port: int, model: str) -> NodeRecord:
    """Return the record of an idle node. Every second one prefills, for decode nodes of a layout of
    KV that no other node has."""
    role = Role.PREFILL if number % 2 else Role.DECODE
    return replace(
        node_record(role, port, model),
        node_id=f"idle-{number:04}",
        fingerprint=_OTHER_LAYOUT,
        max_num_seqs=_NUM_SEATS,
        protocol=PROTOCOL_VERSION,
    )


class IdleNodes:
    """Serves and registers so many nodes on one core, in a process of its own: their seats are all
    taken by others, so a router looks at some of them for each request and chooses none."""

    def __init__(self, core: int, redis_url: str, model: str, num_nodes: int) -> None:
        os.sched_setaffinity(0, {core})
        self._service = IdleService()
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server = self._call(self._start(redis_url, model, num_nodes))

    def pid(self) -> int:
        return os.getpid()

    def num_calls(self) -> int:
        return self._service.num_calls

    def close(self) -> None:
        self._call(self._server.stop(grace=0))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _start(self, redis_url: str, model: str, num_nodes: int) -> Any:
        server, port = await serve_idle_nodes(self._service)
        store = RedisStore(redis_url, CLUSTER, call_timeout_s=10.0)
        for number in range(num_nodes):
            record = idle_record(number, port, model)
            await store.heartbeat(record, _FULL, lease_s=LEASE_S)
        await store.close()
        return server
