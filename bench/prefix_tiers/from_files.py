"""The time to a first token where files of another node have the start of a prompt.

The other node has used it twice, and evicted it from its pool and from host memory since.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
from itertools import count
from pathlib import Path

from bench.engine.__main__ import synthetic_prompt
from bench.prefix_tiers.in_one_engine import BLOCK_BYTES
from bench.prefix_tiers.pulled import BLOCK_SIZE, TOLD_WITHIN_S, first_token_ms
from bench.running_cluster import POLL_S, RunningCluster, started_cluster

LANE = "shm"
OTHERS_OF_A_ROUND = 3
"""How many other prompts are used twice after each: host memory holds two, the pool one."""
AT_START = """
from engine.core.blocks.disk_index import DiskIndex
from engine.core.prefix_transfers import PrefixTransfers

def count_sent(transfers, source_ids, num_read, count=PrefixTransfers.count_sent):
    with open({sent!r}, "a") as told:
        told.write(f"{{num_read}}\\n")
    count(transfers, source_ids, num_read)

PrefixTransfers.count_sent = count_sent
DiskIndex.take_others = lambda index, others: None
"""
"""Nodes tell how many blocks of each pull came out of files. On one machine they would read each
other's files, and pull nothing."""
_SHORT = [3, 4, 5]


async def measure(num_tokens: int, num_rounds: int, folder: Path) -> dict[str, float]:
    """Return the figures. Raises `RuntimeError` if what should come from files did not."""
    print("pulled out of files", file=sys.stderr)
    memory = (num_tokens // BLOCK_SIZE + 2) * BLOCK_BYTES
    flags = (
        *("--mixed", "2", "--placement-policy", "round_robin", "--kv-transport", LANE),
        *("--kv-cache-memory", str(memory), "--prefix-host-memory", str(2 * memory)),
        *("--prefix-disk", str(folder), "--prefix-disk-size", str(64 * memory)),
    )
    sent = folder.with_name("sent")
    async with started_cluster(flags, at_start=AT_START.format(sent=str(sent))) as cluster:
        computed, pulled = await ask_in_turns(cluster, num_tokens, num_rounds)
    check_sent(sent, num_tokens // BLOCK_SIZE * num_rounds)
    ratio = statistics.median(pulled) / statistics.median(computed)
    return {
        "pulled_disk_ms": round(statistics.median(pulled), 1),
        "disk_over_computed": round(ratio, 3),
    }


async def ask_in_turns(
    cluster: RunningCluster, num_tokens: int, num_rounds: int
) -> tuple[list[float], list[float]]:
    """Return the times, in ms, of prompts that the first node computes, and the second pulls."""
    computed: list[float] = []
    pulled: list[float] = []
    numbers = count(1)
    num_whole = num_tokens // BLOCK_SIZE * BLOCK_SIZE

    async def ask_first(prompt: list[int], num_cached: int) -> float:
        took_ms = await first_token_ms(cluster, prompt, num_cached)
        await first_token_ms(cluster, _SHORT, 0)  # the turn of the second node
        return took_ms

    for _ in range(num_rounds):
        num_files = await _num_files(cluster)
        start = synthetic_prompt(num_tokens, next(numbers))
        computed.append(await ask_first([*start, 5], 0))
        await ask_first([*start, 6], num_whole)
        for _ in range(OTHERS_OF_A_ROUND):
            other = synthetic_prompt(num_tokens, next(numbers))
            await ask_first([*other, 5], 0)
            await ask_first([*other, 6], num_whole)
        await _until_written(cluster, num_files + num_whole // BLOCK_SIZE)
        await first_token_ms(cluster, _SHORT, 0)  # the turn of the first node
        pulled.append(await first_token_ms(cluster, [*start, 7], num_whole))
    return computed, pulled


def check_sent(told: Path, num_blocks: int) -> None:
    """Raise `RuntimeError` unless the nodes have told of so many blocks out of files."""
    num_sent = sum(map(int, told.read_text().split())) if told.exists() else 0
    if num_sent < num_blocks:
        raise RuntimeError(f"{num_sent} blocks came out of files, wanted {num_blocks}")


async def _num_files(cluster: RunningCluster) -> int:
    return sum(node["num_prefix_disk_blocks"] for node in (await cluster.nodes()).values())


async def _until_written(cluster: RunningCluster, num_files: int) -> None:
    """Wait for the heartbeat that tells of so many files."""
    async with asyncio.timeout(TOLD_WITHIN_S):
        while True:
            if await _num_files(cluster) >= num_files:
                return
            await asyncio.sleep(POLL_S)
