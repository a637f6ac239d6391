"""When a decode node should prefill by itself: `python -m bench.local_prefill --json`.

Short prompts cost less to compute than to transfer; long ones stall all decoding sequences. For
each prompt length, two clusters of one prefill and one decode node answer the same requests while
a few streams decode in the background: one whose decode node computes every prompt itself
(`local`), one that sends for every prompt (`remote`).

    ttft_ms, second_ms   median time to the first and to the second token of the measured requests
    stall_ms             99th percentile of the gaps between tokens of the background streams
    suggested            the longest prompt up to which `local` is no later with the second token
                         and stalls the others at most a quarter longer
"""

from __future__ import annotations

import asyncio
import statistics
import sys

from bench.command import flags_of, print_figures
from bench.running_cluster import Load, RunningCluster, started_cluster
from common.observing.latency import RequestTiming, percentile

LENGTHS = (16, 32, 64, 128, 256, 512)
NUM_OUTPUT = 4
EVERYTHING = 1 << 20
MOST_EXTRA_STALL = 1.25


async def measure_length(
    cluster: RunningCluster, length: int, repeats: int, num_background: int, seed: int
) -> dict[str, float]:
    """Measure one prompt length, request after request, beside streams that decode."""
    background = [
        asyncio.create_task(cluster.timed(Load(num_prompt_tokens=8, num_output_tokens=n, seed=n)))
        for n in range(repeats * 24, repeats * 24 + num_background)
    ]
    measured: list[RequestTiming] = []
    for index in range(repeats):
        load = Load(num_prompt_tokens=length, num_output_tokens=NUM_OUTPUT, seed=seed + index)
        measured.append(await cluster.timed(load))
    ended_at_s = measured[-1].chunk_at_s[-1]
    gaps = [
        gap
        for stream in await asyncio.gather(*background)
        for gap, at_s in zip(stream.itl_s, stream.chunk_at_s[1:], strict=True)
        if at_s <= ended_at_s
    ]
    second_s = [t.chunk_at_s[min(1, len(t.chunk_at_s) - 1)] - t.arrived_at_s for t in measured]
    return {
        "ttft_ms": round(statistics.median(t.ttft_s for t in measured) * 1000, 1),
        "second_ms": round(statistics.median(second_s) * 1000, 1),
        "stall_ms": round(percentile(gaps, 99) * 1000, 1) if gaps else 0.0,
    }


async def measure(repeats: int, num_background: int) -> dict[str, object]:
    """Measure both clusters at all lengths."""
    figures: dict[str, dict[str, dict[str, float]]] = {}
    for name, threshold in (("local", EVERYTHING), ("remote", 0)):
        flags = ["--local-prefill-threshold", str(threshold), "--no-enable-prefix-caching"]
        async with started_cluster(["--prefill", "1", "--decode", "1", *flags]) as cluster:
            await cluster.timed(Load(num_prompt_tokens=300, num_output_tokens=4, seed=1 << 20))
            for length in LENGTHS:
                result = await measure_length(
                    cluster, length, repeats, num_background, seed=1000 * length
                )
                print(f"{name} {length}: {result}", file=sys.stderr)
                figures.setdefault(str(length), {})[name] = result
    suggested = 0
    for length in LENGTHS:
        local, remote = figures[str(length)]["local"], figures[str(length)]["remote"]
        is_later = local["second_ms"] > remote["second_ms"]
        if is_later or local["stall_ms"] > MOST_EXTRA_STALL * remote["stall_ms"]:
            break
        suggested = length
    return {"lengths": figures, "background_streams": num_background, "suggested": suggested}


def main() -> int:
    """Parse, measure, print one JSON line last."""
    parser = flags_of("bench.local_prefill", __doc__)
    parser.add_argument("--repeats", type=int, default=8, help="requests per length")
    parser.add_argument("--background", type=int, default=4, help="streams that decode meanwhile")
    options = parser.parse_args()
    result = asyncio.run(measure(options.repeats, options.background))
    print_figures(result, is_one_line=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
