"""Who may speak gRPC to whom: each certificate on each side, over real sockets in one process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from common.files.keys_folder import ROUTER_NAME, Keys
from pdserve.keys.certificates import CALLS, SERVES, Holder
from pdserve.keys.keys_init import HOLDERS
from protos import pdserve_node_pb2 as pb
from protos import pdserve_node_pb2_grpc as pb_grpc
from protos.transport_security import add_port, make_server, open_channel, tls_hint
from tests.support.key_folders import (
    expired,
    issue,
    make_keys,
    node_keys,
    put,
    router_keys,
    with_certificate,
)

CALL_TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_keys(tmp_path_factory.mktemp("keys") / "ours")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_keys(tmp_path_factory.mktemp("keys") / "theirs")


class Service(pb_grpc.NodeServicer):
    """Answers everybody who gets through, and counts them."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.num_ended_streams = 0

    async def Drain(self, request: pb.DrainRequest, context: Any) -> pb.DrainReply:  # noqa: N802
        self.num_calls += 1
        return pb.DrainReply(timeout_ms=7)

    async def Stream(  # noqa: N802
        self, messages: Any, context: Any
    ) -> AsyncIterator[pb.NodeMessage]:
        self.num_calls += 1
        try:
            for _ in range(3):
                yield pb.NodeMessage()
        finally:
            self.num_ended_streams += 1


@asynccontextmanager
async def serving(keys: Keys | None) -> AsyncIterator[tuple[str, Service]]:
    server, service = make_server([], keys), Service()
    pb_grpc.add_NodeServicer_to_server(service, server)  # type: ignore[no-untyped-call]
    port = add_port(server, "127.0.0.1:0", keys)
    await server.start()
    try:
        yield f"127.0.0.1:{port}", service
    finally:
        await server.stop(None)


async def status_code(address: str, keys: Keys | None) -> grpc.StatusCode:
    """How a call ends that uses these keys."""
    return (await failure(address, keys))[0]


