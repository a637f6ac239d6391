"""`compose/haproxy.cfg` in HAProxy itself, in front of stub routers. Requires Debian's package."""

from __future__ import annotations

import http.client
import http.server
import os
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from pdserve.keys.certificates import SERVES, Holder
from pdserve.local_cluster.child_process import ending_with_parent
from pdserve.local_cluster.free_ports import free_loopback_port
from tests.support.clocks.waiting import wait_until
from tests.support.key_folders import issue, make_keys

CONFIG = Path(__file__).resolve().parents[2] / "compose/haproxy.cfg"
PER_CLIENT = 20
NUM_SILENT = 60
BODY = b"an answer of a router"
STRANGER = ("127.0.0.2", 0)

pytestmark = [
    pytest.mark.skipif(shutil.which("haproxy") is None, reason="haproxy is not installed"),
]


class Router(http.server.BaseHTTPRequestHandler):
    """Answers every request with `BODY`."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(BODY)))
        self.end_headers()
        self.wfile.write(BODY)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


class Routers(http.server.ThreadingHTTPServer):
    """Expects that a health check closes its connection before it has read all."""

    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """Report nothing."""


@contextmanager
def stub_router(tls: ssl.SSLContext | None = None) -> Iterator[int]:
    """Provide a router's port."""
    server = Routers(("127.0.0.1", 0), Router)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def balancer(router: int, **variables: str) -> Iterator[int]:
    """Run HAProxy with the project's configuration; provide its port for clients."""
    port, health = free_loopback_port(), free_loopback_port()
    settings = {
        "BIND": f"127.0.0.1:{port}",
        "HEALTH_BIND": f"127.0.0.1:{health}",
        "CONNECTIONS_PER_CLIENT": str(PER_CLIENT),
        "ROUTER_1": f"127.0.0.1:{router}",
        "ROUTER_2": f"127.0.0.1:{router}",
        "CERTIFICATE": "",
        "ROUTERS_CA": "",
        "ROUTERS_NAME": "",
        **variables,
    }
    process = subprocess.Popen(
        ending_with_parent(["haproxy", "-db", "-f", str(CONFIG)]),
        env=os.environ | settings,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: is_healthy(health), "the balancer is healthy")
        yield port
    finally:
        process.terminate()
        process.wait(timeout=10.0)


def is_healthy(port: int) -> bool:
    with suppress(OSError):
        return get(http.client.HTTPConnection("127.0.0.1", port), "/balancer/health")[0] == 200
    return False


def get(connection: http.client.HTTPConnection, path: str = "/v1/models") -> tuple[int, bytes]:
    connection.timeout = 10.0
    try:
        connection.request("GET", path)
        reply = connection.getresponse()
        return reply.status, reply.read()
    finally:
        connection.close()


def silent_connection(port: int) -> socket.socket:
    """Connect as `STRANGER`, and send nothing. It may be closed before it is connected."""
    silent = socket.socket()
    silent.bind(STRANGER)
    with suppress(ConnectionResetError):
        silent.connect(("127.0.0.1", port))
    silent.setblocking(False)
    return silent


def is_closed(silent: socket.socket) -> bool:
    """Whether the balancer has closed the connection."""
    try:
        return silent.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def pem(folder: Path, name: str) -> Path:
    """Issue a server's certificate; return the file of certificate and key."""
    made = issue(folder, Holder((name,), (SERVES,)))
    path = folder / f"{name}.pem"
    path.write_bytes(made.certificate + made.private_key)
    return path


def test_one_silent_address_does_not_take_the_place_of_others() -> None:
    with ExitStack() as stack:
        port = stack.enter_context(balancer(stack.enter_context(stub_router())))
        silent = [stack.enter_context(silent_connection(port)) for _ in range(NUM_SILENT)]
        wait_until(
            lambda: sum(map(is_closed, silent)) >= NUM_SILENT - PER_CLIENT,
            "connections beyond the limit are closed",
        )
        assert sum(map(is_closed, silent)) == NUM_SILENT - PER_CLIENT
        assert get(http.client.HTTPConnection("127.0.0.1", port)) == (200, BODY)


def test_an_address_connects_again_when_its_connections_have_ended() -> None:
    with stub_router() as router, balancer(router) as port:
        for _ in range(3 * PER_CLIENT):
            assert get(http.client.HTTPConnection("127.0.0.1", port)) == (200, BODY)


def test_https_for_clients(tmp_path: Path) -> None:
    keys = make_keys(tmp_path / "keys")
    certificate = pem(keys, "localhost")
    context = ssl.create_default_context(cafile=keys / "router/ca.pem")
    with stub_router() as router, balancer(router, CERTIFICATE=str(certificate)) as port:
        https = http.client.HTTPSConnection("localhost", port, context=context)
        assert get(https) == (200, BODY)
        with pytest.raises((OSError, http.client.HTTPException)):
            get(http.client.HTTPConnection("127.0.0.1", port))


@pytest.mark.parametrize(("name", "status"), [("router.example", 200), ("other.example", 503)])
def test_https_towards_routers(name: str, status: int, tmp_path: Path) -> None:
    keys = make_keys(tmp_path / "keys")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem(keys, "router.example"))
    variables = {"ROUTERS_CA": str(keys / "router/ca.pem"), "ROUTERS_NAME": name}
    with stub_router(context) as router, balancer(router, **variables) as port:
        assert get(http.client.HTTPConnection("127.0.0.1", port))[0] == status
