"""The two stores behind one handle, with time and disasters in the test's hand."""

from __future__ import annotations

from typing import Protocol

import redis

from common.ids import AttemptId, Incarnation
from common.nodes import KVLink, NodeLoad, NodeRecord, Role
from placement.redis_store import RedisStore
from placement.store import Placement, PlacementStore
from tests.support.clocks.manual_clock import ManualClock
from tests.support.stores.memory_store import MemoryStore

LINKS = (KVLink("d1", "shm", True, 1 << 40), KVLink("d2", "zmq", False, 7))


class World(Protocol):
    """One cluster's store, as two of its users see it."""

    first: PlacementStore
    second: PlacementStore

    def advance(self, by_s: float) -> None:
        """Let `by_s` seconds pass for everything that expires."""

    def empty(self) -> None:
        """What FLUSHALL does."""

    def num_keys(self) -> int:
        """Everything that is still held, but for epochs, which are remembered for an hour."""


class MemoryWorld:
    """Both users share the one in-memory store."""

    def __init__(self) -> None:
        self._clock = ManualClock(100.0)
        self._store = MemoryStore(self._clock)
        self.first: PlacementStore = self._store
        self.second: PlacementStore = self._store

    def advance(self, by_s: float) -> None:
        self._clock.advance(by_s)

    def empty(self) -> None:
        self._store.clear()

    def num_keys(self) -> int:
        return len(self._store.nodes) + self._store.num_placements


class RedisWorld:
    """Two clients of one real server. Time passes by shortening every expiry, not by waiting."""

    def __init__(self, url: str) -> None:
        self.first: PlacementStore = RedisStore(url, "contract", call_timeout_s=60.0)
        self.second: PlacementStore = RedisStore(url, "contract", call_timeout_s=60.0)
        self.client = redis.Redis.from_url(url)

    def advance(self, by_s: float) -> None:
        for key in self.client.keys("*"):
            if self.client.type(key) == b"zset":
                for name in self.client.zrange(key, 0, -1):
                    assert isinstance(name, bytes)
                    self.client.zincrby(key, -by_s * 1000, name)
            self.client.pexpire(key, max(0, round(self.client.pttl(key) - by_s * 1000)))

    def empty(self) -> None:
        self.client.flushall()

    def num_keys(self) -> int:
        return sum(b":epoch:" not in key for key in self.client.keys("*"))


def record(node_id: str = "decode-0", epoch: int = 1, role: Role = Role.DECODE) -> NodeRecord:
    return NodeRecord(
        node_id=node_id,
        epoch=epoch,
        role=role,
        control_address="127.0.0.1:7001",
        model="tiny",
        fingerprint="ab" * 16,
        block_size=64,
        num_blocks=100,
        max_num_seqs=8,
        max_model_len=2048,
        metrics_address="127.0.0.1:9100",
        kv_description="31 layers, with mtp",
        kv_cache_bytes=1 << 33,
        device="NVIDIA H100 80GB HBM3, GPU 0",
        speculative_method="mtp",
        version="0.9.1",
        protocol=3,
        kv_protocol=4,
    )


def load(
    num_running: int = 0, *, is_draining: bool = False, kv_links: tuple[KVLink, ...] = LINKS
) -> NodeLoad:
    return NodeLoad(
        free_blocks=90,
        free_seats=8 - num_running,
        num_running=num_running,
        num_waiting=2,
        queued_tokens=30,
        is_draining=is_draining,
        new_token_ratio=0.5,
        num_preemptions=4,
        num_recomputed_tokens=300,
        num_drafted=20,
        num_accepted=15,
        num_cached_blocks=40,
        num_reserved_blocks=1,
        num_receiving_blocks=2,
        num_quarantined_blocks=3,
        kv_links=kv_links,
        kv_unreachable=(Incarnation("d3", 2),),
    )


def placement(choice_id: str = "req-1", attempt: int = 1, router_id: str = "r1") -> Placement:
    return Placement(
        attempt=AttemptId(choice_id, attempt),
        router_id=router_id,
        decode=Incarnation("decode-0", 1),
        prefill=None,
        reason="least loaded",
    )


async def place(store: PlacementStore, placed: Placement, *, ttl_s: float = 60) -> None:
    """Record one placement."""
    await store.record([placed], [], router_id=placed.router_id, ttl_s=ttl_s)


async def unplace(store: PlacementStore, attempt: AttemptId, *, router_id: str = "r1") -> None:
    """Record that one is gone."""
    await store.record([], [attempt], router_id=router_id, ttl_s=60)
