"""What is read from disk for a pull of another node."""

from __future__ import annotations

from engine.core.blocks.disk_index import DiskIndex
from engine.core.blocks.disk_jobs import DiskResult, DiskScan
from node.flow.attempts.attempt_table import NodeAttempt
from node.flow.disk.prefix_disk import PrefixDisk
from node.flow.pulls.pull_cost import PullCost
from tests.support.engine.build import Engine

HASHES = [bytes([number]) * 16 for number in range(6)]


def resume(attempt: NodeAttempt) -> None:
    raise AssertionError(f"{attempt.id} does not wait")


def test_a_read_of_more_than_half_of_host_memory_is_for_a_pull_that_may_be_short() -> None:
    engine = Engine(
        num_blocks=8, num_host_blocks=8, keeps_prefixes=True, disk_index=DiskIndex(1 << 20, 1000)
    )
    prefixes = engine.scheduler.disk_prefixes
    prefixes.end_look(DiskResult(scan=DiskScan(own=tuple(HASHES))), is_all=True)
    disk = PrefixDisk(engine.scheduler, PullCost(1.0, float), resume)
    assert disk.find_for_pull(HASHES, 0.0, may_be_short=False) is None
    some = disk.find_for_pull(HASHES, 0.0, may_be_short=True)
    assert some is not None
    assert (some.hashes, some.num_blocks) == (HASHES[:4], 4)
    all_of_them = disk.find_for_pull(HASHES[:4], 0.0, may_be_short=False)
    assert all_of_them is not None
    assert all_of_them.hashes == HASHES[:4]
    disk = PrefixDisk(engine.scheduler, PullCost(1.0, lambda num_tokens: 0.0), resume)
    assert disk.find_for_pull(HASHES[:4], 0.0, may_be_short=True) is None, "computing is quicker"
