"""One trial: a shape of cluster serves a workload on the virtual clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from common.errors import InternalError
from common.nodes import Role
from common.observing.latency import LatencyTargets, percentile
from common.settings.config import Config
from pdserve.planning.search import Fleet
from simulator.clients import client_requests
from simulator.cluster import ClusterSetup, SimulatedCluster
from simulator.profile import DeviceProfile
from simulator.served import ServedRequest
from simulator.trace_file import TraceRequest

CHECKS = 100
"""How often a trial is asked whether it can still succeed, in the time of its arrivals."""
_ANSWERED = ("stop", "length")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanTrial:
    """What became of the requests. Times in seconds; `causes` counts those that missed, by stage.

    `score` orders trials: the share within both targets, or below 0 where the trial was stopped,
    and then the lower the sooner.
    """

    score: float
    is_stopped: bool
    num_requests: int
    num_failed: int
    ttfts_s: tuple[float, ...]
    tpots_s: tuple[float, ...]
    causes: Counter[str]
    busy: dict[Role, float]
    """Share of the time in which a node of each role computes."""
    lasted_s: float
    """Virtual seconds until the last request had ended, or the trial was stopped."""

    @property
    def attained(self) -> float:
        """The share of the requests within both targets; 0 where the trial was stopped."""
        return max(0.0, self.score)

    def ttft_s(self, percent: float) -> float:
        """Return a percentile of the time to the first token."""
        return percentile(self.ttfts_s, percent) if self.ttfts_s else 0.0

    def tpot_s(self, percent: float) -> float:
        """Return a percentile of the time per token after the first."""
        return percentile(self.tpots_s, percent) if self.tpots_s else 0.0


def setup_of(
    profile: DeviceProfile, config: Config, shape: Fleet, seed: int, at_once: int = 0
) -> ClusterSetup:
    """Return a cluster of this shape."""
    return ClusterSetup(
        profile=profile, num_nodes=shape.num_nodes, config=config, seed=seed, at_once=at_once
    )


def run_trial(
    setup: ClusterSetup,
    requests: Sequence[TraceRequest],
    targets: LatencyTargets,
    *,
    wanted: float,
) -> PlanTrial:
    """Serve `requests` on a cluster.

    It is stopped when so many have missed a target that less than `wanted` can be within both; a
    `wanted` of 0 lets all of them end.
    """
    cluster = SimulatedCluster(setup)
    clients = client_requests(requests, max_model_len=cluster.max_model_len, seed=setup.seed)
    span_s = requests[-1].arrival_s
    judge = _Judge(targets, most_missed(len(clients), wanted), span_s / CHECKS)
    served = cluster.run(clients, judge if wanted > 0 else None)
    now_s = cluster.timeline.now_s()
    causes = Counter(
        cause for one in served if (cause := cause_of_miss(one, targets, now_s)) is not None
    )
    num_good = len(served) - causes.total()
    score = num_good / len(served)
    if judge.has_stopped:
        score = min(now_s / span_s, 1e3) / 1e3 - 1
    answered = [one for one in served if one.outcome in _ANSWERED]
    busy: dict[Role, float] = {}
    for role, count in setup.num_nodes.items():
        nodes = [node for node in cluster.nodes if node.me.node_id.startswith(role.value)]
        busy[role] = sum(node.execution.busy_s for node in nodes) / count / max(now_s, 1e-9)
    return PlanTrial(
        score=score,
        is_stopped=judge.has_stopped,
        num_requests=len(served),
        num_failed=sum(one.outcome not in ("", *_ANSWERED) for one in served),
        ttfts_s=tuple(one.ttft_s for one in served if one.first_at_s >= 0),
        tpots_s=tuple(tpot for one in answered if (tpot := one.tpot_s) is not None),
        causes=causes,
        busy=busy,
        lasted_s=now_s,
    )


def run_story(setup: ClusterSetup, requests: Sequence[TraceRequest], index: int) -> ServedRequest:
    """Serve `requests` to their ends, and return the one at `index` with its story.

    Raises `InternalError` without such a request.
    """
    cluster = SimulatedCluster(replace(setup, told=frozenset({index})))
    clients = client_requests(requests, max_model_len=cluster.max_model_len, seed=setup.seed)
    for one in cluster.run(clients):
        if one.story is not None:
            return one
    raise InternalError(f"there is no request {index}")


def most_missed(count: int, wanted: float) -> int:
    """Return how many of `count` requests may miss, so that a share of `wanted` does not."""
    return next(n for n in range(count, -1, -1) if n == 0 or (count - n) / count >= wanted)


def cause_of_miss(one: ServedRequest, targets: LatencyTargets, now_s: float) -> str | None:
    """Return the stage that made a request miss its targets; None where it has met them so far."""
    if one.outcome not in ("", *_ANSWERED):
        return "refused"
    if one.first_at_s < 0:
        if now_s - one.arrived_at_s <= targets.ttft_s:
            return None
        return "place" if one.granted_at_s < 0 else "prefill queue"
    if one.ttft_s > targets.ttft_s:
        stages = {
            "place": one.granted_at_s - one.arrived_at_s,
            "prefill queue": one.queue_s,
            "prefill": one.compute_s,
        }
        return max(stages, key=lambda name: stages[name])
    tpot_s = one.tpot_s
    if not one.outcome or tpot_s is None or tpot_s <= targets.tpot_s:
        return None
    over_s = (tpot_s - targets.tpot_s) * (one.num_tokens - 1)
    if one.second_at_s - one.first_at_s - targets.tpot_s >= over_s:
        return "transfer"
    return "pause" if one.longest_gap_s - targets.tpot_s >= over_s else "decode"


class _Judge:
    """Stops a trial that cannot succeed any more."""

    def __init__(self, targets: LatencyTargets, most_missed: int, every_s: float) -> None:
        self._targets = targets
        self._most_missed = most_missed
        self._every_s = self._next_s = every_s
        self.has_stopped = False

    def __call__(self, served: Sequence[ServedRequest], now_s: float) -> bool:
        if now_s < self._next_s:
            return False
        self._next_s = now_s + self._every_s
        num_missed = 0
        for one in served:
            if one.arrived_at_s > now_s:
                break
            num_missed += cause_of_miss(one, self._targets, now_s) is not None
        self.has_stopped = num_missed > self._most_missed
        return self.has_stopped
