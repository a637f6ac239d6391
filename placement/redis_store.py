"""The placement store on Redis.

Keys, all under `pdserve:{cluster}:` and all with an expiry of their own. In a Redis Cluster the
braces are written, as a hash tag: all keys are in one slot. Elsewhere they are not.

    node:{node id}                  a lease: record and load as JSON
    epoch:{node id}                 the last epoch given to this node, for an hour behind its lease
    nodes, placements               indices of the two families
    placement:{request}/{attempt}   where an attempt runs
    leader                          a lease: the router that decides about roles
    move                            the last change of a role: number, whether it is open, what

`leave`, `record` and `stop_leading` remove what they name; the rest expires when its owner stops
renewing it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from redis.asyncio import Redis
from redis.commands.core import AsyncScript
from redis.exceptions import (
    AuthenticationError,
    MovedError,
    NoPermissionError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)
from redis.exceptions import TimeoutError as RedisTimeoutError

from common.errors import PlacementUnavailable, StaleEpoch
from common.files.keys_folder import Keys
from common.ids import AttemptId, Incarnation
from common.nodes import NodeLoad, NodeRecord, Role
from common.settings.redis_url import Topology, parse_redis_url
from placement import scripts
from placement.records import (
    MAX_VALUE_BYTES,
    Listed,
    NodeListing,
    decode_leadership,
    decode_move,
    decode_placement,
    encode_move,
    encode_node,
    encode_placement,
    encode_router,
)
from placement.redis_primary import RedisPrimary
from placement.redis_tls import is_untrusted
from placement.store import (
    Leadership,
    LiveNode,
    Placement,
    PlacementForbidden,
    PlacementRefused,
    PlacementSlow,
    RoleMove,
)

log = logging.getLogger("pdserve.placement")

CALL_TIMEOUT_S = 0.5
EPOCH_MEMORY_S = 3600.0
MAX_ENTRIES = 10_000
VALUES_PER_CALL = 128
"""Values that one call reads, and that are decoded before the event loop turns."""
KEEPS_KEYS = "noeviction"
"""The maxmemory-policy that refuses writes instead: the others drop keys that have an expiry."""
_NEVER = re.compile(
    "unknown (redis )?command|db index is out of range|select is not", re.IGNORECASE
)
"""Refusals that no wait changes: renamed commands, and databases that the server has not."""
_IN_CLEAR = " (a port without TLS is silent to rediss://: wanted redis://, or the port of TLS)"
_IN_TLS = " (a port of TLS ends a connection without it: wanted rediss://, or another port)"
_TOO_OLD = "not allowed after non deterministic commands"
"""The refusal by a server before Redis 5 of scripts that read the clock and write."""

_Entry = TypeVar("_Entry", LiveNode, Placement)
_Command = Callable[[Redis], Awaitable[Any]]


class RedisStore:
    """The store; every change is one script, so one round trip and atomic. All keys are declared.

    A listing reads the index and then the values, and writes nothing: a server that takes no
    writes still answers it.
    """

    def __init__(
        self,
        url: str,
        cluster: str,
        *,
        keys: Keys | None = None,
        call_timeout_s: float = CALL_TIMEOUT_S,
    ) -> None:
        """Make a client, which connects at its first call.

        `keys` have user and password, and for `rediss://` the certificates of both sides. Raises
        `ValueError` for an address that is no Redis URL, `ConfigError` for options of it that
        cannot be used.
        """
        parsed = parse_redis_url(url)
        is_tagged = parsed.topology is Topology.CLUSTER
        self._prefix = f"pdserve:{{{cluster}}}:" if is_tagged else f"pdserve:{cluster}:"
        self._call_timeout_s = call_timeout_s
        self._primary = RedisPrimary(url, self._prefix, keys, timeout_s=call_timeout_s)
        self._has_tls = parsed.has_tls
        self._has_answered = False
        self._skipped: dict[str, set[bytes]] = {}
        self._listed: Mapping[bytes, Listed] = {}
        """The nodes of the last listing, by their names."""

    async def next_epoch(self, node_id: str) -> int:
        keys = [self._key("epoch", node_id), self._key("node", node_id)]
        epoch = int(await self._run(scripts.NEXT_EPOCH, keys, [_ms(EPOCH_MEMORY_S)]))
        await self._warn_of_eviction()
        return epoch

    async def heartbeat(self, record: NodeRecord, load: NodeLoad, *, lease_s: float) -> None:
        """Register or renew; `StaleEpoch` when a later incarnation holds the lease."""
        args = _lease_args(record, load, lease_s)
        keys = self._lease_keys(record.node_id)
        _check_holder(record, int(await self._run(scripts.HEARTBEAT, keys, args)))

    async def take_role(
        self, record: NodeRecord, load: NodeLoad, *, lease_s: float, others: Sequence[str]
    ) -> bool:
        """Renew with another role; `StaleEpoch` when a later incarnation holds the lease."""
        args = [*_lease_args(record, load, lease_s), record.role.value]
        keys = self._lease_keys(record.node_id) + [self._key("node", name) for name in others]
        found = int(await self._run(scripts.TAKE_ROLE, keys, args))
        if found < 0:
            return False
        _check_holder(record, found)
        return True

    async def lease_left_s(self, node_id: str) -> float:
        key = self._key("node", node_id)
        return float(max(0, await self._call(lambda redis: redis.pttl(key)))) / 1000

    async def leave(self, incarnation: Incarnation) -> None:
        args = [incarnation.node_id, incarnation.epoch]
        await self._run(scripts.LEAVE, self._lease_keys(incarnation.node_id)[:2], args)

    async def live_nodes(self) -> list[LiveNode]:
        listing = NodeListing(self._listed)
        nodes = await self._read("nodes", "node", listing.decode)
        self._listed = listing.nodes
        named = [entry for name, entry in nodes if entry.record.node_id == name]
        return sorted(named, key=lambda node: node.record.node_id)

    async def record(
        self,
        placed: Sequence[Placement],
        gone: Sequence[AttemptId],
        *,
        router_id: str,
        ttl_s: float,
    ) -> None:
        names = [str(placement.attempt) for placement in placed]
        gone_names = [str(attempt) for attempt in gone]
        args = [router_id, _ms(ttl_s), len(placed)]
        for name, placement in zip(names, placed, strict=True):
            args += [name, encode_placement(placement)]
        args += gone_names
        keys = [self._prefix + "placements"]
        keys += [self._key("placement", name) for name in (*names, *gone_names)]
        await self._run(scripts.RECORD, keys, args)

    async def placements(self) -> list[Placement]:
        found = await self._read(
            "placements", "placement", lambda _, value: decode_placement(value)
        )
        named = [entry for name, entry in found if str(entry.attempt) == name]
        return sorted(named, key=lambda placement: placement.attempt)

    async def lead(self, router: Incarnation, *, lease_s: float) -> Leadership:
        """Take or renew; `PlacementRefused` where something else is stored there."""
        args = [encode_router(router), _ms(lease_s), _ms(EPOCH_MEMORY_S)]
        leader, last_move = await self._run(scripts.LEAD, self._move_keys(), args)
        try:
            return decode_leadership(leader, last_move)
        except ValueError as wrong:
            raise PlacementRefused(f"the leader's lease is not one of pdserve: {wrong}") from wrong

    async def begin_move(
        self, router: Incarnation, node: Incarnation, role: Role
    ) -> RoleMove | None:
        args = [encode_router(router), encode_move(node, role), _ms(EPOCH_MEMORY_S)]
        written = await self._run(scripts.BEGIN_MOVE, self._move_keys(), args)
        return decode_move(written) if written else None

    async def end_move(self, router: Incarnation, number: int) -> bool:
        args = [encode_router(router), number, _ms(EPOCH_MEMORY_S)]
        return bool(await self._run(scripts.END_MOVE, self._move_keys(), args))

    async def stop_leading(self, router: Incarnation) -> None:
        await self._run(scripts.STOP_LEADING, self._move_keys()[:1], [encode_router(router)])

    async def close(self) -> None:
        await self._primary.close()

    async def _warn_of_eviction(self) -> None:
        """Log that the server drops keys when its memory is full, so that nodes disappear.

        A server that does not answer INFO, or not this user, is not judged.
        """
        try:
            memory = await self._call(lambda redis: redis.info("memory"))
        except PlacementUnavailable:
            return
        policy = memory.get("maxmemory_policy", KEEPS_KEYS)
        if memory.get("maxmemory") and policy != KEEPS_KEYS:
            log.warning(
                "Redis drops leases and placements when its memory is full (maxmemory-policy %s): "
                "wanted %s",
                policy,
                KEEPS_KEYS,
            )

    def _key(self, family: str, name: str) -> str:
        return f"{self._prefix}{family}:{name}"

    def _lease_keys(self, node_id: str) -> list[str]:
        return [self._key("node", node_id), self._prefix + "nodes", self._key("epoch", node_id)]

    def _move_keys(self) -> list[str]:
        return [self._prefix + "leader", self._prefix + "move"]

    async def _read(
        self, index: str, family: str, decode: Callable[[bytes, bytes], _Entry]
    ) -> list[tuple[str, _Entry]]:
        names: list[bytes] = await self._call(
            lambda redis: redis.zrange(self._prefix + index, -MAX_ENTRIES, -1)
        )
        if not names:
            return []
        entries: list[tuple[str, _Entry]] = []
        skipped: set[bytes] = set()
        before_name = self._key(family, "").encode()
        # Neither the server nor the event loop stands still for the whole of a long listing.
        for first in range(0, len(names), VALUES_PER_CALL):
            part = names[first : first + VALUES_PER_CALL]
            keys = [before_name + name for name in part]
            # One byte more than a record may have, so that too long ones are recognised.
            values: list[bytes] = await self._run(scripts.READ_VALUES, keys, [MAX_VALUE_BYTES])
            for name, value in zip(part, values, strict=True):
                if not value:  # expired, or of another type
                    continue
                try:
                    entries.append((name.decode(), decode(name, value)))
                except ValueError as wrong:
                    skipped.add(name)
                    if name not in self._skipped.get(family, ()):
                        log.warning("skipped %s %r in the placement store: %s", family, name, wrong)
        self._skipped[family] = skipped
        return entries

    async def _run(self, script: str, keys: Sequence[str | bytes], args: Sequence[Any]) -> Any:
        return await self._call(lambda redis: AsyncScript(redis, script)(keys=keys, args=args))

    async def _call(self, command: _Command) -> Any:
        num_cancels = _num_cancels()
        try:
            async with asyncio.timeout(self._call_timeout_s):
                answer = await self._on_primary(command)
            self._has_answered = True
            return answer
        except (TimeoutError, RedisTimeoutError) as late:
            hint = "" if self._has_answered or not self._has_tls else _IN_CLEAR
            late_by = f"Redis did not answer within {self._call_timeout_s} s{hint}"
            raise PlacementSlow(late_by) from late
        except (AuthenticationError, NoPermissionError) as refused:
            raise PlacementForbidden(f"Redis refused this process: {refused}") from refused
        except ResponseError as refused:
            if _TOO_OLD in str(refused):
                raise PlacementForbidden("Redis is too old: wanted Redis 5 or newer") from refused
            if _NEVER.search(str(refused)):
                raise PlacementForbidden(f"Redis cannot serve this process: {refused}") from refused
            raise PlacementRefused(f"Redis refused a call: {refused}") from refused
        except (RedisError, OSError) as away:
            if is_untrusted(away):
                raise PlacementForbidden(f"Redis is not trusted: {away}") from away
            hint = "" if self._has_answered or self._has_tls or not _is_ended(away) else _IN_TLS
            raise PlacementUnavailable(f"Redis is unreachable: {_why(away)}{hint}") from away
        finally:
            # redis-py may swallow a cancellation during its own work; the task must still end by
            # it.
            if _num_cancels() > num_cancels:
                raise asyncio.CancelledError

    async def _on_primary(self, command: _Command) -> Any:
        try:
            try:
                return await command(await self._primary.client())
            except RedisError as error:
                if not _is_former_primary(error):
                    raise
            # Nothing was done: another server takes writes now.
            await self._primary.reconnect()
            return await command(await self._primary.client())
        except BaseException:
            self._primary.doubt()
            raise


def _is_former_primary(error: RedisError) -> bool:
    """Return whether another server takes writes now. A script's error has it in its text."""
    is_in_script = isinstance(error, ResponseError) and "-READONLY" in str(error)
    return is_in_script or isinstance(error, MovedError | ReadOnlyError)


