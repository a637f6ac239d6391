"""Measure what steps cost on this machine, so that drafts are only made where they pay."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from common.blocks import blocks_for
from common.request import SamplingParams
from engine.core.plan import SampleInput, ScheduledSequence, StepCosts
from engine.runner.flat_batch import BatchLimits

_NARROW = (1, 2, 3, 4, 6, 8)
"""Numbers of rows that are measured at least once, however slow they are."""
_BEHIND_TILES = (7, 10, 11, 12)
"""Rows around the ends of the CPU kernels' tiles, where one more row costs more than usual."""
_WIDE = (16, 32, 64)
"""Numbers of rows that are measured last and less often: they are slow, and noise matters less."""
_REPEATS = 6
_WIDE_REPEATS = 2
_NARROW_BUDGET_S = 1.2
_BUDGET_S = 1.8
_DRAFTS = 3
_GREEDY = SampleInput(SamplingParams(max_tokens=1, temperature=0.0), 0, [0], [])

Execute = Callable[[Sequence[ScheduledSequence]], object]


def measure_step_costs(
    execute: Execute,
    limits: BatchLimits,
    *,
    has_proposals: bool,
    clock: Callable[[], float] = time.perf_counter,
) -> StepCosts:
    """Return the least of a few measurements each, made to rise with the number of rows.

    Every row is a sequence of one token; all write the same KV to the first slot, so the first
    blocks must not hold cached KV. `has_proposals`: also measure the cost of a proposed draft. Slow
    models are measured less often: beyond two seconds only what is necessary.
    """
    blocks = range(min(blocks_for(_DRAFTS, limits.block_size), limits.num_blocks))
    num_drafts = min(_DRAFTS, len(blocks) * limits.block_size, limits.max_len)
    best: dict[int, float] = {}
    best_drafting_s = float("inf")
    started_s = clock()

    def measure(num_rows: int, num_proposals: int) -> float:
        before_s = clock()
        one = ScheduledSequence(0, [0], 0, blocks, _GREEDY, num_proposals=num_proposals)
        execute([one] * num_rows)
        return clock() - before_s

    def measure_all(sizes: Sequence[int], ends_s: float) -> None:
        for num_rows in sizes:
            if num_rows <= limits.max_tokens and clock() < ends_s:
                best[num_rows] = min(measure(num_rows, 0), best.get(num_rows, float("inf")))

    for repeat in range(_REPEATS):
        ends_s = started_s + _NARROW_BUDGET_S if repeat else float("inf")
        # Measured next to the single row that it is compared with, so that a busy moment affects
        # both.
        if has_proposals and clock() < ends_s:
            best_drafting_s = min(best_drafting_s, measure(1, num_drafts))
        measure_all(_NARROW, ends_s)
        if repeat % 2 == 0:
            measure_all(_BEHIND_TILES, started_s + _NARROW_BUDGET_S)
    for _ in range(_WIDE_REPEATS):
        measure_all(_WIDE, started_s + _BUDGET_S)
    rows = tuple(sorted(best))
    step_s, highest_s = [], 0.0
    for num_rows in rows:
        highest_s = max(highest_s, best[num_rows])
        step_s.append(highest_s)
    draft_s = max(0.0, best_drafting_s - best[1]) / num_drafts if has_proposals else 0.0
    return StepCosts(rows, tuple(step_s), draft_s)
