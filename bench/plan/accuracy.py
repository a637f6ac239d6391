"""How far plans are from real clusters: `python -m bench.plan.accuracy --json`.

The same requests, a published trace with shorter prompts and answers and less load, go to clusters
of `pdserve up` on this machine and to simulated ones with the profile of this machine:

    1P1D, 2P1D, 1P2D, 2 mixed

Here all nodes run with one thread, so the profile is measured with one thread too, and the plan is
told how many cores they share. `oversubscribed` lists the shapes with as many nodes as cores, or
more: the router and the client take some of these, which the plan does not know.

    real                the figures of each shape: TTFT and TPOT at p50 and p99, goodput
    as_profiled         the plan with the profile as it was measured, before the first shape
    at_measured_speed   the same plan, whose steps become slower and faster when the machine did

The speed of a machine may change by half while this runs, as that of a virtual one does, and then
`as_profiled` errs by as much. So nodes record their steps, and the plan at the measured speed takes
from them one factor for all steps, over time: `machine_speed.py` says what such a plan can show,
and what it cannot. `slowness` has the least, mean and most of that factor, and then of each kind of
step its own, the same relative to all steps around them, and their seconds. `in_profile` has this
of the cluster with which the profile was measured, where all should be near 1. Where `slowness` is,
both plans are the same.

Of each plan: figures, their relative `error`, `worst` of all shapes, and `winner`, the shape with
the least median TTFT of those whose goodput is within 2 % of the most. A figure of a plan is the
median of five seeds, which choose between equal nodes; `spread` has the least and the most. A real
cluster draws once, so of few requests p99 may be anything in between. `stages` and `cpu_s` show
where both sides differ (`stages.py`), the real value first; a figure that misses its goal is
told on standard error, with its stage.

Clients ask for token ids, as `pdserve profile` does: without them a router sends no event for a
token that ends within a character, and the first event could be that of the second token. Every
node has served before the first request.

Each shape serves for `--duration-s`, ten minutes by default. Run it while the machine does nothing
else; `--quick` serves few requests, and its percentiles say little.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, replace
from pathlib import Path

from bench.command import flags_of, print_figures
from bench.plan.errors import of_plan, rounded, side_of, spread_of, winner
from bench.plan.machine_speed import Slowness, slowed
from bench.plan.recorded_steps import read_steps, timed_steps
from bench.plan.stages import RealStages, Run, planned_cpu_s, planned_stages, stages_of
from bench.running_cluster import Load, RunningCluster, started_cluster
from bench.serving import WARM_UP, Times, replay
from common.control_group import num_cores
from common.errors import ConfigError
from common.nodes import Role
from common.observing.latency import LatencyTargets, RequestTiming
from common.settings.config import Config, EngineConfig, ModelConfig
from common.settings.tracing_config import TracingConfig
from pdserve.checkpoints.resolve import resolve_checkpoint
from pdserve.configuration.flags import UP_DEFAULTS
from pdserve.planning.search import Fleet
from pdserve.planning.trial import setup_of
from pdserve.profiling.profile_command import loaded_runner, run_profile, served_times
from pdserve.profiling.served_times import ServedTimes
from simulator.clients import ClientRequest
from simulator.cluster import SimulatedCluster
from simulator.profile import DeviceProfile, read_profile
from simulator.profiles.beside_steps import BesideSteps
from simulator.trace_file import TraceRequest, read_trace

TRACE = Path(__file__).parents[1] / "traces" / "azure_conv.csv"
SHAPES = {
    "1P1D": Fleet(1, 1),
    "2P1D": Fleet(2, 1),
    "1P2D": Fleet(1, 2),
    "2 mixed": Fleet(mixed=2),
}
SEEDS = range(5)
NUM_THREADS = 1
SHORTER = 4
"""A prompt and an answer have so many times fewer tokens than those of the trace."""
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


def at_once() -> int:
    """Return how many steps this machine runs at full speed."""
    return max(1, num_cores() // NUM_THREADS)


def planned_run(
    profile: DeviceProfile,
    config: Config,
    shape: Fleet,
    requests: Sequence[TraceRequest],
    slowness: Slowness | None = None,
    seed: int = 0,
) -> Run:
    """Return what the plan says of each request; with `slowness` at the speed of the real machine.

    Clients ask for exactly as many tokens as they get, as those of the real cluster do.
    """
    steps = None
    if slowness is not None:
        profile, steps = slowed(profile, slowness)
    cluster = SimulatedCluster(setup_of(profile, config, shape, seed=seed, at_once=at_once()))
    if steps is not None:
        steps.now_s = cluster.timeline.now_s
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


class TokenClient:
    """A client of a cluster that sees every token."""

    def __init__(self, cluster: RunningCluster) -> None:
        self._cluster = cluster

    async def timed(self, load: Load) -> RequestTiming:
        """Send one request; return the times of its tokens. Raises as `RunningCluster.timed`."""
        return (await self._cluster.answer(load.body() | {"return_token_ids": True})).timing


async def warm_up(client: Times, shape: Fleet) -> None:
    """Send every node a request: as many at once as there are nodes, all of them different."""
    loads = [replace(WARM_UP, seed=WARM_UP.seed + number) for number in range(shape.total)]
    await asyncio.gather(*map(client.timed, loads))


async def real_run(
    shape: Fleet, requests: Sequence[TraceRequest], profile: DeviceProfile
) -> tuple[Run, Slowness]:
    """Return what a cluster on this machine does, and how slow the machine was meanwhile."""
    flags = [f for role, n in shape.num_nodes.items() for f in (f"--{role.value}", str(n))]
    planned = [
        (one.arrival_s, Load(num_prompt_tokens=one.num_prompt, num_output_tokens=one.num_output,
                             seed=index))
        for index, one in enumerate(requests)
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as recordings:
        flags += ["--num-threads", str(NUM_THREADS), "--record", recordings]
        async with started_cluster(flags) as cluster:
            client = TokenClient(cluster)
            await warm_up(client, shape)
            stages = RealStages(cluster)
            await stages.begin()
            began_at_s = time.monotonic()
            timings, num_failed, took_s = await replay(client, planned)
            before, cpu_s = await stages.until_now()
        slowness = recorded_slowness(Path(recordings), profile, began_at_s)
    run = Run(
        timings=timings,
        took_s=took_s,
        stages=stages_of(timings, before),
        cpu_s=cpu_s,
        num_failed=num_failed,
    )
    return run, slowness


def recorded_slowness(
    recordings: Path, profile: DeviceProfile, began_at_s: float = 0.0
) -> Slowness:
    """Return how slow the machine was, by the steps of nodes that have ended.

    Raises `ConfigError` for a recording that cannot be read, and where no step was run.
    """
    return Slowness(timed_steps(read_steps(recordings), profile, at_once()), began_at_s)


def profiled_config() -> Config:
    """Return the settings with which the demo model is profiled. Raises `CheckpointError`."""
    return Config(
        role=Role.MIXED,
        model=ModelConfig(model=str(resolve_checkpoint(str(UP_DEFAULTS["model"])))),
        engine=EngineConfig(
            max_num_batched_tokens=int(UP_DEFAULTS["max_num_batched_tokens"]),
            num_threads=NUM_THREADS,
        ),
    )


def measured_profile(path: Path, recordings: Path) -> None:
    """Measure the demo model on this machine with one thread, as `pdserve profile` does.

    The nodes of the cluster that it starts record their steps.
    """

    def serve(served: Config) -> ServedTimes:
        return served_times(replace(served, tracing=TracingConfig(record=str(recordings))))

    with redirect_stdout(sys.stderr):
        run_profile(profiled_config(), path, loaded_runner, serve)


def shown_beside(beside: BesideSteps) -> dict[str, float]:
    """Return what a profile says of the time beside steps, by name."""
    numbers = asdict(beside) | beside.slowdowns._asdict()
    del numbers["slowdowns"]
    return {name: round(value, 6) for name, value in numbers.items()}


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    flags = flags_of("bench.plan.accuracy", __doc__)
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


def profile_of(path: Path | None) -> tuple[DeviceProfile, dict[str, list[float]]]:
    """Return the profile of a file, else one that is measured, and how slow its steps were then by
    what it says itself. Raises `ConfigError`."""
    if path is not None:
        return read_profile(path, transport="shm"), {}
    with tempfile.TemporaryDirectory() as folder:
        path, recordings = Path(folder) / "profile.json", Path(folder) / "recordings"
        measured_profile(path, recordings)
        profile = read_profile(path, transport="shm")
        return profile, recorded_slowness(recordings, profile).shown()


def measure(options: argparse.Namespace) -> dict[str, object]:
    """Run every shape, in reality and in both plans. Raises `ConfigError`."""
    requests = chosen_requests(options)
    profile, in_profile = profile_of(options.profile)
    config = Config(
        role=Role.DECODE,
        engine=EngineConfig(max_num_batched_tokens=int(UP_DEFAULTS["max_num_batched_tokens"])),
    )
    targets = LatencyTargets(ttft_s=options.slo_ttft_ms / 1e3, tpot_s=options.slo_tpot_ms / 1e3)
    names: list[str] = options.shape or list(SHAPES)
    real, planned, followed = dict[str, list[Run]](), dict[str, list[Run]](), dict[str, list[Run]]()
    slowness: dict[str, dict[str, list[float]]] = {}
    for name in names:
        print(f"{len(requests)} requests to {name}", file=sys.stderr, flush=True)
        run, slow = asyncio.run(real_run(SHAPES[name], requests, profile))
        real[name], slowness[name] = [run], slow.shown()
        planned[name], followed[name] = (
            [planned_run(profile, config, SHAPES[name], requests, one, seed) for seed in SEEDS]
            for one in (None, slow)
        )
    sides = [side_of(runs, targets) for runs in (real, planned, followed)]
    shown = {name: row for name, (row, _) in sides[0].items()}
    return {
        "cores": num_cores(),
        "requests": len(requests),
        "oversubscribed": [n for n in names if SHAPES[n].total * NUM_THREADS >= num_cores()],
        "slowness": slowness,
        "in_profile": in_profile,
        "real": rounded(shown),
        "winner": winner(shown),
        "failed": {name: one.num_failed for name, (one,) in real.items()},
        "as_profiled": of_plan(sides[0], sides[1], "as profiled")
        | {"spread": spread_of(planned, targets)},
        "at_measured_speed": of_plan(sides[0], sides[2], "at the measured speed")
        | {"spread": spread_of(followed, targets)},
        "unevenness": round(getattr(profile.step, "unevenness", 0.0), 3),
        "beside": shown_beside(profile.beside),
    }


def main() -> int:
    """Parse, measure, print."""
    options = parser().parse_args()
    try:
        result = measure(options)
    except ConfigError as error:
        sys.exit(str(error))
    print_figures(result, is_one_line=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