def _num_cancels() -> int:
    task = asyncio.current_task()
    return 0 if task is None else task.cancelling()


def _lease_args(record: NodeRecord, load: NodeLoad, lease_s: float) -> list[Any]:
    value = encode_node(LiveNode(record=record, load=load))
    memory_s = max(EPOCH_MEMORY_S, lease_s)
    return [record.node_id, record.epoch, value, _ms(lease_s), _ms(memory_s)]


def _check_holder(record: NodeRecord, epoch: int) -> None:
    """Raise `StaleEpoch` for the epoch of a later incarnation; 0: this one holds the lease."""
    if epoch:
        raise StaleEpoch(
            f"{Incarnation(record.node_id, epoch)} holds the lease of {record.node_id}"
        )


def _ms(span_s: float) -> int:
    return max(1, round(span_s * 1000))


def _is_ended(away: Exception) -> bool:
    """Return whether the other side ended a connection that it had accepted."""
    return re.search("reset by peer|broken pipe|closed by server", str(away), re.I) is not None


def _why(away: Exception) -> str:
    """Return redis-py's words for a connection that cannot be made, without numbers of errors."""
    found = re.fullmatch(r"Error (-?\d+) connecting to (.*?)\. (.*?)\.?", str(away))
    if found is None:
        return str(away)
    number, address, said = int(found[1]), found[2], found[3]
    return f"{address}: {os.strerror(number) if number > 0 else said}"
