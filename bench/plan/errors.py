"""How far the figures of a plan are from those of a cluster, and which stage differs most."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median

from bench.plan.stages import OF_TPOT, OF_TTFT, Run, beside_each_other, largest_difference
from common.observing.latency import (
    LatencyTargets,
    RequestTiming,
    goodput_rps,
    percentile,
)

GOALS = {"p50": 0.07, "p99": 0.20, "goodput": 0.07}
_EQUAL = 0.02
"""Goodputs that differ by so little are equal: they depend on when the last request ends."""

Figures = Mapping[str, float]
Side = Mapping[str, tuple[Figures, Run]]
"""The figures of each shape, and its run."""


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


def goal_of(figure: str) -> float:
    """Return the largest error that is aimed at."""
    return next(goal for name, goal in GOALS.items() if figure.endswith(name))


def side_of(runs: Mapping[str, Sequence[Run]], targets: LatencyTargets) -> Side:
    """Return the median of each figure over the runs of a shape, and a run with the mean stages."""
    found: dict[str, tuple[Figures, Run]] = {}
    for name, some in runs.items():
        rows = [figures(one.timings, targets, one.took_s) for one in some]
        means = {stage: fmean(one.stages[stage] for one in some) for stage in some[0].stages}
        medians = {figure: median(row[figure] for row in rows) for figure in rows[0]}
        found[name] = medians, replace(some[0], stages=means)
    return found


def spread_of(runs: Mapping[str, Sequence[Run]], targets: LatencyTargets) -> dict[str, object]:
    """Return the least and the most of each figure over the runs of a shape."""
    shown: dict[str, object] = {}
    for name, some in runs.items():
        rows = [figures(one.timings, targets, one.took_s) for one in some]
        shown[name] = {
            figure: [round(choose(row[figure] for row in rows), 4) for choose in (min, max)]
            for figure in rows[0]
        }
    return shown


def of_plan(real: Side, planned: Side, kind: str) -> dict[str, object]:
    """Return how far one plan is from reality; tell what misses its goal, and in which stage.

    `kind` says which plan it is.
    """
    found = {name: errors(real[name][0], planned[name][0]) for name in real}
    worst = {key: max(row[key] for row in found.values()) for key in next(iter(found.values()))}
    for name, row in found.items():
        for figure in (one for one, error in row.items() if error > goal_of(one)):
            values = f"{real[name][0][figure]:.4f}, {kind} {planned[name][0][figure]:.4f}"
            names = OF_TPOT if "tpot" in figure else OF_TTFT
            stage, over_s = largest_difference(real[name][1], planned[name][1], names)
            said = f"{name} {figure}: {values}; most of it in {stage}: {1e3 * over_s:+.1f} ms"
            print(said, file=sys.stderr)
    return {
        "plan": rounded({name: row for name, (row, _) in planned.items()}),
        "error": rounded(found),
        "stages": {
            name: beside_each_other(real[name][1].stages, planned[name][1].stages) for name in real
        },
        "cpu_s": {
            name: beside_each_other(real[name][1].cpu_s, planned[name][1].cpu_s) for name in real
        },
        "worst": {key: round(value, 4) for key, value in worst.items()},
        "within_goals": all(value <= goal_of(key) for key, value in worst.items()),
        "winner": winner({name: row for name, (row, _) in planned.items()}),
    }


def rounded(results: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Return the figures with four digits after the point."""
    return {name: {k: round(v, 4) for k, v in row.items()} for name, row in results.items()}
