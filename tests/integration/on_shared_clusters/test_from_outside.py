"""Whoever has no key reaches nothing: every port of a running cluster, tried from outside.

What each certificate may do on its own is in tests/unit/protos and tests/contract/placement_store;
here the ports are those of real processes, as an operator starts them.
"""

from __future__ import annotations

import shutil
import socket
import ssl
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import httpx
import pytest
import zmq

from kv_transfer.zmq.curve_keys import CurveKeys, load_curve_keys, new_curve_keys
from pdserve.keys.keys_init import HOLDERS
from protos import pdserve_node_pb2 as pb
from protos import pdserve_node_pb2_grpc as pb_grpc
from protos.codec import make_envelope
from router.access.api_keys import add_api_key, revoke_api_key
from tests.support.clocks.waiting import wait_until
from tests.support.cluster.api import Api
from tests.support.cluster.cluster import Cluster
from tests.support.cluster.topologies import flag
from tests.support.key_folders import expired, issue, make_keys, put
from tests.support.stores.redis_server import RedisServer

TIMEOUT_S = 60.0
SILENT_S = 5.0
"""How long silence is waited for, where it is a right answer."""
NODES = ("prefill-1", "decode-1")


@pytest.fixture(scope="module", autouse=True)
def _serves_on(_shared_keyed_cluster: Cluster) -> Iterator[None]:
    """The cluster answers after all attacks what it answered before, and nothing has restarted."""
    cluster = _shared_keyed_cluster
    asked = {"max_tokens": 3, "ignore_eos": True, "temperature": 0}
    with Api(cluster.url, "tiny", cluster.headers) as api:
        before = api.complete("still here", **asked), cluster.chosen_nodes(cluster.url)
        yield
        assert (api.complete("still here", **asked), cluster.chosen_nodes(cluster.url)) == before


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The keys of another cluster."""
    return make_keys(tmp_path_factory.mktemp("other") / "keys")


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def host_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


# --- the router's API -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/"),
        ("GET", "/v1/models"),
        ("GET", "/v1/cluster"),
        ("GET", "/v1/cluster/targets"),
        ("GET", "/v1/live"),
        ("GET", "/metrics"),
        ("GET", "/docs"),
        ("GET", "/openapi.json"),
        ("POST", "/v1/completions"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/cluster/drain"),
        ("POST", "/v1/cluster/role"),
        ("GET", "/no/such/path"),
    ],
)
@pytest.mark.parametrize("key", [None, "", "pds_wrong", "another cluster's", "metrics token"])
def test_the_api_answers_401(
    keyed_cluster: Cluster, other: Path, keys: Path, method: str, path: str, key: str | None
) -> None:
    given = {
        "another cluster's": (other / "client/api.key").read_text(),
        "metrics token": (keys / "client/metrics.token").read_text(),
    }
    if key == "metrics token" and path in ("/metrics", "/v1/cluster/targets"):
        return  # what it is for
    headers = {} if key is None else bearer(given.get(key, key or "x"))
    body = {"model": "tiny", "prompt": "Hi", "node_id": "decode-1"}
    reply = httpx.request(
        method,
        keyed_cluster.url + path,
        headers=headers,
        json=body if method == "POST" else None,
        timeout=TIMEOUT_S,
    )
    assert reply.status_code == 401
    assert reply.headers["www-authenticate"] == "Bearer"


def test_probes_alone_are_open_and_say_nothing_of_requests(keyed_cluster: Cluster) -> None:
    for path in ("/health", "/ready"):
        reply = httpx.get(keyed_cluster.url + path, timeout=TIMEOUT_S)
        assert reply.status_code == 200
        assert reply.json().keys() <= {"status", "warnings"}


@pytest.mark.parametrize("path", ["/v1/cluster/drain", "/v1/cluster/role"])
def test_a_clients_key_drains_and_moves_nothing(keyed_cluster: Cluster, path: str) -> None:
    reply = httpx.post(
        f"{keyed_cluster.url}{path}",
        headers=keyed_cluster.headers,
        json={"node_id": "decode-1", "role": "mixed"},
        timeout=TIMEOUT_S,
    )
    assert reply.status_code == 403


def test_a_revoked_key_stops_working_without_a_restart(keyed_cluster: Cluster, keys: Path) -> None:
    file = keys / "router/api_keys.json"
    key = add_api_key(file, "shortly")

    def status() -> int:
        url = f"{keyed_cluster.url}/v1/models"
        return httpx.get(url, headers=bearer(key), timeout=TIMEOUT_S).status_code

    wait_until(lambda: status() == 200, "the new key is known")
    revoke_api_key(file, "shortly")
    wait_until(lambda: status() == 401, "the revoked key is refused")


# --- a node's metrics -----------------------------------------------------------------------------


@pytest.mark.parametrize("node_id", NODES)
def test_a_nodes_metrics_want_the_token(
    keyed_cluster: Cluster, keys: Path, other: Path, node_id: str
) -> None:
    (address,) = [
        node.record.metrics_address
        for node in keyed_cluster.live_nodes()
        if node.record.incarnation.node_id == node_id
    ]
    token = (keys / "client/metrics.token").read_text()
    found = httpx.get(
        f"{keyed_cluster.url}/v1/cluster/targets", headers=bearer(token), timeout=TIMEOUT_S
    ).json()
    assert {"targets": [address], "labels": {"role": node_id[:-2], "node_id": node_id}} in found
    url = f"http://{address}/metrics"
    wrong = (other / "client/metrics.token", keys / "client/api.key")
    for headers in ({}, *(bearer(path.read_text()) for path in wrong)):
        reply = httpx.get(url, headers=headers, timeout=TIMEOUT_S)
        assert (reply.status_code, "pdserve_" in reply.text) == (401, False)
    silent = [socket.create_connection(host_port(address), TIMEOUT_S) for _ in range(40)]
    assert httpx.get(url, headers=bearer(token), timeout=TIMEOUT_S).status_code == 200
    for connection in silent:
        connection.close()


# --- a node's gRPC --------------------------------------------------------------------------------


def is_spoken_to(
    address: tuple[str, int],
    ca: Path,
    certificate: Path | None,
    version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_2,
) -> bool:
    """Whether a node says anything behind the handshake; the node itself is believed.

    In TLS 1.2 the handshake fails here. In 1.3 the server judges when the client is done with it.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.maximum_version = version
    context.load_verify_locations(ca)
    context.check_hostname = False
    context.set_alpn_protocols(["h2"])
    if certificate is not None:
        context.load_cert_chain(certificate / "cert.pem", certificate / "key.pem")
    with socket.create_connection(address, TIMEOUT_S) as plain:
        try:
            with context.wrap_socket(plain) as secured:
                return bool(secured.recv(1))
        except (ssl.SSLError, ConnectionError):
            return False


