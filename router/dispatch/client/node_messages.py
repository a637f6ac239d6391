"""What is heard from one node on one stream: replies, outputs, reports of blocks, heartbeats."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, cast

import grpc

from common.errors import PeerProtocolError
from common.ids import Incarnation
from common.request import RequestOutput
from protos import pdserve_node_pb2 as pb
from protos.output_batches import outputs_from_proto
from protos.rpc_errors import error_of
from router.core.known.block_reports import ReportReader
from router.dispatch.client.fairness import FEW_OUTPUTS, TURNS_FOR_OTHERS, part_end, part_size
from router.dispatch.client.node_calls import NodeCalls
from router.dispatch.client.node_listener import NodeListener, OnOutputs
from router.dispatch.liveness.node_liveness import NodeLiveness

log = logging.getLogger("pdserve.router.nodes")

MAX_WAITING_OUTPUTS = 65_536
"""Most outputs that wait to be passed on: with more, nothing is read from their node."""

_EOF: object = cast(Any, grpc.aio).EOF


class NodeMessages:
    """Reads one stream and passes on what it brings, the outputs in their order.

    Replies are passed on at once: those of new requests do not wait for a burst of tokens.
    """

    def __init__(
        self,
        node: Incarnation,
        calls: NodeCalls,
        liveness: NodeLiveness,
        listener: NodeListener,
        on_outputs: OnOutputs,
    ) -> None:
        self._node = node
        self._calls = calls
        self._liveness = liveness
        self._listener = listener
        self._on_outputs = on_outputs
        self._reports = ReportReader()
        self._stuck_s = 0.0
        self._outputs: list[RequestOutput] = []
        self._has_outputs = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_room.set()

    @property
    def has_outputs(self) -> bool:
        """Whether outputs wait to be passed on."""
        return bool(self._outputs)

    async def read(self, stream: Any) -> None:
        """Read until the node ends the stream.

        Raises `PeerProtocolError` for bytes that are no message, and the error that ends the stream
        otherwise.
        """
        try:
            while True:
                message = await stream.read()
                self._liveness.heard()
                if message is _EOF:
                    return
                if message is None:
                    raise PeerProtocolError("the stream carried bytes that are no message")
                self._take(message)
                await self._has_room.wait()
        except grpc.aio.AioRpcError as failed:
            raise error_of(failed.code(), failed.details() or failed.code().name) from failed

    def wake(self) -> None:
        """End the present or next wait of `pass_on`."""
        self._has_outputs.set()

    async def pass_on(self) -> None:
        """Wait for outputs, or `wake`, and pass on all that wait, in parts.

        First tokens of other requests, and the calls before them, do not wait for all of these.
        """
        self._has_outputs.clear()
        if not self._outputs:
            await self._has_outputs.wait()
        size = part_size(self._listener.num_running, len(self._outputs))
        while self._outputs:
            end = part_end(self._outputs, size)
            part = self._outputs[:end]
            del self._outputs[:end]
            self._liveness.heard()  # Reading may be paused meanwhile.
            self._tell(part)
            for _ in range(TURNS_FOR_OTHERS):
                await asyncio.sleep(0)
        self._has_room.set()

    def _take(self, message: pb.NodeMessage) -> None:
        for reply in message.replies:
            self._calls.on_reply(reply)
        outputs = outputs_from_proto(message.outputs) if message.HasField("outputs") else []
        self._calls.is_heard = True
        self._stuck_s = message.stuck_ms / 1000
        self._liveness.repeated(message.echo)
        if message.HasField("blocks"):
            self._take_blocks(message.blocks)
        if self._outputs or len(outputs) > FEW_OUTPUTS:
            self._outputs += outputs
            self._has_outputs.set()
            if len(self._outputs) > MAX_WAITING_OUTPUTS:
                self._has_room.clear()
        else:
            self._tell(outputs)
        self._listener.on_for_others(self._node, message)

    def _take_blocks(self, message: pb.BlockReport) -> None:
        report = self._reports.take(message.number, message.tier, message.added, message.removed)
        if report is None:
            return
        self._listener.on_blocks(self._node, report)
        if self._reports.has_lost:
            log.warning("%s: a report of its blocks is missing, all are asked for", self._node)
            self._calls.ask_blocks_nowait()

    def _tell(self, outputs: list[RequestOutput]) -> None:
        is_reached = self._liveness.is_reached
        self._listener.on_heard(self._node, self._stuck_s, is_reached=is_reached)
        self._on_outputs(self._node, outputs)
