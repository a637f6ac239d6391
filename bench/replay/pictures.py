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
from bench.replay.rows import ROWS

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
_COLOURS = (
    *("#4477aa", "#88bbdd", "#228833", "#99cc88", "#aa7733"),
    *("#888888", "#ee6677", "#cc3311", "#000000"),
)
_COURSE_OF = ("learned", "global_ratio", "none", "vLLM-like", "oracle")
_COURSE_LOAD = 1.0
_MOST_POINTS = 60

_BARS = (
    ("goodput", "goodput, 1/s"),
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
)


def draw_comparison(comparison: Comparison, load: TraceLoad, path: Path) -> None:
    """Draw bars: one column per pool, one line of bars per figure, a group per load."""
    with rc_context(_STYLE):
        figure = Figure(figsize=(10, 10))
        grid = figure.subplots(len(_BARS), len(load.pools), squeeze=False, sharex=True)
        width = 0.9 / len(ROWS)
        for column, num_blocks in enumerate(load.pools):
            cells = [comparison.rows(load.name, num_blocks, share) for share in load.speed_ups]
            grid[0][column].set_title(f"{num_blocks} blocks")
            for line, (key, label) in enumerate(_BARS):
                axes = grid[line][column]
                for index, row in enumerate(ROWS):
                    heights = [cell[row.name][key] for cell in cells]
                    lefts = [group + index * width - 0.4 for group in range(len(heights))]
                    axes.bar(lefts, heights, width, label=row.name, color=_COLOURS[index])
                axes.set_xticks(range(len(cells)), [f"load {share:g}" for share in load.speed_ups])
                axes.grid(visible=False, axis="x")
                if column == 0:
                    axes.set_ylabel(label)
        _finish(figure, grid[0][0], f"{load.name}: scheduling policies at several loads", path)


def draw_course(comparison: Comparison, load: TraceLoad, path: Path) -> None:
    """Draw lines over time: a column per pool, a row per quantity, a line per policy.

    The load is the one nearest to 1.
    """
    share = min(load.speed_ups, key=lambda one: abs(one - _COURSE_LOAD))
    with rc_context(_STYLE):
        figure = Figure(figsize=(10, 7.5))
        grid = figure.subplots(len(_LINES), len(load.pools), squeeze=False, sharex="col")
        for column, num_blocks in enumerate(load.pools):
            grid[0][column].set_title(f"{num_blocks} blocks")
            grid[-1][column].set_xlabel("seconds")
            for index, row in enumerate(ROWS):
                if row.name not in _COURSE_OF:
                    continue
                samples = comparison.results[Cell(load.name, num_blocks, share, row.name)].samples
                shown = samples[:: -(-len(samples) // _MOST_POINTS)]
                times_s = [sample.at_s for sample in shown]
                for line, (_, value_of) in enumerate(_LINES):
                    values = [value_of(sample) for sample in shown]
                    grid[line][column].plot(
                        times_s, values, label=row.name, color=_COLOURS[index], linewidth=0.9
                    )
        for line, (label, _) in enumerate(_LINES):
            grid[line][0].set_ylabel(label)
        _finish(figure, grid[0][0], f"{load.name}: the course of one replay, load {share:g}", path)


def _finish(figure: Figure, axes: Axes, title: str, path: Path) -> None:
    for each in figure.axes:
        each.set_ylim(0, each.get_ylim()[1] or 1)
    handles, labels = axes.get_legend_handles_labels()
    figure.suptitle(title, y=0.995)
    figure.legend(handles, labels, loc="upper center", bbox_to_anchor=(0.5, 0.975), ncols=5)
    figure.tight_layout(rect=(0, 0, 1, 0.955))
    figure.savefig(path, format="svg", metadata={"Date": None})
