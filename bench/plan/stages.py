"""Where the time of requests goes, on a real cluster and in a plan: the same stages of both.

    place     until a node has a place for the answer: the HTTP edge, placement, the reservation
    queue     the prompt waits for its first step
    compute   from there to token 0
    delivery  the rest of the time to the first token: calls, streams, the way to the client
    handoff   from the first token to the second: the KV's way, and a step
    gap       from each further token to the next

All are mean seconds of a request. Seconds of processors depend less on what else a machine does:
`cpu_s` has those of all nodes of a role, the router and the client, and in a plan the seconds in
which nodes compute.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from bench.agents.processes import cpu_s, pids_by_name
from bench.running_cluster import RunningCluster
from common.observing.latency import RequestTiming
from router.core.ttft_stages import Stage
from simulator.cluster import SimulatedCluster
from simulator.served import ServedRequest

OF_TTFT, OF_TPOT = ("place", "queue", "compute", "delivery"), ("handoff", "gap")
_BEFORE_PLACE = (Stage.EDGE, Stage.RETRIES, Stage.PLACING, Stage.RESERVE)
_STAGE = "pdserve_ttft_stage_seconds"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What became of the requests; seconds until the last one had ended, stages, and processors."""

    timings: Sequence[RequestTiming]
    took_s: float
    stages: Mapping[str, float]
    cpu_s: Mapping[str, float]
    num_failed: int = 0


def stages_of(timings: Sequence[RequestTiming], before: Mapping[str, float]) -> dict[str, float]:
    """Return all stages; `before` has those between arrival and delivery."""
    ttft_s = fmean(one.ttft_s for one in timings)
    stages = {**before, "delivery": ttft_s - sum(before.values())}
    second = [one.itl_s[0] for one in timings if one.num_tokens > 1]
    gaps_s = [
        (one.chunk_at_s[-1] - one.chunk_at_s[1]) / (one.num_tokens - 2)
        for one in timings
        if one.num_tokens > 2
    ]
    stages["handoff"] = fmean(second) if second else 0.0
    stages["gap"] = fmean(gaps_s) if gaps_s else 0.0
    return stages


class RealStages:
    """Reads what the router and the kernel count, from its making until `until_now`."""

    def __init__(self, cluster: RunningCluster) -> None:
        self._cluster = cluster
        self._before: dict[str, float] = {}
        self._cpu_s: dict[str, float] = {}

    async def begin(self) -> None:
        """Count from now on."""
        self._before, self._cpu_s = await self._stages(), self._used_cpu_s()

    async def until_now(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return the stages between arrival and delivery, and the seconds of processors."""
        now, used_s = await self._stages(), self._used_cpu_s()
        count = max(1.0, now["count"] - self._before["count"])
        mean_s = {one: (now[one] - self._before[one]) / count for one in Stage}
        stages = {
            "place": sum(mean_s[one] for one in _BEFORE_PLACE),
            "queue": mean_s[Stage.PREFILL_QUEUE],
            "compute": mean_s[Stage.PREFILL_COMPUTE],
        }
        return stages, {name: used_s[name] - self._cpu_s[name] for name in used_s}

    async def _stages(self) -> dict[str, float]:
        found = await self._cluster.metrics()
        sums = {one.value: found[f'{_STAGE}_sum{{stage="{one.value}"}}'] for one in Stage}
        return {**sums, "count": found[f'{_STAGE}_count{{stage="{Stage.EDGE.value}"}}']}

    def _used_cpu_s(self) -> dict[str, float]:
        """Return CPU seconds until now: of the nodes of each role, the router, and this process."""
        used_s = {"client": time.process_time()}
        for name, pid in pids_by_name(self._cluster.pid).items():
            kind = name.partition("-")[0]
            used_s[kind] = used_s.get(kind, 0.0) + cpu_s(pid)
        return used_s


def planned_stages(served: Sequence[ServedRequest]) -> dict[str, float]:
    """Return the stages between arrival and delivery of a simulation."""
    answered = [one for one in served if one.num_tokens]
    prompts = [_prompt_stages(one) for one in answered]
    return {
        "place": fmean(one.granted_at_s - one.arrived_at_s for one in answered),
        "queue": fmean(queue_s for queue_s, _ in prompts),
        "compute": fmean(compute_s for _, compute_s in prompts),
    }


def _prompt_stages(served: ServedRequest) -> tuple[float, float]:
    """Return how long a prompt waited and was computed, as a router counts it: what a node says of
    the time before its answer is no stage after it."""
    prompt_s = served.first_at_s - served.granted_at_s
    compute_s = min(served.compute_s, prompt_s)
    return min(served.queue_s, prompt_s - compute_s), compute_s


def planned_cpu_s(cluster: SimulatedCluster) -> dict[str, float]:
    """Return the seconds in which the nodes of each role compute."""
    found: dict[str, float] = {}
    for node in cluster.nodes:
        role = node.me.node_id.partition("-")[0]
        found[role] = found.get(role, 0.0) + node.execution.busy_s
    return found


def largest_difference(real: Run, planned: Run, names: Sequence[str]) -> tuple[str, float]:
    """Return the stage of these that differs most, and by how many seconds the plan is too high."""
    name = max(names, key=lambda one: abs(planned.stages[one] - real.stages[one]))
    return name, planned.stages[name] - real.stages[name]


def beside_each_other(
    real: Mapping[str, float], planned: Mapping[str, float]
) -> dict[str, list[float | None]]:
    """Return both values of each name, the real one first; None where there is none."""
    return {
        name: [None if name not in side else round(side[name], 5) for side in (real, planned)]
        for name in dict.fromkeys((*real, *planned))
    }
