"""Agents on a real cluster: `python -m bench.agents --json`.

Sessions of many turns (`bench/agents/sessions.py` has the distributions) are played on `pdserve up`
with two prefill and two decode nodes and the demo model: every agent asks, waits for its answer,
thinks, and asks again with all that was said before. Two ways to set up the cluster take turns:

    before   requests name no session, blocks that the pool evicts are gone, and prefill nodes pull
             nothing from decode nodes (`--kv-transport shm`)
    now      requests name their session, prefixes that are evicted are kept in host memory, and
             prefill nodes pull what the decode node has cached

Regimes, each with both ways:

    fits     the pools hold all sessions
    quarter  the pools hold about a quarter of them
    long     decode nodes generate 400 to 800 tokens a turn, about half of each next prompt

Figures: prompt tokens, those of them that a prefill node computed, and times to the first token, in
milliseconds, over all turns and by turn. Ratios:

    fits.ttft_p50_ratio      now over before
    quarter.computed_ratio   tokens computed, now, over those of the regime `fits`
    quarter.ttft_p50_ratio   time to the first token, now, over that of the regime `fits`
    quarter.last_turn_gain   before over now, last turns
    long.ttft_p50_gain       before over now
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace

from bench.agents.figures import computed_ratio, figures, last_turn, ratio
from bench.agents.playing import Asked, play
from bench.agents.sessions import Shape, make_sessions
from bench.running_cluster import Load, started_cluster

NODES = ("--prefill", "2", "--decode", "2")
WARM_UP = Load(num_prompt_tokens=200, num_output_tokens=4, seed=1 << 20)
HOST_MEMORY = "512MiB"


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How a cluster is set up: its flags, and whether requests name their session."""

    flags: tuple[str, ...] = ()
    is_named: bool = False


WAYS = {
    "before": Way(flags=("--kv-transport", "shm")),
    "now": Way(flags=("--prefix-host-memory", HOST_MEMORY), is_named=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Regime:
    """What is asked, and the memory of each node's pool."""

    shape: Shape
    pool: str


AGENTS = Shape()
REGIMES = {
    "fits": Regime(shape=AGENTS, pool="800MiB"),
    "quarter": Regime(shape=AGENTS, pool="150MiB"),
    "long": Regime(
        shape=replace(
            AGENTS, num_sessions=6, num_turns=4, answer_tokens=560, answer_sigma=0.2, new_tokens=300
        ),
        pool="600MiB",
    ),
}


async def measure(options: argparse.Namespace) -> dict[str, object]:
    """Play every regime with every way, in turns, and compare them."""
    played: dict[str, dict[str, list[Asked]]] = {}
    for name in options.regime or REGIMES:
        played[name] = {way: [] for way in WAYS}
        for round_ in range(options.rounds):
            for way in WAYS:
                print(f"round {round_ + 1}: {name}, {way}", file=sys.stderr)
                played[name][way] += await _played(
                    REGIMES[name], WAYS[way], options.seed + round_, options.cluster_flags
                )
    return {
        name: {
            **{way: figures(asked, REGIMES[name].shape.num_turns) for way, asked in ways.items()},
            **compared(name, played),
        }
        for name, ways in played.items()
    }


def compared(name: str, played: Mapping[str, Mapping[str, list[Asked]]]) -> dict[str, float]:
    """Return the ratios of a regime; those to `fits` are there if that was played."""
    before, now = played[name]["before"], played[name]["now"]
    if name == "fits":
        return {"ttft_p50_ratio": ratio(now, before)}
    if name == "long":
        return {"ttft_p50_gain": ratio(before, now)}
    found = {"last_turn_gain": ratio(last_turn(before), last_turn(now))}
    if "fits" in played:
        fits = played["fits"]["now"]
        found["computed_ratio"] = computed_ratio(now, fits)
        found["ttft_p50_ratio"] = ratio(now, fits)
    return found


async def _played(regime: Regime, way: Way, seed: int, flags: list[str]) -> list[Asked]:
    pool = ("--kv-cache-memory", regime.pool)
    async with started_cluster([*NODES, *pool, *way.flags, *flags]) as cluster:
        await cluster.timed(WARM_UP)
        return await play(cluster, make_sessions(regime.shape, seed), is_named=way.is_named)


def main() -> int:
    """Parse, measure, print one JSON line last."""
    parser = argparse.ArgumentParser(prog="python -m bench.agents", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--json", action="store_true", help="one JSON line and no indentation")
    parser.add_argument("--regime", action="append", choices=list(REGIMES), help="default: all")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "cluster_flags", nargs="*", help="after --: more flags for the started clusters"
    )
    options = parser.parse_args()
    result = asyncio.run(measure(options))
    print(json.dumps(result, indent=None if options.json else 2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
