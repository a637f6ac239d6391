"""How far plans are from real clusters: `python -m bench.plan_accuracy --json`.

The same requests, a published trace with shorter prompts and answers and less load, go to clusters
of `pdserve up` on this machine and to simulated ones with the profile of this machine:

    1P1D, 2P1D, 1P2D, 2 mixed

Here all nodes run with one thread, so the profile is measured with one thread too, and the plan is
told how many cores they share. `oversubscribed` lists the shapes with as many nodes as cores, or
more: the router and the client take some of these, which the plan does not know.

For each shape: TTFT and TPOT at p50 and p99, goodput, what the plan says, and the relative error.
`worst` is the largest error of each figure over all shapes. `winner` is, in reality and in the
plan, the shape with the least median TTFT of those whose goodput is within 2 % of the most.
`stages` and `cpu_s` show where both differ (`plan_stages.py`), the real value first; a figure that
misses its goal is told on standard error, with its stage. `reference_ms` is how long one and the
same computation took before the first shape and after each: where these differ, the machine was not
the one that the profile describes, and the errors have as much of that.

Each shape serves for `--duration-s`, ten minutes by default. Run it while the
machine does nothing else; `--quick` serves few requests, and its percentiles say little.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median

import numpy as np

from bench.plan_stages import (
    OF_TPOT,
    OF_TTFT,
    RealStages,
    Run,
    beside_each_other,
    largest_difference,
    planned_cpu_s,
    planned_stages,
    stages_of,
)
from bench.running_cluster import Load, started_cluster
from bench.serving import WARM_UP, replay
from common.errors import ConfigError
from common.nodes import Role
from common.observing.latency import (
    LatencyTargets,
    RequestTiming,
    goodput_rps,
    percentile,
)
from common.settings.config import Config, EngineConfig
from pdserve.configuration.flags import UP_DEFAULTS
from pdserve.planning.search import Fleet
from pdserve.planning.trial import setup_of
from simulator.clients import ClientRequest
from simulator.cluster import SimulatedCluster
from simulator.profile import DeviceProfile, read_profile
from simulator.trace_file import TraceRequest, read_trace

TRACE = Path(__file__).parent / "traces" / "azure_conv.csv"
SHAPES = {
    "1P1D": Fleet(1, 1),
    "2P1D": Fleet(2, 1),
    "1P2D": Fleet(1, 2),
    "2 mixed": Fleet(mixed=2),
}
GOALS = {"p50": 0.07, "p99": 0.20, "goodput": 0.07}
NUM_THREADS = 1
SHORTER = 4
"""A prompt and an answer have so many times fewer tokens than those of the trace."""
_EQUAL = 0.02
"""Goodputs that differ by so little are equal: they depend on when the last request ends."""
_REFERENCES = 100
_LEAST_PROMPT, _MOST_PROMPT, _LEAST_OUTPUT, _MOST_OUTPUT = 16, 1024, 2, 96


def scaled(requests: Sequence[TraceRequest], rate_rps: float) -> list[TraceRequest]:
    """Return the requests with lengths for a small model, at `rate_rps` in the mean."""
    span_s = requests[-1].arrival_s - requests[0].arrival_s
    pace = (len(requests) - 1) / rate_rps / span_s
    return [
        TraceRequest(
            (one.arrival_s - requests[0].arrival_s) * pace,
            min(_MOST_PROMPT, max(_LEAST_PROMPT, one.num_prompt // SHORTER)),
            min(_MOST_OUTPUT, max(_LEAST_OUTPUT, one.num_output // SHORTER)),
        )
        for one in requests
    ]


def figures(
    timings: Sequence[RequestTiming], targets: LatencyTargets, duration_s: float
) -> dict[str, float]:
    """Return TTFT and TPOT in seconds, and goodput in requests per second."""
    found = {"goodput": goodput_rps(timings, targets, duration_s=duration_s)}
    columns = {
        "ttft": [one.ttft_s for one in timings],
        "tpot": [tpot for one in timings if (tpot := one.tpot_s) is not None],
    }
    for name, values in columns.items():
        for percent in (50, 99):
            found[f"{name}_p{percent}"] = percentile(values, percent) if values else 0.0
    return found


def errors(real: Mapping[str, float], planned: Mapping[str, float]) -> dict[str, float]:
    """Return how far each planned figure is from the real one, as a share of the real one."""
    return {
        name: abs(planned[name] - value) / value if value else float(planned[name] > 0)
        for name, value in real.items()
    }


def winner(results: Mapping[str, Mapping[str, float]]) -> str:
    """Return the shape with the least median TTFT, of those with about the most goodput."""
    most = max(row["goodput"] for row in results.values())
    good = [name for name, row in results.items() if row["goodput"] >= most * (1 - _EQUAL)]
    return min(good, key=lambda name: results[name]["ttft_p50"])


def planned_run(
    profile: DeviceProfile, config: Config, shape: Fleet, requests: Sequence[TraceRequest]
) -> Run:
    """Return what the plan says of each request.

    Clients ask for exactly as many tokens as they get, as those of the real cluster do.
    """
    at_once = max(1, num_cores() // NUM_THREADS)
    cluster = SimulatedCluster(setup_of(profile, config, shape, seed=0, at_once=at_once))
    clients = [ClientRequest(one, i, one.num_output, 0) for i, one in enumerate(requests)]
    served = cluster.run(clients)
    timings = [
        RequestTiming(
            arrived_at_s=one.arrived_at_s,
            chunk_at_s=(one.first_at_s, one.second_at_s, one.last_at_s)[: one.num_tokens],
            num_tokens=one.num_tokens,
        )
        for one in served
        if one.num_tokens
    ]
    return Run(
        timings=timings,
        took_s=max(one.last_at_s for one in served),
        stages=stages_of(timings, planned_stages(served)),
        cpu_s=planned_cpu_s(cluster),
    )


async def real_run(shape: Fleet, requests: Sequence[TraceRequest]) -> Run:
    """Return what a cluster on this machine does."""
    flags = [f for role, n in shape.num_nodes.items() for f in (f"--{role.value}", str(n))]
    planned = [
        (one.arrival_s, Load(num_prompt_tokens=one.num_prompt, num_output_tokens=one.num_output,
                             seed=index))
        for index, one in enumerate(requests)
    ]  # fmt: skip
    async with started_cluster([*flags, "--num-threads", str(NUM_THREADS)]) as cluster:
        for _ in range(shape.total):
            await cluster.timed(WARM_UP)
        stages = RealStages(cluster)
        await stages.begin()
        timings, num_failed, took_s = await replay(cluster, planned)
        before, cpu_s = await stages.until_now()
    return Run(
        timings=timings,
        took_s=took_s,
        stages=stages_of(timings, before),
        cpu_s=cpu_s,
        num_failed=num_failed,
    )


def reference_s() -> float:
    """Return how long a computation takes that is always the same, in the median of many."""
    numbers = np.ones((384, 384), np.float32)
    took_s = []
    for _ in range(_REFERENCES):
        began_s = time.perf_counter()
        for _ in range(8):
            np.sin(numbers)
        took_s.append(time.perf_counter() - began_s)
    return median(took_s)


def measured_profile(folder: Path) -> Path:
    """Measure the demo model on this machine with one thread; about a minute."""
    path = folder / "profile.json"
    command = [sys.executable, "-m", "pdserve", "profile", str(path), "--model", "demo"]
    tokens = str(UP_DEFAULTS["max_num_batched_tokens"])
    subprocess.run(
        [*command, "--num-threads", str(NUM_THREADS), "--max-num-batched-tokens", tokens],
        check=True,
        stdout=sys.stderr,
    )
    return path


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    flags = argparse.ArgumentParser(prog="python -m bench.plan_accuracy", description=__doc__)
    flags.formatter_class = argparse.RawDescriptionHelpFormatter
    flags.add_argument("--json", action="store_true", help="one JSON line and no indentation")
    flags.add_argument("--quick", action="store_true", help="12 requests to each shape")
    flags.add_argument("--trace", type=Path, default=TRACE, help="an Azure or Mooncake trace")
    flags.add_argument("--profile", type=Path, help="measured with --num-threads 1 (default: now)")
    flags.add_argument("--shape", action="append", choices=SHAPES, help="default: all")
    flags.add_argument("--duration-s", type=float, default=600.0, help="seconds of arrivals")
    flags.add_argument("--rate-rps", type=float, default=0.5, help="mean arrivals per second")
    flags.add_argument("--slo-ttft-ms", type=float, default=2000.0)
    flags.add_argument("--slo-tpot-ms", type=float, default=150.0)
    return flags


def chosen_requests(options: argparse.Namespace) -> list[TraceRequest]:
    """Return the requests of a run. Raises `ConfigError` for a trace or a rate that gives none."""
    if options.rate_rps <= 0 or options.duration_s <= 0:
        raise ConfigError("--rate-rps and --duration-s: wanted numbers above 0")
    count = 12 if options.quick else max(2, round(options.rate_rps * options.duration_s))
    requests = read_trace(options.trace, count)
    if len(requests) < 2 or not requests[-1].arrival_s > requests[0].arrival_s:
        raise ConfigError(f"{options.trace}: wanted at least two requests at different times")
    return scaled(requests, options.rate_rps)


async def measure(options: argparse.Namespace) -> dict[str, object]:
    """Run every shape, in reality and in the plan. Raises `ConfigError`."""
    requests = chosen_requests(options)
    with tempfile.TemporaryDirectory() as folder:
        path = options.profile or measured_profile(Path(folder))
        profile = read_profile(path, transport="shm")
    config = Config(
        role=Role.DECODE,
        engine=EngineConfig(max_num_batched_tokens=int(UP_DEFAULTS["max_num_batched_tokens"])),
    )
    targets = LatencyTargets(ttft_s=options.slo_ttft_ms / 1e3, tpot_s=options.slo_tpot_ms / 1e3)
    names = options.shape or list(SHAPES)
    real, planned = dict[str, Run](), dict[str, Run]()
    references_s = [reference_s()]
    for name in names:
        print(f"{len(requests)} requests to {name}", file=sys.stderr, flush=True)
        real[name] = await real_run(SHAPES[name], requests)
        references_s.append(reference_s())
        planned[name] = planned_run(profile, config, SHAPES[name], requests)
    return report(
        {name: (figures(one.timings, targets, one.took_s), one) for name, one in real.items()},
        {name: (figures(one.timings, targets, one.took_s), one) for name, one in planned.items()},
    ) | {
        "requests": len(requests),
        "reference_ms": [round(1e3 * one, 2) for one in references_s],
        "unevenness": round(getattr(profile.step, "unevenness", 0.0), 3),
        "beside": {name: round(value, 6) for name, value in asdict(profile.beside).items()},
    }


Sides = Mapping[str, tuple[Mapping[str, float], Run]]
"""The figures of each shape, and its run."""


def report(real: Sides, planned: Sides) -> dict[str, object]:
    """Return how far the plan is from reality; tell what misses its goal, and in which stage."""
    found = {name: errors(real[name][0], planned[name][0]) for name in real}
    worst = {key: max(row[key] for row in found.values()) for key in next(iter(found.values()))}
    for name, row in found.items():
        for figure in (one for one, error in row.items() if error > goal_of(one)):
            values = f"{real[name][0][figure]:.4f}, planned {planned[name][0][figure]:.4f}"
            names = OF_TPOT if "tpot" in figure else OF_TTFT
            stage, over_s = largest_difference(real[name][1], planned[name][1], names)
            said = f"{name} {figure}: {values}; most of it in {stage}: {1e3 * over_s:+.1f} ms"
            print(said, file=sys.stderr)
    winners = {
        side: winner({name: row for name, (row, _) in rows.items()})
        for side, rows in (("real", real), ("plan", planned))
    }
    return {
        "cores": num_cores(),
        "oversubscribed": [n for n in real if SHAPES[n].total * NUM_THREADS >= num_cores()],
        "real": _rounded({name: row for name, (row, _) in real.items()}),
        "plan": _rounded({name: row for name, (row, _) in planned.items()}),
        "error": _rounded(found),
        "stages": {
            name: beside_each_other(real[name][1].stages, planned[name][1].stages) for name in real
        },
        "cpu_s": {
            name: beside_each_other(real[name][1].cpu_s, planned[name][1].cpu_s) for name in real
        },
        "failed": {name: one.num_failed for name, (_, one) in real.items()},
        "worst": {key: round(value, 4) for key, value in worst.items()},
        "within_goals": all(value <= goal_of(key) for key, value in worst.items()),
        "winner": winners,
    }


def goal_of(figure: str) -> float:
    """Return the largest error that is aimed at."""
    return next(goal for name, goal in GOALS.items() if figure.endswith(name))


def num_cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0))


def _rounded(results: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    return {name: {k: round(v, 4) for k, v in row.items()} for name, row in results.items()}


def main() -> int:
    """Parse, measure, print."""
    options = parser().parse_args()
    try:
        result = asyncio.run(measure(options))
    except ConfigError as error:
        sys.exit(str(error))
    print(json.dumps(result, indent=None if options.json else 2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
