"""Every row on every trace, pool and load, and their ranking."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from bench.replay.figures import Figures, figures_of
from bench.replay.replay import Replay, ReplayResult, ReplaySetup
from bench.replay.rows import BY_NAME, ROWS
from common.settings.config import SchedulingConfig
from simulator.step_cost import StepCost
from simulator.trace_file import TraceRequest


@dataclass(frozen=True, slots=True)
class Cell:
    """One replay of the comparison."""

    trace: str
    num_blocks: int
    load: float
    row: str


@dataclass(frozen=True, slots=True)
class TraceLoad:
    """A trace with the settings of its replays.

    `speed_ups` are the factors of the arrivals' speed, by load: the share of the time in which the
    GPU would be busy if it never ran out of blocks.
    """

    name: str
    requests: Sequence[TraceRequest]
    pools: tuple[int, ...]
    speed_ups: Mapping[float, float]


@dataclass(slots=True)
class Comparison:
    """The results of all replays, cell by cell."""

    results: dict[Cell, ReplayResult]
    figures: dict[Cell, Figures]

    def rows(self, trace: str, num_blocks: int, load: float) -> dict[str, Figures]:
        """Return the figures of one trace on one pool at one load."""
        return {row.name: self.figures[Cell(trace, num_blocks, load, row.name)] for row in ROWS}


def compare(
    loads: Sequence[TraceLoad],
    setup: ReplaySetup,
    cost: StepCost,
    base: SchedulingConfig,
    on_progress: Callable[[Cell, int, int], None],
) -> Comparison:
    """Replay everything, one after the other; `on_progress` is called before each cell.

    `setup` is what all replays share; pool and speed-up are each load's own.
    """
    cells = [
        (trace, Cell(trace.name, num_blocks, load, row.name))
        for trace in loads
        for num_blocks in trace.pools
        for load in trace.speed_ups
        for row in ROWS
    ]
    comparison = Comparison({}, {})
    for number, (trace, cell) in enumerate(cells, 1):
        on_progress(cell, number, len(cells))
        speed_up = trace.speed_ups[cell.load]
        one = replace(setup, num_blocks=cell.num_blocks, speed_up=speed_up)
        result = Replay(trace.requests, one, BY_NAME[cell.row], base, cost).run()
        comparison.results[cell] = result
        comparison.figures[cell] = figures_of(result)
    return comparison


RANKED_BY = "mean_e2e_s"
_COMPARED = (RANKED_BY, "ttft_s_p90", "tpot_s_p99", "gap_s_p99", "completion_s")
_HIGHER_IS_BETTER = "goodput"
ORACLE = "oracle"
_SUMMED = ("preemptions", "recomputed_tokens", "waited_10s")


def ranking(figures: Mapping[Cell, Figures]) -> list[tuple[str, Figures]]:
    """Rank the rows over all cells, best first; the oracle is no competitor.

    A time is divided by the best one of the same trace, pool and load. The geometric mean of these
    ratios counts (1: no row was ever better), and `worst` is the largest ratio. Mean E2E time
    decides: it includes queueing, stalls and recomputation. Goodput is the mean over the cells.
    Ties are broken by name.
    """
    places = {replace(cell, row=""): cell.row for cell in figures}
    best = {
        (key, place): min(
            values[key]
            for cell, values in figures.items()
            if replace(cell, row="") == place and (cell.row != ORACLE)
        )
        for place in places
        for key in _COMPARED
    }
    ranked = []
    for row in dict.fromkeys(cell.row for cell in figures):
        mine = {replace(c, row=""): values for c, values in figures.items() if c.row == row}
        summary: Figures = {}
        for key in _COMPARED:
            ratios = [_ratio(values[key], best[key, place]) for place, values in mine.items()]
            summary[key] = round(math.exp(sum(map(math.log, ratios)) / len(ratios)), 4)
            if key == RANKED_BY:
                summary["worst"] = round(max(ratios), 4)
        for key in _SUMMED:
            summary[key] = sum(values[key] for values in mine.values())
        goodput = [values[_HIGHER_IS_BETTER] for values in mine.values()]
        summary[_HIGHER_IS_BETTER] = round(sum(goodput) / len(goodput), 4)
        ranked.append((row, summary))
    return sorted(ranked, key=lambda entry: (entry[1][RANKED_BY], entry[0]))


def _ratio(value: float, best: float) -> float:
    return value / best if best > 0 else 1.0
