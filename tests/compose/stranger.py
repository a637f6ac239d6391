"""Tries every port of the cluster from its network, without keys. Runs inside a container.

Prints one line for each attempt: its name and the result.
"""

from __future__ import annotations

import contextlib
import http.client
import select
import socket
import ssl
from collections.abc import Callable

import grpc
import redis
import zmq
from zmq.utils.monitor import recv_monitor_message

ANSWER_LIMIT_S = 50.0
SILENCE_S = 5.0
"""A peer that is silent for so long has no answer."""
NUM_SILENT = 300
"""Silent connections to the balancer: more than `CONNECTIONS_PER_CLIENT`."""
SETTLED_S = 1.0
"""After so long without a closed connection, the balancer closes no more."""


def http_status(host: str, port: int, path: str) -> str:
    connection = http.client.HTTPConnection(host, port, timeout=ANSWER_LIMIT_S)
    connection.request("GET", path)
    return str(connection.getresponse().status)


def grpc_in_clear(host: str) -> str:
    channel = grpc.insecure_channel(f"{host}:9000")
    try:
        grpc.channel_ready_future(channel).result(timeout=SILENCE_S)
    except grpc.FutureTimeoutError:
        return "no connection"
    return "connected"


def grpc_without_certificate(host: str) -> str:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection((host, 9000), timeout=ANSWER_LIMIT_S) as plain,
        context.wrap_socket(plain, server_hostname="node.pdserve") as wrapped,
    ):
        # In TLS 1.3 a client learns at its first read that a certificate is required.
        return f"{len(wrapped.recv(1))} bytes"


def redis_without_password() -> str:
    with redis.Redis(
        host="redis", ssl=True, ssl_cert_reqs="none", socket_timeout=ANSWER_LIMIT_S, protocol=2
    ) as store:
        return str(store.get("pdserve:default:nodes"))


def redis_in_clear() -> str:
    with redis.Redis(host="redis", socket_timeout=ANSWER_LIMIT_S) as store:
        return str(store.ping())


def kv_without_curve() -> str:
    """Return the first event of an unencrypted ZMQ peer after it connected."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        monitor = peer.get_monitor_socket()
        peer.connect("tcp://decode:9001")
        while monitor.poll(round(1000 * SILENCE_S)):
            event = zmq.Event(recv_monitor_message(monitor)["event"])
            if event not in (zmq.Event.CONNECT_DELAYED, zmq.Event.CONNECTED):
                return str(event.name)
        return "silence"


def silent_connections() -> str:
    """Return how many of `NUM_SILENT` silent connections the balancer leaves open."""
    opened = [socket.socket() for _ in range(NUM_SILENT)]
    for one in opened:
        with contextlib.suppress(ConnectionResetError):
            one.connect(("balancer", 8000))
    still_open = set(opened)
    while closed := select.select(still_open, [], [], SETTLED_S)[0]:
        still_open.difference_update(closed)
    for one in opened:
        one.close()
    return f"{len(still_open)} open"


def result_of(attempt: Callable[[], str]) -> str:
    try:
        return attempt()
    except (OSError, redis.RedisError, http.client.HTTPException) as refusal:
        return " ".join(f"{type(refusal).__name__}: {refusal}".split())


ATTEMPTS: dict[str, Callable[[], str]] = {
    "router": lambda: http_status("router-1", 8000, "/v1/models"),
    "router metrics": lambda: http_status("router-2", 8000, "/metrics"),
    "prefill metrics": lambda: http_status("prefill", 9100, "/metrics"),
    "decode metrics": lambda: http_status("decode", 9100, "/metrics"),
    "prefill in clear": lambda: grpc_in_clear("prefill"),
    "decode in clear": lambda: grpc_in_clear("decode"),
    "prefill without certificate": lambda: grpc_without_certificate("prefill"),
    "decode without certificate": lambda: grpc_without_certificate("decode"),
    "redis without password": redis_without_password,
    "redis in clear": redis_in_clear,
    "kv without curve": kv_without_curve,
    "silent connections": silent_connections,
}

if __name__ == "__main__":
    for name, attempt in ATTEMPTS.items():
        print(f"{name}: {result_of(attempt)}", flush=True)
