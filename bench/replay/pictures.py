"""The results of the replays as SVG pictures. Needs matplotlib; nothing else here does.

The same figures draw the same file, byte for byte: no date, no random ids, text as text.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.replay.comparison import Cell, Comparison, TraceLoad
from bench.replay.replay import Sample
from engine.core.policies.reservation import RESERVATION_POLICIES
from engine.core.policies.victims import VICTIM_ORDERS

_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "pdserve",
    "font.size": 8,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
_COLOURS = ("#4477aa", "#ee6677", "#228833", "#aa7733")
_MOST_POINTS = 60

_BARS = (
    ("mean_e2e_s", "mean E2E, s"),
    ("ttft_s_p90", "TTFT p90, s"),
    ("tpot_s_p99", "TPOT p99, s"),
    ("gap_s_p99", "longest gap p99, s"),
    ("preemptions", "preemptions"),
)
_LINES: tuple[tuple[str, Callable[[Sample], float]], ...] = (
    ("pool in use, %", lambda sample: 100 * sample.pool_use),
    ("waiting", lambda sample: sample.num_waiting),
    ("preemptions so far", lambda sample: sample.num_preemptions),
    ("new_token_ratio", lambda sample: sample.ratio),
)


def draw_comparison(comparison: Comparison, load: TraceLoad, path: Path) -> None:
    """Draw bars: one column per pool, one row per figure, a group per reservation policy."""
    with rc_context(_STYLE):
        figure = Figure(figsize=(10, 9))
        grid = figure.subplots(len(_BARS), len(load.pools), squeeze=False, sharex=True)
        for column, num_blocks in enumerate(load.pools):
            rows = comparison.rows(load.name, num_blocks)
            grid[0][column].set_title(f"{num_blocks} blocks")
            for row, (key, label) in enumerate(_BARS):
                axes = grid[row][column]
                for index, order in enumerate(VICTIM_ORDERS):
                    heights = [rows[policy, order][key] for policy in RESERVATION_POLICIES]
                    lefts = [group + (index - 1) * 0.27 for group in range(len(heights))]
                    axes.bar(lefts, heights, 0.25, label=order, color=_COLOURS[index])
                names = [policy.replace("_", "_\n") for policy in RESERVATION_POLICIES]
                axes.set_xticks(range(len(names)), names)
                axes.grid(visible=False, axis="x")
                if column == 0:
                    axes.set_ylabel(label)
        _finish(
            figure, grid[0][0], f"{load.name}: reservation policies and preemption orders", path
        )


def draw_course(comparison: Comparison, load: TraceLoad, order: str, path: Path) -> None:
    """Draw lines over time: a column per pool, a row per quantity, a line per policy."""
    with rc_context(_STYLE):
        figure = Figure(figsize=(10, 7.5))
        grid = figure.subplots(len(_LINES), len(load.pools), squeeze=False, sharex="col")
        for column, num_blocks in enumerate(load.pools):
            grid[0][column].set_title(f"{num_blocks} blocks")
            grid[-1][column].set_xlabel("seconds")
            for index, policy in enumerate(RESERVATION_POLICIES):
                samples = comparison.results[Cell(load.name, num_blocks, (policy, order))].samples
                shown = samples[:: -(-len(samples) // _MOST_POINTS)]
                times_s = [sample.at_s for sample in shown]
                for row, (_, value_of) in enumerate(_LINES):
                    values = [value_of(sample) for sample in shown]
                    grid[row][column].plot(
                        times_s, values, label=policy, color=_COLOURS[index], linewidth=0.9
                    )
        for row, (label, _) in enumerate(_LINES):
            grid[row][0].set_ylabel(label)
        _finish(figure, grid[0][0], f"{load.name}: the course of one replay, {order}", path)


def _finish(figure: Figure, axes: Axes, title: str, path: Path) -> None:
    for each in figure.axes:
        each.set_ylim(0, each.get_ylim()[1] or 1)
    handles, labels = axes.get_legend_handles_labels()
    figure.suptitle(title, y=0.995)
    figure.legend(handles, labels, loc="upper center", bbox_to_anchor=(0.5, 0.975), ncols=4)
    figure.tight_layout(rect=(0, 0, 1, 0.955))
    figure.savefig(path, format="svg", metadata={"Date": None})
