"""A router's stream to a node as tests speak it: calls with replies, and what else comes."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio

from common.request import RequestOutput
from protos import pdserve_node_pb2 as pb
from protos.output_batches import outputs_from_proto

END: Any = grpc.aio.EOF  # type: ignore[attr-defined]


class NodeCaller:
    """One stream. Only one of its methods may wait at a time."""

    def __init__(self, stub: Any, envelope: pb.Envelope) -> None:
        self.call = stub.Stream()
        self._envelope = envelope
        self._num_calls = 0
        self._outputs: list[RequestOutput] = []

    async def greet(self, *, is_first: bool = True) -> None:
        """Say who is who, and hear the first message: if this `is_first`, no block is cached."""
        await self.call.write(pb.RouterMessage(envelope=self._envelope))
        message = await self.call.read()
        if is_first:
            assert message == pb.NodeMessage(blocks=pb.BlockReport(number=1))

    async def say(self, message: pb.RouterMessage) -> None:
        await self.call.write(message)

    async def ask(self, ask: pb.ReserveRequest | pb.PrefillRequest) -> pb.Reply:
        """The reply to a call."""
        call = await self.begin(ask)
        while True:
            message = await self._read()
            for reply in message.replies:
                assert reply.call_id == call.id
                return reply

    async def begin(self, ask: pb.ReserveRequest | pb.PrefillRequest) -> pb.Call:
        """A call whose reply nobody waits for yet."""
        self._num_calls += 1
        call = pb.Call(id=self._num_calls)
        field = call.reserve if isinstance(ask, pb.ReserveRequest) else call.prefill
        field.MergeFrom(ask)  # type: ignore[arg-type]
        field.SetInParent()
        await self.say(pb.RouterMessage(calls=[call]))
        return call

    async def next_outputs(self) -> list[RequestOutput]:
        """What came since the last call, at least one."""
        while not self._outputs:
            await self._read()
        outputs, self._outputs = self._outputs, []
        return outputs

    async def wait_ended(self) -> None:
        """Read the rest, which holds neither replies nor outputs. Raises what ended it badly."""
        while (message := await self.call.read()) is not END:
            assert message == pb.NodeMessage()

    async def skip(self) -> None:
        """Read whatever comes until the end. Raises what ended it badly."""
        while await self.call.read() is not END:
            pass

    async def _read(self) -> pb.NodeMessage:
        async with asyncio.timeout(20):
            message = await self.call.read()
        assert message is not END, "the stream ended"
        self._outputs += outputs_from_proto(message.outputs)
        read: pb.NodeMessage = message
        return read
