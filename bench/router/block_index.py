"""What a router pays to know what nodes hold: `python -m bench.router.block_index --json`.

Nodes hold the beginnings of prompts of 1,000 blocks, of lengths of their own. Times are medians.

    keys_us         the keys of such a prompt out of its hashes, once for each prompt
    held_us         who holds how much of a prompt of 1,000 blocks, 1,000 nodes, in their pools
    held_below_us   the same where the last third of it is in host memory
    held_alike_us   the same where one system prompt is on every node and nothing else is alike
    report_us       one report of 2,048 blocks
    block_bytes     memory of the index for each block, of the last `--blocks` of them
    report_bytes    of each block in a message of a node
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
import tracemalloc
from collections.abc import Callable
from itertools import cycle

from common.ids import Incarnation
from common.kv.blocks import BlockHash, BlockKey, block_keys
from common.kv.tiers import Tier
from node.control.block_reports import MAX_REPORTED, BlockReports, CachedBlocks
from router.core.known.block_index import BlockIndex

NUM_NODES = 1000
NUM_BLOCKS = 1000
DEPTHS = (50, 120, 300, 550, 800, 1000)
NUM_ROUNDS = 200


def chain(rng: random.Random, length: int) -> list[BlockHash]:
    """Return hashes as of a prompt with so many blocks."""
    return [rng.randbytes(16) for _ in range(length)]


def median_us(work: Callable[[], object]) -> float:
    """Return the median time of `NUM_ROUNDS` calls."""
    spans = []
    for _ in range(NUM_ROUNDS):
        began_at_s = time.perf_counter()
        work()
        spans.append(time.perf_counter() - began_at_s)
    return round(1e6 * statistics.median(spans), 2)


def held_by(
    nodes: list[Incarnation],
    asked: tuple[BlockKey, ...],
    depths: list[int],
    pool_share: float = 1.0,
) -> BlockIndex:
    """Return an index in which each node holds the beginning of a prompt, so much in its pool."""
    index = BlockIndex()
    for node, depth in zip(nodes, depths, strict=True):
        num_in_pool = round(depth * pool_share)
        index.on_report(node, asked[:num_in_pool], ())
        index.on_report(node, asked[num_in_pool:depth], (), Tier.HOST)
    return index


def measured(num_blocks: int) -> dict[str, float]:
    """Return the figures."""
    rng = random.Random(7)
    nodes = [Incarnation(f"node-{number}", 1) for number in range(NUM_NODES)]
    hashes = chain(rng, NUM_BLOCKS)
    asked = block_keys(hashes)
    depths = [rng.choice(DEPTHS) for _ in nodes]
    different, below = held_by(nodes, asked, depths), held_by(nodes, asked, depths, 2 / 3)
    alike = held_by(nodes, asked, [DEPTHS[0]] * NUM_NODES)
    for index in (different, below):
        assert [index.held(asked).on(node) for node in nodes] == depths
    cached = CachedBlocks()
    cached.take({Tier.POOL: dict.fromkeys(chain(rng, MAX_REPORTED), True)})
    message = BlockReports(cached).next()
    assert message is not None
    reported = block_keys(chain(rng, MAX_REPORTED))

    def report() -> None:
        different.on_report(nodes[0], reported, ())
        different.on_report(nodes[0], (), reported)

    # A look-up that repeats the one before it is free: two equal prompts in turn are not.
    prompts = cycle([asked, block_keys(hashes)])
    figures = {
        "keys_us": median_us(lambda: block_keys(hashes)),
        "held_us": median_us(lambda: different.held(next(prompts))),
        "held_below_us": median_us(lambda: below.held(next(prompts))),
        "held_alike_us": median_us(lambda: alike.held(next(prompts))),
        "report_us": median_us(report) / 2,
        "report_bytes": round(message.ByteSize() / MAX_REPORTED, 2),
    }
    return figures | {"block_bytes": round(bytes_per_block(rng, nodes, num_blocks), 1)}


def bytes_per_block(rng: random.Random, nodes: list[Incarnation], num_blocks: int) -> float:
    """Return the memory of the index for each block, of which a tenth has a second holder.

    Every second report is of host memory.
    """
    index = BlockIndex()
    tracemalloc.start()
    for number in range(num_blocks // MAX_REPORTED):
        keys = [int.from_bytes(rng.randbytes(8)) for _ in range(MAX_REPORTED)]
        tier = Tier.HOST if number % 2 else Tier.POOL
        index.on_report(nodes[number % NUM_NODES], keys, (), tier)
        index.on_report(nodes[(number + 1) % NUM_NODES], keys[: MAX_REPORTED // 10], (), tier)
    size_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return size_bytes / len(index)


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument("--blocks", type=int, default=1_000_000, help="blocks in the index")
    arguments = parser.parse_args()
    figures = measured(arguments.blocks)
    if arguments.json:
        print(json.dumps(figures))
    else:
        for name, figure in figures.items():
            print(f"{name:16} {figure}")


if __name__ == "__main__":
    main()
