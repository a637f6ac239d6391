"""Everything that a plan has found, and how it is found: trials in, an `PlannedNodes` out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from common.errors import PdserveError
from common.nodes import Role
from common.observing.latency import LatencyTargets
from common.settings.config import Config
from pdserve.planning.advice import WORTH, Change, changes, with_changes
from pdserve.planning.search import Fleet, Search
from pdserve.planning.trial import PlanTrial, run_trial, setup_of
from pdserve.planning.workload import Workload, faster
from simulator.profile import DeviceProfile
from simulator.trace_file import TraceRequest

MOST_NODES = 512
OVERLOAD = 1.25
"""Multiple of the load that a cluster carries, at which its first bottleneck is looked for."""
ALONE_REQUESTS, ALONE_GAP_S = 250, 120.0
_ALL_BUSY = 0.8
"""Prompts that wait together are computed in fewer steps: no fewer nodes than this share of those
that they keep busy one by one."""
_TOO_NEAR = 1.05
"""Two kinds of cluster are alike where one carries less than this many times the other's load."""
_T90 = (6.31, 2.92, 2.35, 2.13, 2.02, 1.94, 1.89, 1.86, 1.83)
"""Student's t of a two-sided interval of 90 %, for 2 seeds, 3, …"""


class TargetsOutOfReach(PdserveError):
    """No number of nodes meets the targets."""

    code = "targets_out_of_reach"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The input of a plan: targets that a share `attain` of the requests must meet."""

    profile: DeviceProfile
    config: Config
    workload: Workload
    targets: LatencyTargets
    attain: float
    seeds: int
    num_nodes: int | None = None
    at_once: int = 0
    """Nodes that share a machine and run at full speed at once; 0: each has its own cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A shape with a trial for each seed, and the load that it carries (1: the workload's)."""

    shape: Fleet
    trials: tuple[PlanTrial, ...]
    carries: float

    @property
    def attained(self) -> float:
        """The mean share of requests within both targets."""
        return math.fsum(one.attained for one in self.trials) / len(self.trials)

    @property
    def interval(self) -> tuple[float, float]:
        """The interval of 90 % around the mean; with one seed it is all that is possible."""
        count, mean = len(self.trials), self.attained
        if count < 2:
            return 0.0, 1.0
        variance = math.fsum((one.attained - mean) ** 2 for one in self.trials) / (count - 1)
        half = _T90[min(count - 2, len(_T90) - 1)] * math.sqrt(variance / count)
        return max(0.0, mean - half), min(1.0, mean + half)


@dataclass(frozen=True, slots=True, kw_only=True)
class Advised:
    """Settings that are worth changing, what they bring alone, and all of them together."""

    gains: tuple[tuple[str, float], ...] = ()
    carries: float = 0.0
    num_nodes: int = 0
    """The least number of nodes with them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedNodes:
    """The clusters found: `split` and `mixed` of equal size; `needed` meets the targets."""

    wanted: Wanted
    split: Candidate | None
    mixed: Candidate
    needed: int | None
    gives_way: tuple[tuple[str, int], ...]
    """Stages by how many requests missed a target in them, at more load than the best carries."""
    advised: Advised
    curve: dict[Fleet, list[tuple[float, float]]]
    """Share within the targets by load, for both shapes."""
    num_trials: int

    @property
    def best(self) -> Candidate:
        """The one of both that meets the targets; of two of them the one that carries more."""
        split = self.split
        if split is None or self._rank(split) < self._rank(self.mixed):
            return self.mixed
        return split

    @property
    def margin(self) -> float:
        """The load of the best cluster over that of the other; 0 where the other carries none."""
        if self.split is None:
            return 0.0
        other = self.mixed if self.best is self.split else self.split
        return self.best.carries / other.carries if other.carries else 0.0

    @property
    def is_alike(self) -> bool:
        """Whether both carry about as much."""
        return 0 < self.margin < _TOO_NEAR

    @property
    def is_met(self) -> bool:
        """Whether the best meets the targets."""
        return self.best.attained >= self.wanted.attain

    def _rank(self, one: Candidate) -> tuple[bool, float, float]:
        return one.attained >= self.wanted.attain, one.carries, one.attained


class TrialPlanner:
    """Runs the trials of a plan; `tell` gets a line for each."""

    def __init__(self, wanted: Wanted, tell: Callable[[str], None]) -> None:
        self._wanted = wanted
        self._tell = tell
        self._windows: dict[int, list[TraceRequest]] = {}
        self._ended: dict[tuple[Config, Fleet, float, int], PlanTrial] = {}
        """Trials that were not stopped: they would be the same again."""
        self._num_trials = 0
        self._share = 0.5
        self._alone: dict[bool, float] = {}
        """Share within the targets of requests that never meet, on split and on mixed nodes."""

    def answer(self) -> PlannedNodes:
        """Find everything. Raises `TargetsOutOfReach`."""
        wanted = self._wanted
        first = self._try_alone()
        search = self._search(wanted.config)
        needed = search.least(first, MOST_NODES)
        if needed is None and not wanted.num_nodes:
            raise TargetsOutOfReach(
                f"not even {MOST_NODES} nodes, the most that are tried, serve this load within the "
                "targets: wanted a lower --rate, or shorter requests"
            )
        total = wanted.num_nodes or needed or 1
        answer = self._compared(search, total)
        while not wanted.num_nodes and not answer.is_met and total < MOST_NODES:
            total += 1  # the first seed met the targets, and all of them together do not
            answer = self._compared(search, total)
        if not wanted.num_nodes or answer.is_met:
            needed = min(needed or total, total) if wanted.num_nodes else total
        elif needed is not None:
            needed = max(needed, total + 1)
        best = answer.best
        load = (best.carries or 1.0) * OVERLOAD
        over = self._trial(wanted.config, best.shape, load, 0, wanted=0.0)
        advised = self._advised(best, load, over)
        curve = {
            shape: sorted(
                (at, max(0.0, score)) for (tried, at), score in search.tried.items()
                if tried == shape
            )
            for shape in (answer.mixed.shape, *([answer.split.shape] if answer.split else []))
        }  # fmt: skip
        return replace(
            answer,
            needed=needed,
            gives_way=tuple(over.causes.most_common()),
            advised=advised,
            curve=curve,
            num_trials=self._num_trials,
        )

    # Inside.

    def _compared(self, search: Search, total: int) -> PlannedNodes:
        shape = search.best_split(total)
        split = None if shape is None else self._candidate(search, shape)
        mixed = self._candidate(search, Fleet(mixed=total))
        return PlannedNodes(
            wanted=self._wanted, split=split, mixed=mixed, needed=None, gives_way=(),
            advised=Advised(), curve={}, num_trials=0,
        )  # fmt: skip

    def _candidate(self, search: Search, shape: Fleet) -> Candidate:
        config = self._wanted.config
        trials = tuple(
            self._trial(config, shape, 1.0, seed, wanted=0.0) for seed in range(self._wanted.seeds)
        )
        return Candidate(shape=shape, trials=trials, carries=search.carried(shape))

    def _search(self, config: Config) -> Search:
        def score(shape: Fleet, load: float) -> float:
            alone = self._alone[shape.mixed > 0]
            if alone < self._wanted.attain and config == self._wanted.config:
                return alone - 1  # what is not met alone is not met among others
            return self._trial(config, shape, load, 0, wanted=self._wanted.attain).score

        return Search(score, self._wanted.attain, self._share)

    def _try_alone(self) -> int:
        """Return how many nodes the prompts alone keep busy: fewer cannot meet the targets.

        Raises `TargetsOutOfReach` where even requests that never meet miss the targets.
        """
        wanted = self._wanted
        some = self._window(0)[:ALONE_REQUESTS]
        apart = [replace(one, arrival_s=i * ALONE_GAP_S) for i, one in enumerate(some)]
        shapes = (Fleet(prefill=1, decode=1), Fleet(mixed=1))
        trials = [self._run(wanted.config, shape, apart, 0, 0.0) for shape in shapes]
        if max(one.attained for one in trials) < wanted.attain:
            percent = 100 * wanted.attain
            ttft_s = min(one.ttft_s(percent) for one in trials)
            tpot_s = min(one.tpot_s(percent) for one in trials)
            raise TargetsOutOfReach(
                f"no number of nodes meets a TTFT of {wanted.targets.ttft_s * 1e3:g} ms and a TPOT "
                f"of {wanted.targets.tpot_s * 1e3:g} ms for {percent:g} % of these requests: each "
                f"alone on an idle cluster, {percent:g} % are within {ttft_s * 1e3:.0f} ms and "
                f"{tpot_s * 1e3:.1f} ms, and that is the best there is with this profile"
            )
        split, mixed = trials
        self._alone = {False: split.attained, True: mixed.attained}
        prefill, decode = split.busy[Role.PREFILL], split.busy[Role.DECODE]
        self._share = prefill / max(1e-9, prefill + decode)
        window = self._window(0)
        rate = len(window) / max(window[-1].arrival_s, 1e-9)
        prompt_s = prefill * split.lasted_s / len(some)
        return max(1, min(MOST_NODES, int(rate * prompt_s * _ALL_BUSY)))

    def _advised(self, found: Candidate, load: float, base: PlanTrial) -> Advised:
        """Try settings where the cluster is overloaded, and the good ones together.

        A setting that helps there but carries no more load within the targets is not advised.
        """
        wanted, shape = self._wanted, found.shape
        best: dict[str, tuple[float, Change]] = {}
        for change in changes(wanted.config, shape):
            trial = self._trial(change.config, shape, load, 0, wanted=0.0)
            gain = trial.attained - base.attained
            if gain >= max(WORTH, best[change.key][0] if change.key in best else 0.0):
                best[change.key] = gain, change
        if not best:
            return Advised()
        config = with_changes(wanted.config, [change for _, change in best.values()])
        search = self._search(config)
        carries, total = search.carried(shape), shape.total
        if carries <= found.carries:
            return Advised()
        while total > 1 and carries > 1 and search.least(total - 1, total - 1):
            total -= 1
        gains = tuple((change.flag, gain) for gain, change in best.values())
        return Advised(gains=gains, carries=carries, num_nodes=total)

    def _trial(
        self, config: Config, shape: Fleet, load: float, seed: int, *, wanted: float
    ) -> PlanTrial:
        key = config, shape, load, seed
        if key in self._ended:
            return self._ended[key]
        trial = self._run(config, shape, faster(self._window(seed), load), seed, wanted)
        if not trial.is_stopped:
            self._ended[key] = trial
        result = "too many miss" if trial.is_stopped else f"{100 * trial.attained:.0f} % within"
        self._tell(f"trial {self._num_trials}: {shape} at {load:.2f} of the load: {result}")
        return trial

    def _run(
        self,
        config: Config,
        shape: Fleet,
        requests: Sequence[TraceRequest],
        seed: int,
        least: float,
    ) -> PlanTrial:
        self._num_trials += 1
        wanted = self._wanted
        setup = setup_of(wanted.profile, config, shape, seed, wanted.at_once)
        return run_trial(setup, requests, wanted.targets, wanted=least)

    def _window(self, seed: int) -> list[TraceRequest]:
        if seed not in self._windows:
            self._windows[seed] = self._wanted.workload.window(seed)
        return self._windows[seed]
