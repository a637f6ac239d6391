"""What is said of a node that a call beside its stream does not reach."""

from __future__ import annotations

from types import SimpleNamespace

import grpc
import pytest

from common.errors import DeadlineExceeded, NodeLost, PdserveError, StaleEpoch
from common.ids import Incarnation
from common.nodes import Role
from protos import pdserve_node_pb2 as pb
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
    for call in (calls.drain(), calls.set_role(Role.MIXED, 1)):
        with pytest.raises(kind) as failed:
            await call
        assert str(failed.value) == said
