"""The addresses of routers that commands are given."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from pdserve.commands.http_client import RouterUnreachable, fetch_json
from pdserve.local_cluster.free_ports import free_loopback_port


class _Empty(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@contextmanager
def answering() -> Iterator[str]:
    """Yield the URL of a server that answers everything with an empty object."""
    with HTTPServer(("127.0.0.1", 0), _Empty) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("host", ["a..b", ".example", "a" * 64, "é..b", f"{'é' * 64}.example"])
def test_a_name_that_no_host_can_have(host: str) -> None:
    with pytest.raises(RouterUnreachable) as refused:
        fetch_json(f"http://{host}:8000", "/v1/models")
    assert str(refused.value).startswith(f"http://{host}:8000: no host has this name: wanted ")


@pytest.mark.parametrize("url", ["", "http://", "ftp://a", "http://a:b", "http://a:99999", "a b"])
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(RouterUnreachable, match="wanted http://host:port"):
        fetch_json(url, "/v1/models")


@pytest.mark.covers("M02")
def test_a_proxy_of_the_environment_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_loopback_port()}")
    with answering() as url:
        assert fetch_json(url, "/v1/models") == {}
