"""What is said of a node that a call beside its stream does not reach."""

from __future__ import annotations

from types import SimpleNamespace

import grpc
import pytest

from common.errors import (
    DeadlineExceeded,
    Draining,
    LastInRole,
    NodeLost,
    PdserveError,
    PeerProtocolError,
    PlacementUnavailable,
    StaleEpoch,
)
from common.ids import Incarnation
from common.nodes import Role
from protos import pdserve_node_pb2 as pb
from protos.codec import refusal_to_proto
from router.dispatch.client.calls_beside import CallsBeside

NODE = Incarnation("decode-2", 7)
OF_GRPC = "failed to connect to all addresses; last error: UNKNOWN: Connection refused (111)"
ENDS: dict[grpc.StatusCode, tuple[str, type[PdserveError], str]] = {
    grpc.StatusCode.UNAVAILABLE: (
        OF_GRPC,
        NodeLost,
        "decode-2#7 cannot be reached: it has ended, or the network is down",
    ),
    grpc.StatusCode.DEADLINE_EXCEEDED: (
        "Deadline Exceeded",
        DeadlineExceeded,
        "decode-2#7 did not answer within 5 s",
    ),
    grpc.StatusCode.FAILED_PRECONDITION: (
        "asked for decode-2#6",
        StaleEpoch,
        "decode-2#7: asked for decode-2#6",
    ),
}


@pytest.mark.parametrize("status", ENDS)
async def test_a_call_that_fails_is_told_in_words_of_the_cluster(status: grpc.StatusCode) -> None:
    details, kind, said = ENDS[status]

    async def fails(message: object, **limits: float) -> None:
        nothing = grpc.aio.Metadata()
        raise grpc.aio.AioRpcError(status, nothing, nothing, details, details)

    calls = CallsBeside(NODE, pb.Envelope(), lambda: SimpleNamespace(Drain=fails, SetRole=fails))
    for call in (calls.drain(), calls.set_role(Role.MIXED, 1, None)):
        with pytest.raises(kind) as failed:
            await call
        assert str(failed.value) == said


@pytest.mark.parametrize("others", [None, [], ["d1", "d2"]])
async def test_a_node_is_told_of_whom_one_must_stay_and_tells_its_role_until_now(
    others: list[str] | None,
) -> None:
    told: list[pb.RoleRequest] = []

    async def answer(message: pb.RoleRequest, **_: float) -> pb.RoleReply:
        told.append(message)
        return pb.RoleReply(earlier="mixed")

    calls = CallsBeside(NODE, pb.Envelope(), lambda: SimpleNamespace(SetRole=answer))
    assert await calls.set_role(Role.PREFILL, 7, others) is Role.MIXED
    (message,) = told
    assert (message.role, message.number) == ("prefill", 7)
    assert message.HasField("others") == (others is not None)
    assert list(message.others.node_ids) == (others or [])


async def test_an_earlier_role_that_is_none_breaks_the_protocol() -> None:
    async def answer(_message: pb.RoleRequest, **_: float) -> pb.RoleReply:
        return pb.RoleReply(earlier="decoder")

    calls = CallsBeside(NODE, pb.Envelope(), lambda: SimpleNamespace(SetRole=answer))
    with pytest.raises(PeerProtocolError, match="decode-2#7 had the role 'decoder'"):
        await calls.set_role(Role.PREFILL, 7, None)


@pytest.mark.parametrize("kind", [LastInRole, PlacementUnavailable, Draining])
async def test_what_a_node_refuses_a_role_with_keeps_its_kind(kind: type[PdserveError]) -> None:
    async def answer(_message: pb.RoleRequest, **_: float) -> pb.RoleReply:
        return pb.RoleReply(refusal=refusal_to_proto(kind("it keeps its role")))

    calls = CallsBeside(NODE, pb.Envelope(), lambda: SimpleNamespace(SetRole=answer))
    with pytest.raises(kind, match="it keeps its role"):
        await calls.set_role(Role.PREFILL, 7, [])
