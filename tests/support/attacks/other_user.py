"""What another user of this machine tries: other_user.py UID ATTACK, with its arguments as JSON.

It is started by root, imports what the attacks need, becomes the user UID, and prints as JSON what
came of it: for each thing that was tried, the error's name, or what was reached.
"""

from __future__ import annotations

import encodings.idna  # noqa: F401 (the interpreter's files may be out of the user's reach)
import http.client
import json
import os
import socket
import ssl
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import grpc
import zmq
from zmq.utils.monitor import recv_monitor_message

from common.ids import Incarnation
from protos import pdserve_node_pb2 as pb
from protos import pdserve_node_pb2_grpc as pb_grpc
from protos.codec import make_envelope
from tests.support.attacks.attacks_on_files import try_file, try_process

TIMEOUT_S = 10.0
LET_IN = zmq.EVENT_HANDSHAKE_SUCCEEDED
REFUSED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_DISCONNECTED
)


def connect(address: str) -> Any:
    """Connect to a unix socket."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(TIMEOUT_S)
        client.connect(address)
        client.sendall(b"INFO\r\n")
        return client.recv(100).decode()


def drain(address: str, node_id: str, epoch: int) -> Any:
    """Call `Drain` of a node as a router would that has no keys."""
    with grpc.insecure_channel(address) as channel:
        stub = pb_grpc.NodeStub(channel)  # type: ignore[no-untyped-call]
        node = Incarnation(node_id, epoch)
        request = pb.DrainRequest(envelope=make_envelope(Incarnation("router", 1), node))
        try:
            stub.Drain(request, timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            return error.code().name
    return "drained"


def handshake(address: str, certificate: str, key: str) -> Any:
    """Connect by TLS with a certificate, '' for none; say whether the node speaks then."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    if certificate:
        with tempfile.NamedTemporaryFile("w") as file:
            file.write(certificate + key)
            file.flush()
            context.load_cert_chain(file.name)
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), TIMEOUT_S) as plain:
        try:
            with context.wrap_socket(plain) as secured:
                return "spoken to" if secured.recv(1) else "closed"
        except (ssl.SSLError, ConnectionError):
            return "refused"


def send_kv(address: str, server_key: str, own: list[str]) -> Any:
    """Send a message to a node's KV port: in clear, or with a key pair (public, secret)."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.linger = 0
        if server_key:
            client.curve_publickey, client.curve_secretkey = (one.encode() for one in own)
            client.curve_serverkey = server_key.encode()
        events = client.get_monitor_socket(LET_IN | REFUSED)
        client.connect(f"tcp://{address}")
        client.send(b"hello")
        is_told = events.poll(round(1000 * TIMEOUT_S))
        event = recv_monitor_message(events)["event"] if is_told else None
        client.disable_monitor()
        return "silence" if event is None else "let in" if event == LET_IN else "refused"


def request(
    method: str, address: str, path: str, headers: dict[str, str] | None = None, body: Any = None
) -> Any:
    """Send an HTTP request; return status and text, of a live page's stream its first events."""
    connection = http.client.HTTPConnection(address, timeout=TIMEOUT_S)
    json_type = {"content-type": "application/json"} if body is not None else {}
    try:
        content = json.dumps(body) if body is not None else None
        connection.request(method, path, content, {**json_type, **(headers or {})})
        reply = connection.getresponse()
        text = b""
        while b'"snapshot"' not in text and (line := reply.readline()):
            text += line
        return [reply.status, text.decode()]
    finally:
        connection.close()


def bind(address: str) -> Any:
    """Listen where somebody listens already, to get some of the connections."""
    host, _, port = address.rpartition(":")
    with socket.socket() as own:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        own.bind((host, int(port)))
        own.listen()
    return "listens"


ATTACKS: dict[str, Callable[..., Any]] = {
    one.__name__: one
    for one in (connect, drain, handshake, send_kv, request, bind, try_file, try_process)
}


def main() -> None:
    user, attack, arguments = int(sys.argv[1]), ATTACKS[sys.argv[2]], json.loads(sys.argv[3])
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
    os.chdir("/")
    assert os.geteuid() == user
    tempfile.tempdir = "/tmp"
    results = []
    for one in arguments:
        try:
            results.append(attack(**one))
        except OSError as error:
            results.append(type(error).__name__)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
