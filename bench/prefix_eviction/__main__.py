"""Orders of eviction of host memory: `python -m bench.prefix_eviction [--trace FILE] --json`.

A trace whose requests name their content (Mooncake's format), or without one agents that write code
(`bench/prefix_eviction/chains.py` has their distributions), is replayed over a pool of `--pool`
blocks of 512 tokens and, below it, host memory of `--below` times as many, for each order:

    lru                what was used least recently goes first
    segmented          what the pool has again goes first, then what was used once as far as it is
                       more than a tenth, then what was used least recently
    s3_fifo            three queues: what is used once passes through a short one
    cost_times_chance  what is cheapest to compute again, times how often it was used, ages
    known_future       what is used again last: nobody can know it

once for each rule of what is kept there of the blocks that the pool gives up:

    found              those that a prompt found
    used_twice         those that a prompt found, or computed again not long after they were gone
    paid               those, and of the others as many as uses of blocks pay for
    all                all of them

Figures: shares of the tokens of prompts that were found, and of the cost of computing
them; `pool` is that of the pool alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.command import print_figures
from bench.prefix_eviction.chains import AGENTS, Chain, of_agents, of_trace
from bench.prefix_eviction.orders import ORDERS
from bench.prefix_eviction.tiers import Found, Kept, Tiers, replay
from simulator.trace_file import read_trace


def measure(chains: Sequence[Chain], pool: int, factors: Sequence[int]) -> dict[str, object]:
    """Return the shares for every order and size. Raises `SystemExit` for too small a pool."""
    if (longest := max(map(len, chains))) > pool:
        raise SystemExit(
            f"a pool of {pool} blocks: wanted {longest} or more, as the longest prompt"
        )
    found: dict[str, object] = {"pool": _shares(_replayed(chains, pool, 0, "lru", Kept.FOUND))}
    for factor in factors:
        for kept in Kept:
            name = f"{factor} x {kept.value}"
            found[name] = {
                order: _shares(_replayed(chains, pool, factor * pool, order, kept))
                for order in ORDERS
            }
            print(name, found[name], file=sys.stderr)
    return found


def _replayed(chains: Sequence[Chain], pool: int, below: int, order: str, kept: Kept) -> Found:
    return replay(chains, Tiers(pool, below, ORDERS[order](below), kept))


def _shares(found: Found) -> dict[str, float]:
    return {"tokens": round(found.tokens, 4), "cost": round(found.cost, 4)}


def main() -> int:
    """Parse, replay, print JSON last."""
    parser = argparse.ArgumentParser(prog="python -m bench.prefix_eviction", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--trace", type=Path, help="default: agents that write code")
    parser.add_argument("--pool", type=int, default=1000, help="blocks of 512 tokens")
    parser.add_argument("--below", type=int, nargs="+", default=[1, 4], help="times the pool")
    parser.add_argument("--seed", type=int, default=1, help="of the agents")
    parser.add_argument("--json", action="store_true", help="one JSON line and no indentation")
    options = parser.parse_args()
    chains = (
        of_trace(read_trace(options.trace)) if options.trace else of_agents(AGENTS, options.seed)
    )
    result = measure(chains, options.pool, options.below)
    print_figures(result, is_one_line=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
