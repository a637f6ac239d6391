"""Every reservation policy with every preemption order, and their ranking."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from bench.replay.figures import Figures, figures_of
from bench.replay.replay import Replay, ReplayResult, ReplaySetup
from bench.replay.step_cost import StepCost
from bench.replay.trace_file import TraceRequest
from common.config import SchedulingConfig
from engine.core.policies.reservation import RESERVATION_POLICIES
from engine.core.policies.victims import VICTIM_ORDERS

Pair = tuple[str, str]
"""A reservation policy and a preemption order."""

PAIRS: tuple[Pair, ...] = tuple((r, o) for r in RESERVATION_POLICIES for o in VICTIM_ORDERS)


@dataclass(frozen=True, slots=True)
class Cell:
    """One replay of the comparison."""

    trace: str
    num_blocks: int
    pair: Pair


@dataclass(frozen=True, slots=True)
class TraceLoad:
    """A trace with the settings of its replays: requests, pools, speed-up of the arrivals."""

    name: str
    requests: Sequence[TraceRequest]
    pools: tuple[int, ...]
    speed_up: float


@dataclass(slots=True)
class Comparison:
    """The results of all replays, cell by cell."""

    results: dict[Cell, ReplayResult]
    figures: dict[Cell, Figures]

    def rows(self, trace: str, num_blocks: int) -> dict[Pair, Figures]:
        """Return the figures of one trace on one pool."""
        return {pair: self.figures[Cell(trace, num_blocks, pair)] for pair in PAIRS}


def compare(
    loads: Sequence[TraceLoad],
    setup: ReplaySetup,
    cost: StepCost,
    base: SchedulingConfig,
    on_progress: Callable[[Cell, int, int], None],
) -> Comparison:
    """Replay everything, one after the other; `on_progress` is called before each cell.

    `setup` is what all replays share; pool and speed-up are each load's own. An order only matters
    when a sequence is preempted, so a replay without preemptions counts for all orders.
    """
    cells = [(load, Cell(load.name, n, p)) for load in loads for n in load.pools for p in PAIRS]
    comparison = Comparison({}, {})
    for number, (load, cell) in enumerate(cells, 1):
        on_progress(cell, number, len(cells))
        reservation, order = cell.pair
        first = comparison.results.get(replace(cell, pair=(reservation, next(iter(VICTIM_ORDERS)))))
        if first is not None and first.num_preemptions == 0:
            result = first
        else:
            result = Replay(
                load.requests,
                replace(setup, num_blocks=cell.num_blocks, speed_up=load.speed_up),
                replace(base, reservation_policy=reservation, preemption_policy=order),
                cost,
            ).run()
        comparison.results[cell] = result
        comparison.figures[cell] = figures_of(result)
    return comparison


RANKED_BY = "mean_e2e_s"
_COMPARED = (RANKED_BY, "ttft_s_p90", "tpot_s_p99", "gap_s_p99", "completion_s")
_SUMMED = ("preemptions", "recomputed_tokens", "waited_10s")


def ranking(figures: Mapping[Cell, Figures]) -> list[tuple[Pair, Figures]]:
    """Rank the policies over all cells, best first.

    A time is divided by the best one of the same trace and pool. The geometric mean of these ratios
    counts (1: no policy was ever better), and `worst` is the largest ratio. Mean E2E time decides:
    it includes queueing, stalls and recomputation. Ties are broken by name.
    """
    best = {
        (key, cell.trace, cell.num_blocks): min(
            values[key]
            for other, values in figures.items()
            if (other.trace, other.num_blocks) == (cell.trace, cell.num_blocks)
        )
        for cell in figures
        for key in _COMPARED
    }
    ranked = []
    for pair in dict.fromkeys(cell.pair for cell in figures):
        mine = {cell: values for cell, values in figures.items() if cell.pair == pair}
        summary: Figures = {}
        for key in _COMPARED:
            ratios = [
                _ratio(values[key], best[key, cell.trace, cell.num_blocks])
                for cell, values in mine.items()
            ]
            summary[key] = round(math.exp(sum(map(math.log, ratios)) / len(ratios)), 4)
            if key == RANKED_BY:
                summary["worst"] = round(max(ratios), 4)
        for key in _SUMMED:
            summary[key] = sum(values[key] for values in mine.values())
        ranked.append((pair, summary))
    return sorted(ranked, key=lambda entry: (entry[1][RANKED_BY], entry[0]))


def _ratio(value: float, best: float) -> float:
    return value / best if best > 0 else 1.0
