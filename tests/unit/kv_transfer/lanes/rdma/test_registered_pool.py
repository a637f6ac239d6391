"""The places of a pool's slabs: no address is used twice, and what is not used is given back."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest

from kv_transfer.lanes.pool_memory import Bytes
from kv_transfer.lanes.rdma.aliases import Aliases
from kv_transfer.lanes.rdma.mooncake_engine import RdmaUnavailable
from kv_transfer.lanes.rdma.registered_pool import RegisteredPool
from kv_transfer.lanes.rdma.slabs import slabbed
from tests.support.kv.fake_engine import FakeEngine
from tests.support.kv.pool_shapes import kv_pool

NUM_LAYERS, NUM_BLOCKS, PIECE = 2, 8, 64
REGIONS_PER_SLAB = 2 * NUM_LAYERS


def memory() -> Bytes:
    pool = np.frombuffer(mmap.mmap(-1, NUM_LAYERS * 2 * NUM_BLOCKS * PIECE), np.uint8)
    return pool.reshape(NUM_LAYERS, 2, NUM_BLOCKS, PIECE)


def registered(engine: FakeEngine) -> RegisteredPool:
    pool = kv_pool(memory())
    return RegisteredPool(pool, slabbed(pool.shape, max_slabs=2), engine)


def move_and_fence(pool: RegisteredPool, slab: int) -> None:
    pool.move(slab)
    pool.fence(slab)


def test_slabs_that_are_fenced_together_share_an_alias() -> None:
    engine = FakeEngine()
    pool = registered(engine)
    (first,) = set(pool.starts)
    for slab in range(2):
        move_and_fence(pool, slab)
    (second,) = set(pool.starts)
    assert second != first
    assert len(engine.regions) == 2 * REGIONS_PER_SLAB
    pool.close()
    assert engine.regions == {}


def test_fences_are_not_limited_and_no_address_is_used_twice() -> None:
    engine = FakeEngine()
    pool = registered(engine)
    used = [{start} for start in pool.starts]
    num_mapped = _num_mappings()
    for number in range(2000):
        slab = number % 3 % 2
        move_and_fence(pool, slab)
        assert pool.starts[slab] not in used[slab]
        used[slab].add(pool.starts[slab])
        assert pool.is_writable
    # Reservations side by side are one mapping.
    assert _num_mappings() - num_mapped < 50
    pool.close()
    assert engine.regions == {}


class StuckEngine(FakeEngine):
    """An engine that keeps the key at `address`."""

    address = 0

    def unregister(self, address: int) -> None:
        if address == self.address:
            raise OSError("it stays registered")
        super().unregister(address)


def test_a_key_that_stays_keeps_no_other_one() -> None:
    fenced, closed = StuckEngine(), StuckEngine()
    pool, another = registered(fenced), registered(closed)
    for engine in (fenced, closed):
        engine.address = min(engine.regions)
    with pytest.raises(OSError, match="it stays"):
        move_and_fence(pool, 0)
    assert len(fenced.regions) == 1 + 2 * REGIONS_PER_SLAB
    another.close()
    assert set(closed.regions) == {closed.address}


def test_a_key_that_stays_after_a_half_registration_keeps_no_other_one() -> None:
    class FirstStuckEngine(StuckEngine):
        def register(self, address: int, num_bytes: int) -> None:
            super().register(address, num_bytes)
            self.address = self.address or address

    engine = FirstStuckEngine()
    engine.fails_after = REGIONS_PER_SLAB - 1
    with pytest.raises(RdmaUnavailable, match="it stays"):
        registered(engine)
    assert set(engine.regions) == {engine.address}


def test_a_slab_is_registered_at_both_addresses_while_it_moves() -> None:
    engine = FakeEngine()
    pool = registered(engine)
    before = set(engine.regions)
    pool.move(1)
    assert before < set(engine.regions)
    assert len(engine.regions) == 3 * REGIONS_PER_SLAB
    assert pool.is_writable
    pool.fence(1)
    assert len(before - set(engine.regions)) == REGIONS_PER_SLAB
    pool.close()


def test_a_slab_that_cannot_be_registered_twice_moves_when_it_is_fenced() -> None:
    """The limit of locked memory is too low for both; this node still reads it where it is."""
    engine = FakeEngine()
    pool = registered(engine)
    start = pool.starts[0]
    engine.fails_after = 1
    pool.move(0)
    assert pool.starts[0] != start
    assert pool.placed.starts[0] == start
    assert len(engine.regions) == 2 * REGIONS_PER_SLAB
    engine.fails_after = None
    pool.fence(0)
    assert pool.placed.starts == pool.starts
    assert len(engine.regions) == 2 * REGIONS_PER_SLAB
    assert pool.is_writable
    pool.close()
    assert engine.regions == {}


def test_a_slab_that_cannot_be_registered_again_ends_the_lane() -> None:
    engine = FakeEngine()
    pool = registered(engine)
    engine.fails_after = 1
    move_and_fence(pool, 0)
    assert not pool.is_writable
    assert len(engine.regions) == REGIONS_PER_SLAB
    pool.close()


def test_a_process_without_addresses_writes_no_slab_that_is_fenced_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = FakeEngine()
    pool = registered(engine)

    def out_of_addresses(self: Aliases) -> int:
        raise OSError("no address is left")

    monkeypatch.setattr(Aliases, "make", out_of_addresses)
    move_and_fence(pool, 0)
    assert not pool.is_writable
    assert "cannot send KV to this one by RDMA: no address is left" in caplog.text
    assert len(engine.regions) == 2 * REGIONS_PER_SLAB
    move_and_fence(pool, 1)  # It shares the last alias.
    assert len(engine.regions) == 2 * REGIONS_PER_SLAB
    move_and_fence(pool, 0)
    assert len(engine.regions) == REGIONS_PER_SLAB
    assert "slab 0 of the KV pool is lost to RDMA" in caplog.text
    pool.close()
    assert engine.regions == {}


def _num_mappings() -> int:
    return len(Path("/proc/self/maps").read_text().splitlines())
