"""The time to a first token where another node of the machine has the start of a prompt."""

from __future__ import annotations

import asyncio
import statistics
import sys
from itertools import count

from bench.engine.__main__ import synthetic_prompt
from bench.prefix_tiers.in_one_engine import BLOCK_BYTES
from bench.running_cluster import POLL_S, RunningCluster, started_cluster
from common.settings.config import EngineConfig

LANES = ("zmq", "shm")
KNOWN_BLOCKS = "pdserve_router_known_blocks"
KNOWN_WITHIN_S = TOLD_WITHIN_S = 30.0
BLOCK_SIZE = EngineConfig().block_size
_NUM_WARM_UPS = 1


async def measure(num_tokens: int, num_rounds: int) -> dict[str, float]:
    """Return the figures of all lanes. Raises `RuntimeError` if what should be pulled was not."""
    computed: list[float] = []
    figures: dict[str, float] = {}
    shares: dict[str, float] = {}
    for lane in LANES:
        print(f"pulled over {lane}", file=sys.stderr)
        num_blocks = (num_tokens // BLOCK_SIZE + 2) * (num_rounds + _NUM_WARM_UPS)
        flags = ("--kv-transport", lane, "--kv-cache-memory", str(num_blocks * BLOCK_BYTES))
        two = ("--mixed", "2", "--placement-policy", "round_robin")
        async with started_cluster([*two, *flags]) as cluster:
            here, there = await ask_in_turns(cluster, num_tokens, num_rounds)
            await check_lane(cluster, lane)
        computed += here
        figures[f"pulled_{lane}_ms"] = round(statistics.median(there), 1)
        ratio = statistics.median(there) / statistics.median(here)
        shares[f"{lane}_over_computed"] = round(ratio, 3)
    return {"node_computed_ms": round(statistics.median(computed), 1), **figures, **shares}


async def ask_in_turns(
    cluster: RunningCluster, num_tokens: int, num_rounds: int
) -> tuple[list[float], list[float]]:
    """Return the times, in ms, of prompts that one node computes, and that the other one pulls."""
    computed: list[float] = []
    pulled: list[float] = []
    numbers = count(1)
    num_whole = num_tokens // BLOCK_SIZE * BLOCK_SIZE
    for _ in range(_NUM_WARM_UPS + num_rounds):
        start = synthetic_prompt(num_tokens, next(numbers))
        num_known = await cluster.metric(KNOWN_BLOCKS)
        computed.append(await first_token_ms(cluster, [*start, 5], num_cached=0))
        await _until_known(cluster, num_known + num_whole // BLOCK_SIZE)
        pulled.append(await first_token_ms(cluster, [*start, 6], num_cached=num_whole))
    return computed[_NUM_WARM_UPS:], pulled[_NUM_WARM_UPS:]


async def check_lane(cluster: RunningCluster, lane: str) -> None:
    """Raise `RuntimeError` unless all KV between nodes went over this lane.

    Waits for the heartbeat that tells, no longer than `TOLD_WITHIN_S`.
    """
    used: set[str] = set()
    async with asyncio.timeout(TOLD_WITHIN_S):
        while not used:
            links = [link for node in (await cluster.nodes()).values() for link in node["kv_links"]]
            used = {link["transport"] for link in links if link["num_bytes"]}
            await asyncio.sleep(POLL_S)
    if used != {lane}:
        raise RuntimeError(f"KV went over {sorted(used)}, wanted {lane}")


async def first_token_ms(cluster: RunningCluster, prompt: list[int], num_cached: int) -> float:
    """Return how long a prompt waits for its token. Raises `RuntimeError` if other tokens of it
    were cached than the first `num_cached`."""
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True}
    answer = await cluster.answer(body)
    if answer.num_cached_tokens != num_cached:
        raise RuntimeError(f"{answer.num_cached_tokens} tokens were cached, wanted {num_cached}")
    return 1e3 * (answer.timing.chunk_at_s[0] - answer.timing.arrived_at_s)


async def _until_known(cluster: RunningCluster, num_blocks: float) -> None:
    """Wait until the router knows so many blocks: only then it names the node that has them."""
    async with asyncio.timeout(KNOWN_WITHIN_S):
        while True:
            if await cluster.metric(KNOWN_BLOCKS) >= num_blocks:
                return
            await asyncio.sleep(POLL_S)
