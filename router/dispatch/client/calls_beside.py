"""Calls to a node beside its stream, each with a deadline: to leave, and to take another role."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import grpc

from common.errors import DeadlineExceeded, InvalidRequest, NodeLost, PeerProtocolError
from common.ids import Incarnation
from common.nodes import Role
from protos import pdserve_node_pb2 as pb
from protos.codec import refusal_to_error
from protos.rpc_errors import error_of

TIMEOUT_S = 5.0


class CallsBeside:
    """The calls beside the stream to one incarnation of a node; `stub` returns the stub of the open
    channel."""

    def __init__(self, node: Incarnation, envelope: pb.Envelope, stub: Callable[[], Any]) -> None:
        self._node = node
        self._envelope = envelope
        self._stub = stub

    async def drain(self) -> float:
        """Ask the node to leave; return the seconds that it gives to running requests.

        Raises `NodeLost` when it has left, or the typed error of the failed call.
        """
        message = pb.DrainRequest(envelope=self._envelope)
        reply: pb.DrainReply = await self._called(self._stub().Drain, message)
        return reply.timeout_ms / 1000

    async def set_role(self, role: Role, number: int, others: Sequence[str] | None) -> Role:
        """Change the role of the node for new work; return the one that it had until now.

        Raises what the node refuses it with: `InvalidRequest` where it cannot have this role,
        `StaleEpoch` where it knows of a change with a higher number, `LastInRole` where none of
        `others` is left, `PlacementUnavailable` where that is not known, and `Draining`;
        `PeerProtocolError` for a reply without a role; otherwise as `drain`.
        """
        names = None if others is None else pb.NodeNames(node_ids=others)
        message = pb.RoleRequest(
            envelope=self._envelope, role=role.value, number=number, others=names
        )
        reply: pb.RoleReply = await self._called(self._stub().SetRole, message)
        if reply.HasField("refusal"):
            raise refusal_to_error(reply.refusal)
        try:
            return Role(reply.earlier)
        except ValueError:
            raise PeerProtocolError(f"{self._node} had the role {reply.earlier[:32]!r}") from None

    async def _called(self, call: Any, message: object) -> Any:
        try:
            return await call(message, timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError as failed:
            if failed.code() is grpc.StatusCode.UNIMPLEMENTED:
                raise InvalidRequest(
                    f"{self._node} is of an earlier version, which knows no such call: replace it "
                    "by a node of this version"
                ) from failed
            if failed.code() is grpc.StatusCode.UNAVAILABLE:
                raise NodeLost(
                    f"{self._node} cannot be reached: it has ended, or the network is down"
                ) from failed
            if failed.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise DeadlineExceeded(
                    f"{self._node} did not answer within {TIMEOUT_S:g} s"
                ) from failed
            raise error_of(failed.code(), f"{self._node}: {failed.details()}") from failed
        except grpc.aio.UsageError as closed:
            raise NodeLost(f"{self._node} has left: {closed}") from closed
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # The channel was closed under the call.
            raise NodeLost(f"{self._node} has left") from None
