"""The Redis server that takes writes, looked up again whenever it may be another one.

A cluster's keys lie in one hash slot, so in a Redis Cluster one server has all of them, and one
connection pool is enough with every topology. Sentinels, or the nodes of a Redis Cluster, are all
asked at once and the first answer counts: one that is silent delays nothing. An outdated answer
leads to a server that refuses, and they are asked again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any
from urllib.parse import parse_qs, urlsplit

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.connection import Connection, SSLConnection, parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.crc import key_slot
from redis.exceptions import AuthenticationError, RedisError
from redis.exceptions import ConnectionError as RedisConnectionError

from common.errors import ConfigError
from common.files.keys_folder import Keys
from common.settings.redis_url import MAX_HOSTS, RedisUrl, Topology, parse_redis_url
from placement.redis_tls import RedisTls, RedisTlsConnection

_MAX_CONNECTIONS = 16
_OPTIONS = ("db", "client_name", "health_check_interval", "socket_keepalive", "socket_timeout")
_TLS_OPTIONS = (
    "ssl_ca_certs",
    "ssl_certfile",
    "ssl_keyfile",
    "ssl_cert_reqs",
    "ssl_check_hostname",
)

Host = tuple[str, int]


class RedisPrimary:
    """The clients of one store: `client` is connected to the server that takes writes."""

    def __init__(self, url: str, prefix: str, keys: Keys | None, *, timeout_s: float) -> None:
        """Parse `url`; `prefix` is what all keys begin with.

        Raises `ValueError` for an address that is no Redis URL, `ConfigError` for options of it
        that cannot be used.
        """
        self._url = parse_redis_url(url)
        self._prefix = prefix
        self._connection = {
            "socket_connect_timeout": timeout_s,
            "socket_timeout": timeout_s,
            "protocol": 2,
            **_address_and_proofs(url, self._url, keys),
        }
        _check_options(url, self._connection)
        self._timeout_s = timeout_s
        self._is_fixed = self._url.topology is Topology.SERVER
        self._known: tuple[Host, ...] = self._url.hosts
        self._address: Host | None = None
        self._is_doubtful = True
        self._looking = asyncio.Lock()
        self._client: Redis | None = self._connect({}) if self._is_fixed else None

    async def client(self) -> Redis:
        """Return a client of the server. Raises redis-py's errors when nobody names one."""
        if self._client is not None and (self._is_fixed or not self._is_doubtful):
            return self._client
        async with self._looking:
            if self._client is None or self._is_doubtful:
                self._client = await self._connected(await self._look_up())
            return self._client

    def doubt(self) -> None:
        """Look the server up at the next call: the last one failed."""
        self._is_doubtful = True

    async def reconnect(self) -> None:
        """Leave a server that answered that it does not take writes."""
        self._is_doubtful = True
        if self._is_fixed and self._client is not None:
            # The name in the URL may mean another server by now.
            await self._client.connection_pool.disconnect(inuse_connections=False)

    async def close(self) -> None:
        """Close all connections."""
        if self._client is not None:
            await self._client.aclose()

    async def _connected(self, address: Host) -> Redis:
        """Return a client of this address, the present one where it is the same."""
        self._is_doubtful = False
        if address == self._address and self._client is not None:
            return self._client
        if self._client is not None:
            await self._client.aclose()
        self._address = address
        return self._connect({"host": address[0], "port": address[1]})

    def _connect(self, address: Mapping[str, Any]) -> Redis:
        return Redis.from_pool(
            BlockingConnectionPool(
                # Calls beyond the connections wait for one; the wait counts in the call's time.
                timeout=self._timeout_s,
                max_connections=_MAX_CONNECTIONS,
                # A pooled connection may have ended with its server: try once more.
                retry=Retry(NoBackoff(), 1),
                **{**self._connection, **address},
            )
        )

    async def _look_up(self) -> Host:
        if self._url.topology is Topology.SENTINEL:
            return await self._first_answer(self._url.hosts, self._ask_sentinel)
        return await self._first_answer(self._known, self._ask_node)

    async def _first_answer(
        self, hosts: Sequence[Host], ask: Callable[[Host], Awaitable[Host]]
    ) -> Host:
        asking = [asyncio.ensure_future(ask(host)) for host in hosts]
        failures: list[Exception] = []
        try:
            for answer in asyncio.as_completed(asking):
                try:
                    return await answer
                except (RedisError, OSError) as failed:
                    failures.append(failed)
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
        refusals = [failed for failed in failures if isinstance(failed, AuthenticationError)]
        if refusals:
            raise refusals[0]
        reasons = "; ".join(sorted({str(failed) for failed in failures}))
        raise RedisConnectionError(f"nobody names the server: {reasons}") from failures[0]

    async def _ask_sentinel(self, host: Host) -> Host:
        question = ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._url.service)
        try:
            named = await self._ask(host, question)
        except AuthenticationError:
            # Sentinels often have no users where their Redis has some.
            named = await self._ask(host, question, username=None, password=None)
        if not named:
            raise RedisConnectionError(f"a Sentinel knows no service {self._url.service!r}")
        return _text(named[0]), int(named[1])

    async def _ask_node(self, host: Host) -> Host:
        ranges = await self._ask(host, ("CLUSTER", "SLOTS"))
        nodes = [_reached(node, host) for _, _, *servers in ranges for node in servers]
        # Where the hosts of the URL are gone, those that they named are asked.
        self._known = tuple(dict.fromkeys((*self._url.hosts, *nodes)))[:MAX_HOSTS]
        slot = key_slot(self._prefix.encode())
        for first, last, owner, *_ in ranges:
            if first <= slot <= last:
                return _reached(owner, host)
        raise RedisConnectionError(f"no server of the Redis Cluster has slot {slot}")

    async def _ask(self, host: Host, question: tuple[str, ...], **changes: Any) -> Any:
        """Ask on a connection of its own, which is closed also where the call is cancelled."""
        options = {**self._connection, "db": 0, "host": host[0], "port": host[1], **changes}
        connection = options.pop("connection_class", Connection)(
            retry=Retry(NoBackoff(), 0), **options
        )
        try:
            await connection.connect()
            await connection.send_command(*question)
            return await connection.read_response()
        finally:
            await connection.disconnect(nowait=True)


