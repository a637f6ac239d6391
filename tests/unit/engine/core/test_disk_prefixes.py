"""What is written to disk ahead of its eviction from host memory, and in which order files go."""

from __future__ import annotations

import pytest

from common.kv.blocks import BlockHash
from engine.core.blocks.block_pool import BlockPool
from engine.core.blocks.disk_index import DiskIndex
from engine.core.blocks.disk_jobs import DiskFailure, DiskResult, DiskScan
from engine.core.blocks.host_pool import HostPool
from engine.core.disk_prefixes import MOST_BLOCKS_WRITTEN, DiskPrefixes
from engine.core.sequences.prefix_index import PrefixIndex
from engine.core.statistics import StepCounters

A, B, C = (letter * 16 for letter in (b"a", b"b", b"c"))


class Tiers:
    def __init__(self, num_host_blocks: int = 8, num_disk_blocks: int = 8) -> None:
        self.host_pool = HostPool(num_host_blocks)
        self.index = DiskIndex(num_disk_blocks * 4096, 4096)
        self.counters = StepCounters()
        prefixes = PrefixIndex(BlockPool(2), block_size=4, fingerprint="f", is_enabled=True)
        self.disk = DiskPrefixes(self.host_pool, prefixes, self.counters, self.index)

    def look(self, *own: BlockHash) -> None:
        self.disk.end_look(DiskResult(scan=DiskScan(own=own)), is_all=True)

    def keep(self, *hashes: BlockHash) -> None:
        self.host_pool.keep(self.host_pool.allocate(len(hashes)), hashes)

    def save(self) -> list[tuple[list[BlockHash], list[object]]]:
        """Write all that is to be written; return what was written and removed in each job."""
        jobs: list[tuple[list[BlockHash], list[object]]] = []
        while (write := self.disk.begin_write()) is not None:
            jobs.append((write.hashes, list(write.removed)))
            self.disk.end_write(write, DiskResult(len(write.hashes)))
            self.disk.check()
        return jobs


def test_nothing_is_written_before_it_is_known_what_is_there() -> None:
    tiers = Tiers()
    tiers.keep(A)
    assert tiers.save() == []
    tiers.look()
    assert tiers.save() == [([A], [])]


def test_what_is_on_disk_already_is_not_written() -> None:
    tiers = Tiers()
    tiers.look(A)
    tiers.keep(A, B)
    assert tiers.save() == [([B], [])]


def test_a_use_in_host_memory_is_one_of_the_file() -> None:
    tiers = Tiers(num_disk_blocks=2)
    tiers.look()
    tiers.keep(A, B)
    assert tiers.save() == [([A, B], [])]
    tiers.host_pool.note_use(A)
    assert tiers.save() == []
    tiers.keep(C)
    assert tiers.save() == [([C], [B])]


def test_what_a_small_disk_lost_is_written_again_after_a_use_and_not_without() -> None:
    tiers = Tiers(num_disk_blocks=1)
    tiers.look()
    tiers.keep(A)
    tiers.keep(B)
    assert tiers.save() == [([A], []), ([B], [A])]
    assert tiers.save() == []
    tiers.host_pool.note_use(A)
    assert tiers.save() == [([A], [B])]


def test_a_job_is_small_and_leaves_half_of_what_others_could_take() -> None:
    tiers = Tiers(num_host_blocks=64, num_disk_blocks=64)
    tiers.look()
    tiers.keep(*(bytes([n]) * 16 for n in range(64)))
    write = tiers.disk.begin_write()
    assert write is not None
    assert len(write.hashes) == MOST_BLOCKS_WRITTEN
    assert tiers.disk.begin_write() is None, "one at a time"
    few = Tiers(num_host_blocks=3)
    few.look()
    few.keep(A, B, C)
    assert few.save() == [([A], []), ([B], []), ([C], [])]


def test_what_was_not_written_is_tried_when_the_folder_was_seen_again() -> None:
    tiers = Tiers()
    tiers.look()
    tiers.keep(A, B)
    write = tiers.disk.begin_write()
    assert write is not None
    tiers.disk.end_write(write, DiskResult(1, failure=DiskFailure.ERROR))
    assert tiers.index.find(A) is not None
    assert tiers.index.find(B) is None
    assert tiers.save() == []
    tiers.look(A)
    assert tiers.save() == [([B], [])]


def test_files_beyond_the_bound_are_removed_though_nothing_is_written() -> None:
    tiers = Tiers(num_disk_blocks=1)
    tiers.look(A, B, C)
    assert tiers.save() == [([], [A, B])]
    assert tiers.counters.disk["removed"] == 2


@pytest.mark.parametrize("failure", list(DiskFailure))
def test_what_vanished_or_broke_is_forgotten_and_what_could_not_be_read_is_not(
    failure: DiskFailure,
) -> None:
    tiers = Tiers()
    tiers.look(A, B, C)
    read = tiers.disk.begin_read([A, B, C])
    tiers.disk.check()
    assert tiers.host_pool.num_used == 3
    tiers.disk.end_read(read, DiskResult(1, failure=failure))
    assert tiers.host_pool.num_used == 0
    assert [tiers.host_pool.find(one) is not None for one in (A, B, C)] == [True, False, False]
    is_known = [tiers.index.find(one) is not None for one in (A, B, C)]
    assert is_known == [True, failure is DiskFailure.ERROR, True]
    tiers.disk.check()


def test_a_read_is_a_use_of_the_file() -> None:
    tiers = Tiers(num_disk_blocks=2)
    tiers.look(A, B)
    tiers.disk.end_read(tiers.disk.begin_read([A]), DiskResult(1))
    tiers.keep(C)
    assert tiers.save() == [([C], [B])]


def test_no_more_is_read_than_half_of_host_memory_holds() -> None:
    tiers = Tiers()
    wanted = [bytes([n]) * 16 for n in range(6)]
    tiers.look(*wanted)
    found = tiers.disk.find_blocks(wanted)
    assert found is not None
    assert (found.hashes, found.num_blocks) == (wanted[:4], 4)
    tiers.disk.begin_read(wanted[:3])
    found = tiers.disk.find_blocks(wanted)
    assert found is not None
    assert (found.hashes, len(found.sought), found.num_blocks) == (wanted[3:4], 4, 4)


def test_what_is_here_of_a_prefix_does_not_give_way_for_the_rest() -> None:
    tiers = Tiers()
    wanted = [bytes([n]) * 16 for n in range(6)]
    tiers.look(*wanted[2:])
    tiers.keep(*wanted[:2])
    tiers.host_pool.allocate(3)
    found = tiers.disk.find_blocks(wanted)
    assert found is not None
    assert (found.hashes, found.num_blocks) == (wanted[2:4], 4)
    tiers.disk.begin_read(found.hashes)
    assert all(tiers.host_pool.find(one) is not None for one in wanted[:2])


def test_what_is_here_behind_what_is_read_counts_as_room_too() -> None:
    tiers = Tiers()
    wanted = [bytes([n]) * 16 for n in range(6)]
    tiers.look(*wanted[:3])
    tiers.keep(*wanted[3:])
    found = tiers.disk.find_blocks(wanted[:4])
    assert found is not None
    assert (found.hashes, found.num_blocks) == (wanted[:3], 4)
    found = tiers.disk.find_blocks(wanted)
    assert found is not None
    assert (found.hashes, found.num_blocks) == (wanted[:3], 4)
