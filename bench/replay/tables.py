"""Figures as Markdown tables, aligned so that they also read well in a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from bench.replay.comparison import RANKED_BY, Comparison, TraceLoad
from bench.replay.figures import Figures

Column = tuple[str, str, str]
"""Heading, figure and format."""

COLUMNS: tuple[Column, ...] = (
    ("goodput", "goodput", "{:.3f}"),
    ("E2E mean", "mean_e2e_s", "{:.2f}"),
    ("preempted", "preemptions", "{:.0f}"),
    ("recomputed", "recomputed_tokens", "{:.0f}"),
    ("pool mean", "mean_pool_use", "{:.0%}"),
    ("peak", "peak_pool_use", "{:.0%}"),
    ("batch", "mean_batch", "{:.1f}"),
    ("done s", "completion_s", "{:.0f}"),
    ("TTFT p50", "ttft_s_p50", "{:.2f}"),
    ("p90", "ttft_s_p90", "{:.2f}"),
    ("p99", "ttft_s_p99", "{:.2f}"),
    ("TPOT p50", "tpot_s_p50", "{:.3f}"),
    ("p90", "tpot_s_p90", "{:.3f}"),
    ("p99", "tpot_s_p99", "{:.3f}"),
    ("gap p99", "gap_s_p99", "{:.2f}"),
    (">10 s", "waited_10s", "{:.0f}"),
    ("overruns", "overruns", "{:.0f}"),
)
RANKING_COLUMNS: tuple[Column, ...] = (
    ("E2E mean", RANKED_BY, "{:.3f}"),
    ("its worst", "worst", "{:.3f}"),
    ("goodput", "goodput", "{:.3f}"),
    ("TTFT p90", "ttft_s_p90", "{:.3f}"),
    ("TPOT p99", "tpot_s_p99", "{:.3f}"),
    ("gap p99", "gap_s_p99", "{:.3f}"),
    ("done", "completion_s", "{:.3f}"),
    ("preempted", "preemptions", "{:.0f}"),
    ("recomputed", "recomputed_tokens", "{:.0f}"),
    (">10 s", "waited_10s", "{:.0f}"),
)


def table_of(rows: Sequence[tuple[str, Figures]], corner: str, columns: Sequence[Column]) -> str:
    """Return a table with one line per row; `corner` heads the first column."""
    lines = [[corner, *(heading for heading, _, _ in columns)]]
    for name, figures in rows:
        lines.append([name, *(form.format(figures[key]) for _, key, form in columns)])
    widths = [max(len(line[place]) for line in lines) for place in range(len(lines[0]))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    out = []
    for line in [lines[0], rule, *lines[1:]]:
        cells = [cell.rjust(width) for cell, width in zip(line, widths, strict=True)]
        cells[0] = line[0].ljust(widths[0])
        out.append("| " + " | ".join(cells) + " |")
    return "\n".join(out)


def tables_of(comparison: Comparison, load: TraceLoad) -> str:
    """Return a heading and a table per pool and load for one trace."""
    parts = [f"### {load.name}: {len(load.requests)} requests"]
    for num_blocks in load.pools:
        for share, speed_up in load.speed_ups.items():
            rows = list(comparison.rows(load.name, num_blocks, share).items())
            corner = f"{num_blocks} blocks, load {share:g} ({speed_up:g} times as fast)"
            parts.append(table_of(rows, corner, COLUMNS))
    return "\n\n".join(parts)
