"""Agents on a real cluster: `python -m bench.agents --json`.

Sessions of many turns (`bench/agents/sessions.py` has the distributions) are played on `pdserve up`
with two prefill and two decode nodes and the demo model: every agent asks, waits for its answer,
thinks, and asks again with all that was said before. The ways to set up the cluster take turns:

    before   requests name no session, blocks that the pool evicts are gone, and no node pulls from
             another one
    now      requests name their session, prefixes that are evicted are kept in host memory, and
             prefill nodes pull what the decode node has cached
    mixed    one mixed node with the memory of four, where everything is local
    off      nothing is cached, so nothing is kept, reported or looked up

Regimes:

    fits      the pools hold all sessions: before, now, mixed
    quarter   the pools hold about a quarter of them: before, now, mixed
    change    as `fits`, and a prefill and a decode node are replaced once half is answered: now
    long      decode nodes generate 400 to 800 tokens a turn, about half of each next prompt:
              before, now, mixed
    no_reuse  prompts that never repeat, with the lengths of a trace of code completions: off and
              now at the same time, prompt by prompt by turns

With `--trace FILE` none of these is played but `trace`: the first 60 requests of a trace of
Mooncake's that are short enough, scaled (`bench/agents/traced.py`), with pools of 300 MiB: before,
now, mixed, and `trace.ttft_p50_ratio`, now over before.

Figures: prompt tokens, those of them that a prefill node computed, times to the first token, in
milliseconds, over all turns and by turn, and seconds: of all turns, and of CPU of all processes;
`hit_rate_by_tier`, the shares of prompt tokens that were found in the pool, in host memory and on
disk of the nodes that compute prompts, as those tell that are left at the end; and `pulled_tokens`,
which other nodes had and which are found in the pool then. Both are 0 for `no_reuse`: nodes are
not asked there.
Ratios:

    fits.ttft_p50_ratio      now over before
    quarter.computed_ratio   tokens computed, now, over those of the regime `fits`
    quarter.ttft_p50_ratio   time to the first token, now, over that of the regime `fits`
    quarter.last_turn_gain   before over now, last turns
    change.computed_ratio    tokens computed, now, over those of the regime `fits`
    long.ttft_p50_gain       before over now
    no_reuse.cost_share      the largest of `ttft_share`, `time_share` and `cpu_share`: how much
                             more than off now takes, as a share; times are those until the first
                             and until the last token, of the median prompt, each compared with
                             itself

Those to `fits` are there if it was played too. On 2 idle cores a way of `fits`, `quarter` or
`change` takes a minute or two, one of `long` three, and `no_reuse` three; all of it takes twenty
minutes.
`--quick` plays a few short sessions, which takes five minutes and shows that all of it runs, and no
more. Nothing is left running, however it ends.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from bench.agents.figures import Played, computed_ratio, cost_shares, figures, last_turn, ratio
from bench.agents.playing import play, play_by_turns
from bench.agents.processes import Replacements, cpu_s
from bench.agents.sessions import Session, Shape, make_lone_prompts, make_sessions
from bench.agents.tiers import found_by_tier
from bench.agents.traced import make_traced
from bench.command import flags_of, print_figures
from bench.running_cluster import Load, RunningCluster, started_cluster
from common.errors import ConfigError
from simulator.trace_file import read_trace

NUM_TRACED, MOST_OF_TRACE = 60, 400
WARM_UP = Load(num_prompt_tokens=200, num_output_tokens=4, seed=1 << 20)
HOST_MEMORY = "512MiB"
REPLACED = ("prefill-1", "decode-1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How a cluster is set up: its nodes and flags, and whether requests name their session."""

    nodes: tuple[str, ...] = ("--prefill", "2", "--decode", "2")
    flags: tuple[str, ...] = ()
    is_named: bool = False
    at_start: str = ""
    """Python code that each process executes first."""
    num_pools: int = 1
    """A node has so many pools of the regime."""


NO_PULLS = """
from node.flow.pulls.pull_cost import PullCost

PullCost.is_worth = lambda self, *_, **__: False
"""

