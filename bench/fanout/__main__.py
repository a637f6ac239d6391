"""What a prefill node pays for the number of decode nodes: `python -m bench.fanout --json`.

A prefill node's connector hands off prompts of 64 KiB of KV to 1, 32 and 250 decode nodes in turn,
eight at a time, over real sockets: the prefill node in one process, all decode nodes in another.
With 1,000 decode nodes only the machines of both sides run, without a network, on a virtual clock.

    n1, n32, n250, n1000       that many decode nodes, all of them connected
      cpu_ms_per_handoff       CPU time of the prefill node's process for a handoff (n1000: of its
                               machine alone): the least of the rounds, which alternate
      idle_cpu_share           CPU seconds per second of the same while nothing is handed off
      machine_us_per_handoff   of the machine alone, without a network
    n250_over_n1               cpu_ms_per_handoff of 250 nodes over that of one
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing

from bench.command import flags_of, print_figures
from bench.fanout.decode_ends import DecodeEnds
from bench.fanout.prefill_end import PrefillEnd
from bench.fanout.simulated import SimulatedFanout
from bench.remote import Remote

REAL = (1, 32, 250)
SIMULATED = (*REAL, 1000)
NUM_HANDOFFS = 500
"""Handoffs of a round: at least two for each node on real sockets."""
_SIMULATED_IDLE_S = 10.0
Figures = dict[str, dict[str, float]]


def over_sockets(num_rounds: int, idle_s: float) -> Figures:
    """Return the figures of real connectors. One earlier round, which connects, is not counted."""
    cpu_s: dict[int, list[float]] = {num_ends: [] for num_ends in REAL}
    idle: dict[int, float] = {}
    with ExitStack() as stack:
        pairs = {}
        for num_ends in REAL:
            print(f"{num_ends} decode nodes start", file=sys.stderr)
            prefill = stack.enter_context(closing(Remote(PrefillEnd)))
            decode = stack.enter_context(closing(Remote(DecodeEnds, num_ends, NUM_HANDOFFS)))
            pairs[num_ends] = prefill, decode
        for _ in range(num_rounds + 1):
            for num_ends, (prefill, decode) in pairs.items():
                cpu_s[num_ends].append(prefill.call("hand_off", decode.call("reserve")))
        for num_ends, (prefill, decode) in pairs.items():
            # Some links may have been idle for too long while others were measured.
            prefill.call("hand_off", decode.call("reserve"))
            decode.call("check_landed", (num_rounds + 2) * NUM_HANDOFFS)
            idle[num_ends] = prefill.call("idle", idle_s)
    return {
        f"n{num_ends}": {
            "cpu_ms_per_handoff": round(1e3 * min(cpu_s[num_ends][1:]) / NUM_HANDOFFS, 3),
            "idle_cpu_share": round(idle[num_ends], 5),
        }
        for num_ends in REAL
    }


def simulated(num_rounds: int) -> Figures:
    """Return the figures of the machines alone."""
    worlds = {num_ends: SimulatedFanout(num_ends) for num_ends in SIMULATED}
    num_handoffs = max(SIMULATED)
    cpu_s: dict[int, list[float]] = {num_ends: [] for num_ends in SIMULATED}
    for _ in range(num_rounds + 1):
        for num_ends, world in worlds.items():
            cpu_s[num_ends].append(world.hand_off(num_handoffs))
    return {
        f"n{num_ends}": {
            "machine_us_per_handoff": round(1e6 * min(cpu_s[num_ends][1:]) / num_handoffs, 1),
            "machine_idle_share": round(world.idle(_SIMULATED_IDLE_S), 5),
        }
        for num_ends, world in worlds.items()
    }


def run(num_rounds: int, idle_s: float) -> dict[str, object]:
    """Return the content of the JSON line."""
    real, machines = over_sockets(num_rounds, idle_s), simulated(num_rounds)
    result: dict[str, object] = {}
    for key, machine in machines.items():
        alone = {
            "cpu_ms_per_handoff": round(machine["machine_us_per_handoff"] / 1e3, 4),
            "idle_cpu_share": machine["machine_idle_share"],
        }
        result[key] = {**real.get(key, alone), **machine}
    of_one, of_many = (real[key]["cpu_ms_per_handoff"] for key in ("n1", "n250"))
    result["n250_over_n1"] = round(of_many / of_one, 3)
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, measure, print one JSON line last."""
    parser = flags_of("bench.fanout", __doc__)
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds (default: 5)")
    parser.add_argument("--idle-s", type=float, default=10.0, help="seconds without handoffs")
    options = parser.parse_args(arguments)
    if options.rounds < 1 or options.idle_s <= 0:
        parser.error("wanted at least 1 round and seconds above 0")
    print_figures(run(options.rounds, options.idle_s), is_one_line=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