@pytest.mark.covers("V05")
@pytest.mark.parametrize("node_id", NODES)
@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_grpc_ends_in_the_handshake(
    keyed_cluster: Cluster,
    keys: Path,
    other: Path,
    tmp_path: Path,
    node_id: str,
    version: ssl.TLSVersion,
) -> None:
    address, ca = host_port(keyed_cluster.record(node_id).control_address), keys / "router/ca.pem"
    for name in ("expired", "redis"):
        (tmp_path / name).mkdir()
    put(expired(keys, "router"), tmp_path / "expired")
    put(issue(keys, HOLDERS["redis"]), tmp_path / "redis")
    wrong = (None, other / "router", tmp_path / "expired", tmp_path / "redis")
    for certificate in wrong:
        assert not is_spoken_to(address, ca, certificate, version), certificate
    assert is_spoken_to(address, ca, keys / "router", version)


@pytest.mark.parametrize("node_id", NODES)
def test_grpc_in_clear_gets_nothing(keyed_cluster: Cluster, node_id: str) -> None:
    record = keyed_cluster.record(node_id)
    with grpc.insecure_channel(record.control_address) as channel:
        stub = pb_grpc.NodeStub(channel)  # type: ignore[no-untyped-call]
        envelope = make_envelope(record.incarnation, record.incarnation)
        with pytest.raises(grpc.RpcError) as refused:
            stub.Drain(pb.DrainRequest(envelope=envelope), timeout=TIMEOUT_S)
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("node_id", NODES)
def test_a_nodes_certificate_is_refused_as_a_routers(
    keyed_cluster: Cluster, keys: Path, node_id: str
) -> None:
    """What somebody who took a node over has in hand opens no other node."""
    record = keyed_cluster.record(node_id)
    credentials = grpc.ssl_channel_credentials(
        *((keys / "node" / name).read_bytes() for name in ("ca.pem", "key.pem", "cert.pem"))
    )
    options = [("grpc.ssl_target_name_override", "node.pdserve")]
    with grpc.secure_channel(record.control_address, credentials, options) as channel:
        stub = pb_grpc.NodeStub(channel)  # type: ignore[no-untyped-call]
        envelope = make_envelope(record.incarnation, record.incarnation)
        with pytest.raises(grpc.RpcError) as refused:
            stub.Drain(pb.DrainRequest(envelope=envelope), timeout=TIMEOUT_S)
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
        with pytest.raises(grpc.RpcError) as refused:
            next(stub.Stream(iter([pb.RouterMessage(envelope=envelope)]), timeout=TIMEOUT_S))
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
        assert "only a router's" in str(refused.value.details())


