"""Roles that follow the load, against every fixed split: `python -m bench.auto_roles --json`.

The nodes are those of `simulator/`, by default eight with an 8B model on H200. All clusters serve
one trace: in its first half prompts are long and answers short, in its second half the other way
round. The cluster with automatic roles begins with as many prefill as decode nodes.

ratio          goodput with automatic roles / that of the best fixed split
auto, fixed    requests a second within `--ttft` and `--tpot`; fixed by split, as in 5P3D
best_fixed     the split with the highest goodput
moves          changes of roles: when, in seconds, and the role that the node got
steady_moves   changes while each half alone lasted for the whole time
burst_moves    changes while either kind of request came in bursts of some seconds
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.errors import ConfigError
from common.nodes import Role
from common.observing.latency import LatencyTargets
from common.settings.config import Config, EngineConfig
from simulator.clients import client_requests
from simulator.cluster import ClusterSetup, SimulatedCluster
from simulator.profile import FOLDER, DeviceProfile, read_profile
from simulator.served import latency_figures
from simulator.trace_file import TraceRequest

NUM_NODES = 8
BURST_S = 6.0


@dataclass(frozen=True, slots=True)
class Kind:
    """Requests of one kind: a second, and the median lengths of prompts and answers in tokens."""

    rate: float
    num_prompt: int
    num_output: int


LONG_PROMPTS = Kind(10.0, 12_000, 60)
LONG_ANSWERS = Kind(15.0, 300, 2000)
_SIGMA = 0.3


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    flags = argparse.ArgumentParser(description="Compare automatic roles with fixed splits.")
    flags.add_argument("--half-s", type=float, default=120.0, help="seconds of each half")
    flags.add_argument("--profile", type=Path, default=FOLDER / "8b_h200.json")
    flags.add_argument("--ttft", type=float, default=2.0, help="target in seconds")
    flags.add_argument("--tpot", type=float, default=0.05, help="target in seconds")
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument("--json", action="store_true", help="print one JSON line last")
    return flags


def requests_of(kind: Kind, begins_s: float, ends_s: float, seed: int) -> list[TraceRequest]:
    """Return requests of one kind, in a Poisson process."""
    rng = random.Random(seed)
    found, at_s = [], begins_s
    while (at_s := at_s + rng.expovariate(kind.rate)) < ends_s:
        num_prompt = round(kind.num_prompt * rng.lognormvariate(0, _SIGMA))
        num_output = round(kind.num_output * rng.lognormvariate(0, _SIGMA))
        found.append(TraceRequest(at_s, num_prompt, max(2, num_output)))
    return found


def turning(half_s: float, seed: int) -> list[TraceRequest]:
    """Return a load that turns around in the middle."""
    first = requests_of(LONG_PROMPTS, 0.0, half_s, seed)
    return first + requests_of(LONG_ANSWERS, half_s, 2 * half_s, seed + 1)


def bursts(half_s: float, seed: int) -> list[TraceRequest]:
    """Return bursts of `BURST_S` of either kind in turns, each a third above its rate."""
    found, at_s, number = list[TraceRequest](), 0.0, seed
    while at_s < 2 * half_s:
        for kind in (LONG_PROMPTS, LONG_ANSWERS):
            small = Kind(kind.rate / 3, kind.num_prompt, kind.num_output)
            found += requests_of(kind, at_s, at_s + BURST_S, number)
            found += requests_of(small, at_s, at_s + BURST_S, number + 1)
            at_s, number = at_s + BURST_S, number + 2
    return sorted(found, key=lambda request: request.arrival_s)


@dataclass(frozen=True, slots=True)
class Compared:
    """What all clusters have in common."""

    profile: DeviceProfile
    targets: LatencyTargets
    seed: int

    def serve(
        self, trace: Sequence[TraceRequest], num_prefill: int, *, follows: bool
    ) -> tuple[float, SimulatedCluster]:
        """Serve a trace; return the goodput in requests a second, and the cluster."""
        setup = ClusterSetup(
            profile=self.profile,
            num_nodes={Role.PREFILL: num_prefill, Role.DECODE: NUM_NODES - num_prefill},
            config=Config(
                role=Role.DECODE,
                engine=EngineConfig(max_num_seqs=48, max_num_batched_tokens=8192, block_size=256),
            ),
            seed=self.seed,
            targets=self.targets if follows else None,
        )
        cluster = SimulatedCluster(setup)
        clients = client_requests(trace, max_model_len=cluster.max_model_len, seed=self.seed)
        served = cluster.run(clients)
        figures = latency_figures(served, self.targets, trace[-1].arrival_s)
        return figures["goodput_rps"], cluster


def run(
    arguments: argparse.Namespace, tell: Callable[[str], object] = lambda text: None
) -> dict[str, object]:
    """Serve all traces; return the content of the JSON line. Raises `ConfigError`."""
    if not arguments.half_s > 0:
        raise ConfigError(f"--half-s is {arguments.half_s:g}: wanted above 0")
    compared = Compared(
        profile=read_profile(arguments.profile),
        targets=LatencyTargets(ttft_s=arguments.ttft, tpot_s=arguments.tpot),
        seed=arguments.seed,
    )
    half_s, seed = arguments.half_s, arguments.seed
    trace = turning(half_s, seed)
    auto, cluster = compared.serve(trace, NUM_NODES // 2, follows=True)
    tell(f"automatic roles: {auto:.2f} requests/s, {moves_of(cluster)}")
    fixed = {}
    for num_prefill in range(1, NUM_NODES):
        name = f"{num_prefill}P{NUM_NODES - num_prefill}D"
        fixed[name], _ = compared.serve(trace, num_prefill, follows=False)
        tell(f"{name}: {fixed[name]:.2f} requests/s")
    best = max(fixed, key=fixed.__getitem__)
    steady = {
        name: requests_of(kind, 0.0, half_s, seed)
        for name, kind in (("long_prompts", LONG_PROMPTS), ("long_answers", LONG_ANSWERS))
    }
    return {
        "ratio": round(auto / fixed[best], 3) if fixed[best] else 0.0,
        "auto": auto,
        "best_fixed": best,
        "fixed": fixed,
        "requests": len(trace),
        "moves": moves_of(cluster),
        "steady_moves": {
            name: moves_of(compared.serve(one, NUM_NODES // 2, follows=True)[1])
            for name, one in steady.items()
        },
        "burst_moves": moves_of(
            compared.serve(bursts(half_s, seed), NUM_NODES // 2, follows=True)[1]
        ),
    }


def moves_of(cluster: SimulatedCluster) -> list[tuple[float, str]]:
    """Return when which role was given."""
    return [(round(at_s, 1), move.role.value) for at_s, move in cluster.moves]


def main() -> None:
    arguments = parser().parse_args()
    try:
        result = run(arguments, print)
    except ConfigError as error:
        sys.exit(str(error))
    for name, value in result.items():
        print(f"{name:14} {value}")
    if arguments.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
