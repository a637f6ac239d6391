"""From what requests saw to figures, ranking and tables; literal numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.replay.comparison import Cell, TraceLoad, compare, ranking
from bench.replay.figures import Figures, figures_of
from bench.replay.replay import ReplayResult, ReplaySetup, Served
from bench.replay.rows import ROWS
from bench.replay.tables import table_of
from common.settings.config import SchedulingConfig
from simulator.clients import ClientRequest
from simulator.step_cost import StepCost
from simulator.trace_file import TraceRequest, read_trace

EXCERPTS = Path(__file__).parents[4] / "bench" / "traces"


def served(
    arrived_at_s: float, began_at_s: float, first_at_s: float, last_at_s: float, num_tokens: int
) -> Served:
    client = ClientRequest(TraceRequest(arrived_at_s, 1, num_tokens), 0, num_tokens, 0)
    return Served(
        client,
        arrived_at_s,
        first_at_s,
        last_at_s,
        num_tokens,
        0.5,
        began_at_s=began_at_s,
        num_ends=1,
    )


def test_figures_of_three_requests() -> None:
    starved = served(0.0, 50.0, 51.0, 51.0, 1)
    starved.num_ends = 0
    result = ReplayResult(
        [
            served(0.0, 10.0, 11.0, 16.0, 6),  # waits exactly 10 s: not over
            served(1.0, 11.5, 14.0, 14.0, 1),  # a single token has no TPOT and no gap
            starved,
        ],
        num_refused=4,
        num_starved=1,
        num_steps=8,
        completion_s=16.0,
        busy_s=10.0,
        pool_use_s=7.5,
        peak_pool_use=0.9,
        sequence_steps=20,
    )
    figures = figures_of(result)
    assert (figures["answered"], figures["refused"], figures["starved"]) == (2, 4, 1)
    assert (figures["mean_pool_use"], figures["peak_pool_use"]) == (0.75, 0.9)
    assert (figures["mean_batch"], figures["completion_s"]) == (2.5, 16.0)
    assert (figures["ttft_s_p50"], figures["ttft_s_p99"]) == (12.0, 12.98)
    assert (figures["tpot_s_p50"], figures["tpot_s_p99"]) == (1.0, 1.0)
    assert figures["gap_s_p99"] == 0.5
    assert figures["mean_e2e_s"] == 14.5
    assert figures["waited_10s"] == 1
    # Neither begins within 10 s.
    assert figures["goodput"] == 0.0


def test_goodput_counts_what_begins_early_and_goes_on_fast() -> None:
    result = ReplayResult(
        [
            served(0.0, 1.0, 10.0, 10.5, 6),  # exactly 10 s, and 0.1 s for each token
            served(0.0, 1.0, 10.1, 10.1, 2),
            served(0.0, 1.0, 2.0, 2.6, 6),
            served(0.0, 1.0, 2.0, 2.0, 1),
        ],
        num_refused=0,
        completion_s=4.0,
    )
    assert figures_of(result)["goodput"] == 0.5


def test_nobody_answered_is_no_error() -> None:
    assert figures_of(ReplayResult([], num_refused=1))["mean_e2e_s"] == 0.0


def cell_figures(e2e_s: float, gap_s: float = 1.0, preemptions: int = 0) -> Figures:
    return {
        "mean_e2e_s": e2e_s,
        "ttft_s_p90": 1.0,
        "tpot_s_p99": 1.0,
        "gap_s_p99": gap_s,
        "completion_s": 1.0,
        "goodput": 1 / e2e_s if e2e_s else 0.0,
        "preemptions": preemptions,
        "recomputed_tokens": 0,
        "waited_10s": 0,
    }


def test_the_ranking_compares_within_a_trace_a_pool_and_a_load() -> None:
    steady, bold = "token_ratio", "none"
    ranked = ranking(
        {
            Cell("a", 10, 1.0, steady): cell_figures(2.0),
            Cell("a", 10, 1.0, bold): cell_figures(1.0, gap_s=4.0, preemptions=3),
            Cell("a", 90, 1.0, steady): cell_figures(10.0),
            Cell("a", 90, 1.0, bold): cell_figures(90.0, preemptions=2),
        }
    )
    assert [row for row, _ in ranked] == [steady, bold]
    first, second = (summary for _, summary in ranked)
    assert first["mean_e2e_s"] == pytest.approx(2**0.5, abs=1e-4)
    assert second["mean_e2e_s"] == pytest.approx(3.0)
    assert (first["worst"], second["worst"]) == (2.0, 9.0)
    assert (second["gap_s_p99"], second["preemptions"]) == (2.0, 5)


def test_each_load_is_compared_alone_and_the_oracle_with_nobody() -> None:
    ranked = dict(
        ranking(
            {
                Cell("a", 10, 0.5, "none"): cell_figures(2.0),
                Cell("a", 10, 0.5, "oracle"): cell_figures(1.0),
                Cell("a", 10, 2.0, "none"): cell_figures(4.0),
                Cell("a", 10, 2.0, "oracle"): cell_figures(2.0),
            }
        )
    )
    assert (ranked["none"]["mean_e2e_s"], ranked["oracle"]["mean_e2e_s"]) == (1.0, 0.5)
    assert ranked["none"]["goodput"] == pytest.approx((0.5 + 0.25) / 2)


def test_every_row_is_replayed_on_every_pool_at_every_load() -> None:
    requests = read_trace(EXCERPTS / "azure_conv.csv", 16)
    load = TraceLoad("t", requests, (40, 2000), {0.5: 2.0, 3.0: 12.0})
    setup = ReplaySetup(num_blocks=40, max_num_seqs=32, max_num_batched_tokens=1024)
    cells: list[Cell] = []
    comparison = compare(
        [load],
        setup,
        StepCost(),
        SchedulingConfig(),
        lambda cell, number, total: cells.append(cell),
    )
    names = [row.name for row in ROWS]
    assert cells == [
        Cell("t", blocks, share, name)
        for blocks in (40, 2000)
        for share in (0.5, 3.0)
        for name in names
    ]
    pressed, calm = comparison.rows("t", 40, 3.0), comparison.rows("t", 2000, 0.5)
    assert pressed["vLLM-like"]["preemptions"] > pressed["oracle"]["preemptions"] == 0
    assert pressed["learned"] != pressed["vLLM-like"]
    assert all(figures["preemptions"] == 0 for figures in calm.values())
    assert calm["oracle"]["mean_e2e_s"] < pressed["oracle"]["mean_e2e_s"]


def test_a_tie_is_broken_by_name_and_no_time_is_no_ratio() -> None:
    a, b = "global_ratio", "none"
    ranked = ranking(
        {Cell("t", 1, 1.0, b): cell_figures(0.0), Cell("t", 1, 1.0, a): cell_figures(0.0)}
    )
    assert [(row, summary["mean_e2e_s"]) for row, summary in ranked] == [(a, 1.0), (b, 1.0)]


def test_tables_are_markdown_with_aligned_columns() -> None:
    rows = [("none, priority", {"x": 0.5, "y": 1234.0}), ("b, c", {"x": 1.0, "y": 2.0})]
    text = table_of(rows, "corner", (("share", "x", "{:.0%}"), ("count", "y", "{:.0f}")))
    assert text.splitlines() == [
        "| corner         | share | count |",
        "| -------------- | ----: | ----: |",
        "| none, priority |   50% |  1234 |",
        "| b, c           |  100% |     2 |",
    ]