WAYS = {
    "before": Way(at_start=NO_PULLS),
    "now": Way(flags=("--prefix-host-memory", HOST_MEMORY), is_named=True),
    "mixed": Way(nodes=("--mixed", "1"), is_named=True, num_pools=4),
    "off": Way(flags=("--no-enable-prefix-caching",)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Regime:
    """The requests of a seed, the MiB of each node's pool, and the settings that are compared."""

    sessions: Callable[[int], list[Session]]
    pool_mib: int
    ways: tuple[str, ...] = ("before", "now", "mixed")
    replaces_nodes: bool = False
    is_by_turns: bool = False
    """Whether all ways run at the same time and are asked by turns, which tells small costs."""


def regimes(*, is_quick: bool = False, trace: str = "") -> dict[str, Regime]:
    """Return the regimes by name; quick ones have fewer and shorter sessions.

    With a `trace` its requests are the only regime. Raises `ConfigError` for one that is none, or
    has none that is short enough.
    """
    if trace:
        traced = make_traced(read_trace(Path(trace), MOST_OF_TRACE), 4 if is_quick else NUM_TRACED)
        if not traced:
            raise ConfigError(f"trace {trace} has no prompt that is short enough")
        return {"trace": Regime(sessions=lambda _: traced, pool_mib=300)}
    agents = Shape()
    if is_quick:
        agents = replace(agents, num_sessions=3, num_turns=3, system_tokens=130, new_tokens=60)
    talkers = replace(
        agents,
        num_sessions=2 if is_quick else 6,
        num_turns=2 if is_quick else 4,
        answer_tokens=60 if is_quick else 560,
        answer_sigma=0.2,
        new_tokens=60 if is_quick else 300,
    )
    lone = partial(make_lone_prompts, 2, 2) if is_quick else partial(make_lone_prompts, 4, 12)
    fits = Regime(sessions=partial(make_sessions, agents), pool_mib=800)
    return {
        "fits": fits,
        "quarter": replace(fits, pool_mib=150),
        "change": replace(fits, ways=("now",), replaces_nodes=True),
        "long": Regime(sessions=partial(make_sessions, talkers), pool_mib=600),
        "no_reuse": Regime(sessions=lone, pool_mib=300, ways=("off", "now"), is_by_turns=True),
    }


async def measure(options: argparse.Namespace, chosen: Mapping[str, Regime]) -> dict[str, object]:
    """Play every regime with every way, in turns, and compare them."""
    flags = options.cluster_flags
    played: dict[str, dict[str, Played]] = {}
    for name in chosen if options.trace else options.regime or chosen:
        regime = chosen[name]
        played[name] = {way: Played() for way in regime.ways}
        for round_ in range(options.rounds):
            seed = options.seed + round_
            if regime.is_by_turns:
                print(f"round {round_ + 1}: {name}", file=sys.stderr)
                for way, found in (await _played_by_turns(regime, seed, flags)).items():
                    played[name][way] += found
                continue
            # Each round the other way around: what changes with time favours nobody.
            for way in regime.ways[:: -1 if round_ % 2 else 1]:
                print(f"round {round_ + 1}: {name}, {way}", file=sys.stderr)
                found = await _played(regime, WAYS[way], seed, flags)
                print(f"  {found.took_s:.0f} s, {found.cpu_s:.0f} s of CPU", file=sys.stderr)
                played[name][way] += found
    return {
        name: {**{way: figures(one) for way, one in ways.items()}, **compared(name, played)}
        for name, ways in played.items()
    }


def compared(name: str, played: Mapping[str, Mapping[str, Played]]) -> dict[str, float]:
    """Return the ratios of a regime; those to `fits` are there if that was played."""
    ways = played[name]
    fits = played["fits"]["now"].asked if "fits" in played else ()
    now = ways["now"].asked
    if name == "no_reuse":
        return cost_shares(ways["now"], ways["off"])
    found = {"computed_ratio": computed_ratio(now, fits)} if fits else {}
    if name == "change":
        return found
    before = ways["before"].asked
    if name in ("fits", "trace"):
        return {"ttft_p50_ratio": ratio(now, before)}
    if name == "long":
        return {"ttft_p50_gain": ratio(before, now)}
    if fits:
        found["ttft_p50_ratio"] = ratio(now, fits)
    return {"last_turn_gain": ratio(last_turn(before), last_turn(now)), **found}


def _arguments(regime: Regime, way: Way, flags: list[str]) -> list[str]:
    pool = ("--kv-cache-memory", f"{way.num_pools * regime.pool_mib}MiB")
    return [*way.nodes, *pool, *way.flags, *flags]


async def _played(regime: Regime, way: Way, seed: int, flags: list[str]) -> Played:
    arguments = _arguments(regime, way, flags)
    async with started_cluster(arguments, at_start=way.at_start) as cluster:
        await cluster.timed(WARM_UP)
        replacements = Replacements(cluster)
        halfway = partial(replacements.replace, REPLACED) if regime.replaces_nodes else None
        began_s, began_cpu_s = time.monotonic(), cpu_s(cluster.pid)
        try:
            asked = await play(
                cluster, regime.sessions(seed), is_named=way.is_named, halfway=halfway
            )
            took_s, took_cpu_s = time.monotonic() - began_s, cpu_s(cluster.pid) - began_cpu_s
            found = await found_by_tier(cluster)
        finally:
            await replacements.stop()
    return Played(tuple(asked), took_s, took_cpu_s, found)


async def _played_by_turns(regime: Regime, seed: int, flags: list[str]) -> dict[str, Played]:
    """Play all ways of a regime at the same time; the seconds of each are those of its answers."""
    async with AsyncExitStack() as started:
        clusters: dict[str, RunningCluster] = {}
        for name in regime.ways:
            way = WAYS[name]
            cluster = started_cluster(_arguments(regime, way, flags), at_start=way.at_start)
            clusters[name] = await started.enter_async_context(cluster)
            await clusters[name].timed(WARM_UP)
        began_cpu_s = {name: cpu_s(one.pid) for name, one in clusters.items()}
        named = {name for name in regime.ways if WAYS[name].is_named}
        asked = await play_by_turns(clusters, regime.sessions(seed), named=named)
        return {
            name: Played(
                tuple(asked[name]),
                sum(answer.took_s for answer in asked[name]),
                cpu_s(one.pid) - began_cpu_s[name],
            )
            for name, one in clusters.items()
        }


def main() -> int:
    """Parse, measure, print one JSON line last."""
    parser = flags_of("bench.agents", __doc__)
    parser.add_argument("--regime", action="append", choices=list(regimes()), help="default: all")
    parser.add_argument("--trace", default="", help="Mooncake's, or Azure's: its requests alone")
    parser.add_argument("--quick", action="store_true", help="a few short sessions")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "cluster_flags", nargs="*", help="after --: more flags for the started clusters"
    )
    options = parser.parse_args()
    try:
        chosen = regimes(is_quick=options.quick, trace=options.trace)
    except ConfigError as error:
        parser.error(str(error))
    result = asyncio.run(measure(options, chosen))
    print_figures(result, is_one_line=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