def _reached(node: Sequence[Any], asked: Host) -> Host:
    """Return a node's address; one without a name is where the question was asked."""
    host = _text(node[0]) if node[0] else ""
    return (asked[0] if host in ("", "?") else host), int(node[1])


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _check_options(url: str, connection: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for options of a URL that no connection takes, or TLS cannot use."""
    has_tls = connection.get("connection_class") is SSLConnection
    known = [*_OPTIONS, *(_TLS_OPTIONS if has_tls else ())]
    for name in parse_qs(urlsplit(url).query, keep_blank_values=True):
        if name not in known:
            why = "" if has_tls else " (those of TLS with rediss:// and without --keys)"
            raise ConfigError(
                f"redis_url has the option {name!r}: wanted none but {', '.join(known)}{why}"
            )
    if has_tls:
        options = {name: value for name, value in connection.items() if name != "connection_class"}
        try:
            SSLConnection(**options).ssl_context.get()
        except (OSError, ValueError, RedisError) as wrong:
            reason = getattr(wrong, "strerror", None) or str(wrong)
            raise ConfigError(
                f"the options of redis_url cannot be used for TLS: {reason}"
            ) from wrong


def _address_and_proofs(url: str, parsed: RedisUrl, keys: Keys | None) -> dict[str, Any]:
    """Return a fixed server's address, and the credentials of both sides.

    A user and a password in the URL take precedence over those of the keys.
    """
    if parsed.topology is Topology.SERVER:
        try:
            address: dict[str, Any] = dict(parse_url(url))
        except ValueError as wrong:  # the value of an option: its other parts were read before
            raise ConfigError(f"an option of redis_url is wrong: {wrong}") from None
    else:
        address = {"db": parsed.db}
        login = {"username": parsed.username, "password": parsed.password}
        address |= {name: value for name, value in login.items() if value is not None}
        if parsed.has_tls:
            address["connection_class"] = SSLConnection
    if keys is None:
        return address
    address = {"username": keys.redis_user, "password": keys.redis_password, **address}
    if parsed.has_tls:
        address |= {"connection_class": RedisTlsConnection, "tls": RedisTls(keys)}
    return address