async def failure(address: str, keys: Keys | None) -> tuple[grpc.StatusCode, str]:
    """How a call ends that uses these keys, and what gRPC says of it."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with open_channel(address, options, keys) as channel:
        stub: Any = pb_grpc.NodeStub(channel)  # type: ignore[no-untyped-call]
        try:
            await stub.Drain(pb.DrainRequest(), timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as failed:
            return failed.code(), failed.details() or ""
    return grpc.StatusCode.OK, ""


async def test_a_router_and_a_node_of_one_cluster_talk(keys: Path) -> None:
    async with serving(node_keys(keys)) as (address, service):
        channel = open_channel(address, [], router_keys(keys))
        stub: Any = pb_grpc.NodeStub(channel)  # type: ignore[no-untyped-call]
        reply = await stub.Drain(pb.DrainRequest(), timeout=CALL_TIMEOUT_S)
        assert reply.timeout_ms == 7
        assert len([batch async for batch in stub.Stream()]) == 3
        await channel.close(None)
    assert (service.num_calls, service.num_ended_streams) == (2, 1)


def caller(name: str, keys: Path, other: Path) -> Keys | None:
    """A client of a node by what is wrong with it."""
    router = router_keys(keys)
    match name:
        case "no keys":
            return None
        case "a node":
            return with_certificate(router, issue(keys, HOLDERS["node"]))
        case "a node that serves only":
            return with_certificate(router, issue(keys, Holder(("node.pdserve",), (SERVES,))))
        case "a router that serves only":
            return with_certificate(router, issue(keys, Holder((ROUTER_NAME,), (SERVES,))))
        case "a stranger of our CA":
            return with_certificate(router, issue(keys, Holder(("x.example",), (CALLS,))))
        case "a name that starts alike":
            holder = Holder((f"{ROUTER_NAME}.example",), (CALLS,))
            return with_certificate(router, issue(keys, holder))
        case "a router of another CA":
            return with_certificate(router, issue(other, HOLDERS["router"]))
        case "expired":
            return with_certificate(router, expired(keys, "router"))
    raise AssertionError(name)


CALLERS = {
    "no keys": grpc.StatusCode.UNAVAILABLE,
    "a node": grpc.StatusCode.PERMISSION_DENIED,
    "a node that serves only": grpc.StatusCode.UNAVAILABLE,
    "a router that serves only": grpc.StatusCode.UNAVAILABLE,
    "a stranger of our CA": grpc.StatusCode.PERMISSION_DENIED,
    "a name that starts alike": grpc.StatusCode.PERMISSION_DENIED,
    "a router of another CA": grpc.StatusCode.UNAVAILABLE,
    "expired": grpc.StatusCode.UNAVAILABLE,
}


@pytest.mark.parametrize("name", CALLERS)
async def test_a_node_serves_nobody_else(name: str, keys: Path, other: Path) -> None:
    async with serving(node_keys(keys)) as (address, service):
        used = caller(name, keys, other)
        status, details = await failure(address, used)
        assert status is CALLERS[name]
        wanted = "the node may have --keys" if used is None else "refuse this router's certificate"
        is_refused_by_tls = status is grpc.StatusCode.UNAVAILABLE
        assert (wanted in tls_hint(details, used)) is is_refused_by_tls, details
        assert service.num_calls == 0
        assert await status_code(address, router_keys(keys)) is grpc.StatusCode.OK


async def test_a_refused_stream_yields_nothing(keys: Path) -> None:
    async with serving(node_keys(keys)) as (address, service):
        node = with_certificate(router_keys(keys), issue(keys, HOLDERS["node"]))
        async with open_channel(address, [], node) as channel:
            stub: Any = pb_grpc.NodeStub(channel)  # type: ignore[no-untyped-call]
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.Stream(timeout=CALL_TIMEOUT_S).read()
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
        assert "node.pdserve's" in str(refused.value.details())
        assert service.num_calls == 0


@pytest.mark.parametrize(
    "name", ["in clear", "of another CA", "expired", "a router's", "Redis's", "that only calls"]
)
async def test_a_router_speaks_to_no_other_server(name: str, keys: Path, other: Path) -> None:
    node = node_keys(keys)
    served: dict[str, Keys | None] = {
        "in clear": None,
        "of another CA": with_certificate(node, issue(other, HOLDERS["node"])),
        "expired": with_certificate(node, expired(keys, "node")),
        "a router's": with_certificate(node, issue(keys, Holder((ROUTER_NAME,), (SERVES,)))),
        "Redis's": with_certificate(node, issue(keys, HOLDERS["redis"])),
        "that only calls": with_certificate(node, issue(keys, Holder(("node.pdserve",), (CALLS,)))),
    }
    async with serving(served[name]) as (address, service):
        router = router_keys(keys)
        status, details = await failure(address, router)
        assert status is grpc.StatusCode.UNAVAILABLE
        hints = {
            "in clear": "has no --keys",
            **dict.fromkeys(("a router's", "Redis's"), "is not a"),
        }
        wanted = hints.get(name, "this router refuses the node's certificate")
        assert wanted in tls_hint(details, router), details
        assert service.num_calls == 0


async def test_a_port_that_nobody_listens_on_is_no_matter_of_keys(keys: Path) -> None:
    async with serving(None) as (address, _):
        pass
    for used in (None, router_keys(keys)):
        status, details = await failure(address, used)
        assert status is grpc.StatusCode.UNAVAILABLE
        assert tls_hint(details, used) == "", details


async def test_a_server_uses_a_renewed_certificate_without_a_restart(tmp_path: Path) -> None:
    folder = make_keys(tmp_path / "keys")
    router = router_keys(folder)
    node = with_certificate(node_keys(folder), expired(folder, "node"))
    async with serving(node) as (address, service):
        assert await status_code(address, router) is grpc.StatusCode.UNAVAILABLE
        put(issue(folder, HOLDERS["node"]), folder / "node")
        assert node.reload_if_changed()
        assert await status_code(address, router) is grpc.StatusCode.OK
        # Routers still have to show a certificate of the cluster.
        assert await status_code(address, None) is grpc.StatusCode.UNAVAILABLE
        as_node = with_certificate(router, issue(folder, HOLDERS["node"]))
        assert await status_code(address, as_node) is grpc.StatusCode.PERMISSION_DENIED
    assert service.num_calls == 1


async def test_a_router_uses_a_renewed_certificate_for_its_next_channel(tmp_path: Path) -> None:
    folder = make_keys(tmp_path / "keys")
    router = with_certificate(router_keys(folder), expired(folder, "router"))
    async with serving(node_keys(folder)) as (address, _):
        assert await status_code(address, router) is grpc.StatusCode.UNAVAILABLE
        put(issue(folder, HOLDERS["router"]), folder / "router")
        assert router.reload_if_changed()
        assert await status_code(address, router) is grpc.StatusCode.OK


async def test_without_keys_everybody_talks() -> None:
    async with serving(None) as (address, _):
        assert await status_code(address, None) is grpc.StatusCode.OK
