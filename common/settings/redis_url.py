"""The address of the placement store: one Redis, one that Sentinels watch, or a Redis Cluster.

    redis://user:password@host:port/db
    redis+sentinel://user:password@host:port,host:port/service/db
    redis+cluster://user:password@host:port,host:port
    unix:///path

`rediss` in place of `redis` is TLS, to Sentinels as well.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import Enum
from urllib.parse import SplitResult, unquote, urlsplit

MAX_HOSTS = 64
MOST_SOCKET_PATH_BYTES = 107
"""The most that the path of a unix socket may have, on Linux."""


class Topology(Enum):
    """What the hosts of the address are."""

    SERVER = "server"
    SENTINEL = "sentinel"
    CLUSTER = "cluster"


_DEFAULT_PORT = {Topology.SERVER: 6379, Topology.SENTINEL: 26379, Topology.CLUSTER: 6379}


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisUrl:
    """A parsed address. `service` is what the Sentinels call it; `hosts` is empty for `unix://`.

    User, password and database are those of Sentinels or a Redis Cluster. For one server they are
    left out here: redis-py reads them from the URL itself.
    """

    topology: Topology
    hosts: tuple[tuple[str, int], ...]
    has_tls: bool = False
    username: str | None = None
    password: str | None = None
    service: str = ""
    db: int = 0


def parse_redis_url(url: str) -> RedisUrl:
    """Return the parts. Raises `ValueError` in words for anything that is no such address."""
    parts = urlsplit(url)
    if parts.scheme == "unix":
        _check_socket(parts)
        return RedisUrl(topology=Topology.SERVER, hosts=())
    base, plus, kind = parts.scheme.partition("+")
    if base not in ("redis", "rediss") or (plus and kind not in ("sentinel", "cluster")):
        raise ValueError(f"{parts.scheme!r} is no scheme of Redis")
    topology = Topology(kind) if plus else Topology.SERVER
    if topology is Topology.SERVER:
        hosts: tuple[tuple[str, int], ...] = (_host(parts.netloc.rpartition("@")[2], topology),)
        if (number := parts.path.strip("/")) and not number.isdecimal():
            raise ValueError(f"{number!r} is no number of a database")
        return RedisUrl(topology=topology, hosts=hosts, has_tls=base == "rediss")
    login, _, listed = parts.netloc.rpartition("@")
    username, has_password, password = login.partition(":")
    hosts = tuple(_host(host, topology) for host in listed.split(","))
    if len(hosts) > MAX_HOSTS:
        raise ValueError(f"{len(hosts)} hosts: wanted at most {MAX_HOSTS}")
    service, db = _service_and_db(parts, topology)
    return RedisUrl(
        topology=topology,
        hosts=hosts,
        has_tls=base == "rediss",
        username=unquote(username) or None,
        password=unquote(password) if has_password else None,
        service=service,
        db=db,
    )


def _check_socket(parts: SplitResult) -> None:
    path = unquote(parts.path)
    if parts.netloc.rpartition("@")[2] or not path.strip("/"):
        raise ValueError("wanted the absolute path of a socket: unix:///path")
    size = len(os.fsencode(path))
    if size > MOST_SOCKET_PATH_BYTES:
        raise ValueError(
            f"the path of the socket has {size} bytes: wanted at most {MOST_SOCKET_PATH_BYTES}"
        )


def _host(text: str, topology: Topology) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    port = _DEFAULT_PORT[topology] if parts.port is None else parts.port
    if port == 0:
        raise ValueError("0 is no port")
    # redis-py takes a URL without a host for localhost; in a list it is a comma too many.
    if not parts.hostname and topology is not Topology.SERVER:
        raise ValueError("a host is missing")
    return parts.hostname or "localhost", port


def _service_and_db(parts: SplitResult, topology: Topology) -> tuple[str, int]:
    path = parts.path.strip("/")
    if parts.query or parts.fragment:
        raise ValueError("options are only possible with redis:// and rediss://")
    if topology is Topology.CLUSTER:
        if path not in ("", "0"):
            raise ValueError("a Redis Cluster has database 0 alone")
        return "", 0
    service, _, db = path.partition("/")
    if not service:
        raise ValueError("the service's name is missing: wanted redis+sentinel://hosts/service/db")
    return unquote(service), int(db or 0)
