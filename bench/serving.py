"""A cluster under open-loop load: `python -m bench.serving --json`.

Requests arrive by a Poisson process, whether or not earlier ones were answered, and each runs to
its full length. TTFT, TPOT, ITL and goodput are defined in `common/observing/latency.py`. Without
`--url` a cluster is started for each topology, with the same number of nodes and the same load:

    pd      half of the nodes prefill, half decode
    mixed   every node does both

With `--kv-cache-dtype`, given several times, each topology is started with each of these types of
the KV cache, and its figures stand under both names, as in `pd int8`. All of them take turns
(`--rounds`), so that a machine whose speed drifts drifts for all. With `--url` the load goes to a
cluster that runs already.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Sequence
from itertools import product
from typing import Protocol

from bench.amounts import above_0, at_least_1
from bench.command import flags_of, print_figures
from bench.running_cluster import Load, running_cluster, started_cluster
from common.observing.latency import (
    LatencySummary,
    LatencyTargets,
    RequestTiming,
    goodput_rps,
    summarize,
)

TOPOLOGIES = ("pd", "mixed")
WARM_UP = Load(num_prompt_tokens=200, num_output_tokens=4, seed=1 << 20)


def arrivals(
    *, rate_rps: float, duration_s: float, prompt_tokens: int, output_tokens: int, seed: int
) -> list[tuple[float, Load]]:
    """Return when each request arrives and its lengths, uniform within ±50 % of their means."""
    rng = random.Random(seed)
    planned: list[tuple[float, Load]] = []
    at_s = rng.expovariate(rate_rps)
    while at_s < duration_s:
        load = Load(
            num_prompt_tokens=rng.randint(max(1, prompt_tokens // 2), prompt_tokens * 3 // 2),
            num_output_tokens=rng.randint(max(1, output_tokens // 2), output_tokens * 3 // 2),
            seed=seed * 100_003 + len(planned),
        )
        planned.append((at_s, load))
        at_s += rng.expovariate(rate_rps)
    return planned


class Times(Protocol):
    """What sends one request and says when its answer came, as `RunningCluster` does."""

    async def timed(self, load: Load) -> RequestTiming: ...


async def replay(
    cluster: Times, planned: Sequence[tuple[float, Load]]
) -> tuple[list[RequestTiming], int, float]:
    """Return timings of answered requests, the number of failed ones, and the seconds in all."""
    began_at_s = time.monotonic()

    async def one(at_s: float, load: Load) -> RequestTiming:
        await asyncio.sleep(at_s - (time.monotonic() - began_at_s))
        return await cluster.timed(load)

    results = await asyncio.gather(
        *(one(at_s, load) for at_s, load in planned), return_exceptions=True
    )
    timings = [result for result in results if isinstance(result, RequestTiming)]
    for failure in results:
        if isinstance(failure, BaseException):
            print(f"a request failed: {failure}", file=sys.stderr)
    return timings, len(results) - len(timings), time.monotonic() - began_at_s


def figures(
    timings: Sequence[RequestTiming], num_failed: int, duration_s: float, targets: LatencyTargets
) -> dict[str, object]:
    """Return the figures of one topology; latencies in milliseconds."""
    return {
        "num_answered": len(timings),
        "num_failed": num_failed,
        "output_tok_s": round(sum(t.num_tokens for t in timings) / duration_s, 1),
        "goodput_rps": round(goodput_rps(timings, targets, duration_s=duration_s), 3),
        "ttft_ms": _ms(summarize([t.ttft_s for t in timings])),
        "tpot_ms": _ms(summarize([t.tpot_s for t in timings if t.tpot_s is not None])),
        "itl_ms": _ms(summarize([gap for t in timings for gap in t.itl_s])),
    }


def _ms(summary: LatencySummary | None) -> dict[str, float] | None:
    if summary is None:
        return None
    return {
        name: round(getattr(summary, f"{name}_s") * 1000, 1)
        for name in ("mean", "p50", "p90", "p99", "max")
    }


def cluster_names(topologies: Sequence[str], dtypes: Sequence[str]) -> list[str]:
    """Return the clusters to start, each topology with each KV cache."""
    return [" ".join(name) for name in product(topologies, *([dtypes] if dtypes else []))]


def cluster_arguments(name: str, num_nodes: int) -> list[str]:
    """Return the flags of `pdserve up` for one of `cluster_names`, with `num_nodes` nodes."""
    topology, _, dtype = name.partition(" ")
    if dtype:
        return [*cluster_arguments(topology, num_nodes), "--kv-cache-dtype", dtype]
    if topology == "mixed":
        return ["--mixed", str(num_nodes)]
    return ["--prefill", str(num_nodes // 2), "--decode", str(num_nodes - num_nodes // 2)]


async def measure(options: argparse.Namespace) -> dict[str, object]:
    """Run all rounds of all topologies."""
    targets = LatencyTargets(ttft_s=options.slo_ttft_ms / 1000, tpot_s=options.slo_tpot_ms / 1000)
    names = ["running"]
    if not options.url:
        names = cluster_names(options.topology or TOPOLOGIES, options.kv_cache_dtype or ())
    timings: dict[str, list[RequestTiming]] = {name: [] for name in names}
    failed = dict.fromkeys(names, 0)
    seconds = dict.fromkeys(names, 0.0)
    for number in range(options.rounds):
        planned = arrivals(
            rate_rps=options.rate_rps,
            duration_s=options.duration_s,
            prompt_tokens=options.prompt_tokens,
            output_tokens=options.output_tokens,
            seed=options.seed + number,
        )
        for name in names:
            print(f"round {number + 1}: {len(planned)} requests to {name}", file=sys.stderr)
            context = (
                running_cluster(options.url)
                if options.url
                else started_cluster(
                    [*cluster_arguments(name, options.nodes), *options.cluster_flags]
                )
            )
            async with context as cluster:
                await cluster.timed(WARM_UP)
                answered, num_failed, took_s = await replay(cluster, planned)
            timings[name] += answered
            failed[name] += num_failed
            seconds[name] += took_s
    load = {
        key: getattr(options, key)
        for key in ("rate_rps", "duration_s", "rounds", "prompt_tokens", "output_tokens", "nodes")
    }
    targets_ms = {"ttft_ms": options.slo_ttft_ms, "tpot_ms": options.slo_tpot_ms}
    results = {n: figures(timings[n], failed[n], seconds[n], targets) for n in names}
    return {"load": load, "targets": targets_ms, **results}


def main() -> int:
    """Parse, measure, print one JSON line last."""
    parser = flags_of("bench.serving", __doc__)
    parser.add_argument("--url", help="a router that runs already")
    parser.add_argument("--topology", action="append", choices=TOPOLOGIES, help="default: both")
    parser.add_argument("--kv-cache-dtype", action="append", help="default: that of the node")
    parser.add_argument(
        "--nodes", type=at_least_1, default=2, help="engine nodes of a started cluster"
    )
    parser.add_argument("--rate-rps", type=above_0, default=0.5, help="mean arrivals per second")
    parser.add_argument("--duration-s", type=above_0, default=40.0, help="seconds of arrivals")
    parser.add_argument("--rounds", type=at_least_1, default=2)
    parser.add_argument("--prompt-tokens", type=at_least_1, default=400, help="mean prompt length")
    parser.add_argument("--output-tokens", type=at_least_1, default=48, help="mean output length")
    parser.add_argument("--slo-ttft-ms", type=above_0, default=2000.0)
    parser.add_argument("--slo-tpot-ms", type=above_0, default=150.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "cluster_flags", nargs="*", help="after --: more flags for the started clusters"
    )
    options = parser.parse_args()
    result = asyncio.run(measure(options))
    print_figures(result, is_one_line=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
