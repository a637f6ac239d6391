"""Host blocks: allocated, released, never twice."""

from __future__ import annotations

import pytest

from engine.core.blocks.host_pool import HostPool


def test_places_are_taken_and_given_back() -> None:
    pool = HostPool(3)
    first = pool.allocate(2)
    assert (pool.num_free, pool.num_used, len(set(first))) == (1, 2, 2)
    (last,) = pool.allocate(1)
    assert {*first, last} == {0, 1, 2}
    pool.release(first)
    assert (pool.num_free, pool.num_used) == (2, 1)
    assert set(pool.allocate(2)) == set(first)
    pool.check()


def test_a_pool_without_places_gives_none() -> None:
    pool = HostPool(0)
    assert pool.allocate(0) == []
    pool.release([])
    with pytest.raises(ValueError, match="asked for 1 host blocks, 0 are free"):
        pool.allocate(1)
    pool.check()


@pytest.mark.parametrize("released", [[2], [0, 0]])
def test_a_place_is_not_given_back_in_vain(released: list[int]) -> None:
    pool = HostPool(3)
    assert pool.allocate(2) == [0, 1]
    with pytest.raises(ValueError, match="has no owner"):
        pool.release(released)
    pool.check()


def test_the_checker_notices_a_lost_and_a_doubled_place() -> None:
    lost, doubled = HostPool(3), HostPool(3)
    lost._free.pop()
    doubled._free += doubled.allocate(1)
    for pool in (lost, doubled):
        with pytest.raises(AssertionError, match="a host block is lost"):
            pool.check()