# --- a decode node's KV ---------------------------------------------------------------------------


@contextmanager
def dealer(
    context: zmq.Context[zmq.Socket[bytes]], port: int, own: CurveKeys | None, server: bytes
) -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    """A connected socket, and the events of its connection."""
    client = context.socket(zmq.DEALER)
    client.setsockopt(zmq.LINGER, 0)
    if own is not None:
        client.setsockopt(zmq.CURVE_PUBLICKEY, own.public)
        client.setsockopt(zmq.CURVE_SECRETKEY, own.secret)
        client.setsockopt(zmq.CURVE_SERVERKEY, server)
    events = client.get_monitor_socket()
    client.connect(f"tcp://127.0.0.1:{port}")
    try:
        yield client, events
    finally:
        client.disable_monitor()
        events.close(0)
        client.close(0)


HANDSHAKE_OVER = {
    zmq.EVENT_HANDSHAKE_SUCCEEDED: "let in",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "refused",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "refused",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "refused",
    zmq.EVENT_DISCONNECTED: "refused",
}


def wait_handshake(events: zmq.Socket[bytes], within_s: float) -> str:
    ends_at_s = time.monotonic() + within_s
    # Where nobody listens, each new try of the connection is an event.
    while events.poll(max(0, int((ends_at_s - time.monotonic()) * 1000))):
        kind = zmq.Event(struct.unpack("=H", events.recv_multipart()[0][:2])[0])
        if kind in HANDSHAKE_OVER:
            return HANDSHAKE_OVER[kind]
    return "silence"


@pytest.mark.covers("V01")
@pytest.mark.parametrize(
    ("name", "outcome"),
    [
        ("the cluster's key", {"let in"}),
        ("none", {"refused", "silence"}),
        ("a key of one's own, and the node's public one", {"refused", "silence"}),
        ("another cluster's", {"refused", "silence"}),
    ],
)
def test_kv_is_silent_without_the_key(
    keyed_cluster: Cluster, keys: Path, other: Path, name: str, outcome: set[str]
) -> None:
    port = int(flag(keyed_cluster.spec, "decode-1", "--kv-port"))
    ours = load_curve_keys(keys / "node/kv.key")
    theirs = load_curve_keys(other / "node/kv.key")
    own, server = {
        "the cluster's key": (ours, ours.public),
        "none": (None, b""),
        "a key of one's own, and the node's public one": (new_curve_keys(), ours.public),
        "another cluster's": (theirs, theirs.public),
    }[name]
    with zmq.Context() as context, dealer(context, port, own, server) as (client, events):
        client.send(b"hello")
        assert wait_handshake(events, TIMEOUT_S if "let in" in outcome else SILENT_S) in outcome
        if "let in" not in outcome:
            assert not client.poll(200), "the port answered"


# --- Redis ----------------------------------------------------------------------------------------


def test_redis_answers_noauth(keyed_redis: RedisServer) -> None:
    with socket.create_connection(("127.0.0.1", keyed_redis.port), TIMEOUT_S) as plain:
        for command in (b"PING\r\n", b"KEYS *\r\n", b"GET pdserve:keyed:nodes\r\n"):
            plain.sendall(command)
            assert plain.recv(1024).startswith(b"-NOAUTH")
        plain.sendall(b"AUTH node wrong\r\n")
        assert plain.recv(1024).startswith(b"-WRONGPASS")


def test_keys_of_another_cluster_start_nothing(
    keyed_cluster: Cluster, other: Path, tmp_path: Path, tiny_model: Path
) -> None:
    """A node with another cluster's keys is refused by Redis, and ends with the reason."""
    from tests.support.cluster.processes import ServeProcess

    folder = tmp_path / "node"
    shutil.copytree(other / "node", folder)
    process = ServeProcess(
        "stranger",
        [
            *("--role", "mixed", "--node-id", "stranger", "--model", str(tiny_model)),
            *("--redis-url", keyed_cluster.store.url, "--cluster", "keyed"),
            *("--keys", str(folder)),
        ],
        tmp_path / "log",
        {},
    )
    try:
        process.start()
        assert process.wait(120.0) == 1
        assert "Redis refused this process" in process.log()
    finally:
        process.kill()
