"""Measure what steps cost on this machine, so that drafts are only made where they pay."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from common.kv.blocks import blocks_for
from common.request import SamplingParams
from engine.core.runner_contract import SampleInput, ScheduledSequence, StepCosts
from engine.core.step.step_batch import StepBatch, batch_of
from engine.runner.flat_batch import BatchLimits

_NARROW = (1, 2, 3, 4, 6, 8)
"""Numbers of rows that are measured at least once, however slow they are."""
_BEHIND_TILES = (7, 10, 11, 12)
"""Rows around the ends of the CPU kernels' tiles, where one more row costs more than usual."""
_WIDE = (16, 32, 64)
"""Numbers of rows that are measured last and less often: they are slow, and noise matters less."""
_FIRST = 8
"""Rows of the step from which, where nothing is drafted, the cost of the widest is expected. It is
measured again at the end: what is pulled or read from disk is compared with steps of few rows."""
_REPEATS = 6
_WIDE_REPEATS = 2
_NARROW_BUDGET_S = 1.2
_WIDE_BUDGET_S = 1.8
_BUDGET_S = 3.0
"""Steps of verified drafts, up to the widest, are measured as long as they probably end by then."""
_POSITION = 31
"""Position from which measured sequences continue: at their beginning a step would be a prefill."""
_DRAFTS = 3
_TOKEN_STRIDE = 7919
"""A prime that divides no usual size of a vocabulary."""
_GREEDY = SampleInput(SamplingParams(max_tokens=1, temperature=0.0), 0, [0], [])

Execute = Callable[[StepBatch], object]


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """The widest decode: so many sequences of at most so many tokens, one and its drafts."""

    num_seqs: int = 1
    tokens_per_seq: int = 1


def measure_step_costs(
    execute: Execute,
    limits: BatchLimits,
    widest: DecodeShape,
    *,
    has_proposals: bool,
    clock: Callable[[], float] = time.perf_counter,
) -> StepCosts:
    """Return the least of a few measurements each, made to rise with the number of rows.

    Up to 64 rows are sequences of one token each, or of more where fewer sequences run at a time;
    more rows are sequences that verify drafts, up to the `widest` step. Each writes KV to blocks of
    its own, as far as there are so many: none may hold cached KV. `has_proposals`: also measure the
    cost of a proposed draft. It takes at most three seconds; slow models are measured less often,
    and then only what is necessary. Without drafts the widest step that the time allows is
    measured, twice if it can be, and one narrow step.
    """
    measuring = _Measuring(execute, limits, widest, has_proposals, clock)
    if not has_proposals and widest.tokens_per_seq == 1:
        measuring.widest_alone()
        return measuring.costs()
    measuring.narrow()
    for _ in range(_WIDE_REPEATS):
        measuring.rows(_WIDE, _WIDE_BUDGET_S)
    measuring.verified_drafts()
    return measuring.costs()


def unlike_tokens(first: int, count: int, vocab_size: int) -> list[int]:
    """Return the tokens of the rows from number `first` on, for a step that is measured.

    A mixture of experts sends unlike tokens to unlike experts, as it does with those of real
    requests. Equal ones would all go to the same few, and a wide step would seem to read no more
    weights than a narrow one.
    """
    return [row * _TOKEN_STRIDE % vocab_size for row in range(first, first + count)]


class _Measuring:
    def __init__(
        self,
        execute: Execute,
        limits: BatchLimits,
        widest: DecodeShape,
        has_proposals: bool,
        clock: Callable[[], float],
    ) -> None:
        self._execute, self._clock, self._limits = execute, clock, limits
        self._num_seqs, self._tokens_per_seq = widest.num_seqs, widest.tokens_per_seq
        self._most_rows = min(limits.max_tokens, widest.num_seqs * widest.tokens_per_seq)
        self._has_proposals = has_proposals
        longest = min(limits.max_len, limits.num_blocks * limits.block_size)
        most_tokens = max(widest.tokens_per_seq, _DRAFTS, min(self._tokens_of(_WIDE[-1]), longest))
        self._start = max(0, min(_POSITION, longest - most_tokens))
        self._most_single_rows = min(limits.max_tokens, longest * widest.num_seqs)
        self._num_proposals = min(_DRAFTS, longest)
        self._best: dict[int, float] = {}
        self._best_proposing_s = float("inf")
        self._started_s = clock()

    def widest_alone(self) -> None:
        """Measure the widest step that is expected to be affordable, and then a narrow one."""
        most = self._most_single_rows
        first = min(_FIRST, most)
        first_s = self._measure_rows(first)
        left_s = _BUDGET_S - self._spent_s()
        # In proportion to the rows: one of a wide step costs no more than one of a narrow step.
        fit = [rows for rows in _WIDE if rows <= most and first_s * rows / first <= left_s]
        if not fit:
            self._keep(first, first_s)
            return
        self._keep(fit[-1], self._measure_rows(fit[-1]))
        if self._spent_s() + self._best[fit[-1]] <= _BUDGET_S:
            self._keep(fit[-1], self._measure_rows(fit[-1]))
        if self._spent_s() + first_s <= _BUDGET_S:
            self._keep(first, self._measure_rows(first))

    def narrow(self) -> None:
        """Measure few rows several times, and a drafting step beside them."""
        for repeat in range(_REPEATS):
            budget_s = _NARROW_BUDGET_S if repeat else float("inf")
            # Measured next to the single row that it is compared with, so that a busy moment
            # affects both.
            if self._has_proposals and self._spent_s() < budget_s:
                spent_s = self._measure([1], self._num_proposals)
                self._best_proposing_s = min(self._best_proposing_s, spent_s)
            self.rows(_NARROW, budget_s)
            if repeat % 2 == 0:
                self.rows(_BEHIND_TILES, _NARROW_BUDGET_S)

    def rows(self, sizes: Sequence[int], budget_s: float) -> None:
        """Measure these numbers of rows, as long as the budget lasts."""
        for num_rows in sizes:
            if num_rows <= self._most_single_rows and self._spent_s() < budget_s:
                self._keep(num_rows, self._measure_rows(num_rows))

    def verified_drafts(self) -> None:
        """Measure wider and wider steps, each as long as twice the one before fits the budget."""
        size = self._tokens_per_seq
        num_rows = 2 * max(self._best)
        while num_rows // 2 < self._most_rows:
            num_seqs = max(1, min(num_rows, self._most_rows) // size)
            widest = max(self._best)
            expected_s = self._best[widest] * num_seqs * size / widest
            if num_seqs * size <= widest or self._spent_s() + expected_s > _BUDGET_S:
                return
            self._keep(num_seqs * size, self._measure([size] * num_seqs))
            num_rows *= 2

    def costs(self) -> StepCosts:
        """Return what was measured."""
        rows = tuple(sorted(self._best))
        step_s = tuple(accumulate((self._best[num_rows] for num_rows in rows), max))
        draft_s = 0.0
        if self._has_proposals:
            draft_s = max(0.0, self._best_proposing_s - self._best[1]) / self._num_proposals
        return StepCosts(rows, step_s, draft_s)

    def _spent_s(self) -> float:
        return self._clock() - self._started_s

    def _keep(self, num_rows: int, spent_s: float) -> None:
        self._best[num_rows] = min(spent_s, self._best.get(num_rows, float("inf")))

    def _tokens_of(self, num_rows: int) -> int:
        """Return the tokens of each sequence of a step of so many rows; the last may have fewer."""
        return -(-num_rows // self._num_seqs)

    def _measure_rows(self, num_rows: int) -> float:
        """Measure a step of so many rows: no runner has room for more sequences than may run."""
        each = self._tokens_of(num_rows)
        rest = num_rows % each
        return self._measure([each] * (num_rows // each) + [rest] * (rest > 0))

    def _measure(self, sizes: Sequence[int], num_proposals: int = 0) -> float:
        """Measure a step of sequences of so many tokens, of which drafts are as many as may be."""
        tables = self._block_tables(sizes, num_proposals)
        sequences = [
            ScheduledSequence(
                0, unlike_tokens(first, size, self._limits.vocab_size),
                self._start, blocks, _GREEDY,
                num_drafts=size - 1 if size <= self._tokens_per_seq else 0,
                num_proposals=num_proposals,
            )
            for first, size, blocks in zip(
                accumulate(sizes, initial=0), sizes, tables, strict=False
            )
        ]  # fmt: skip
        before_s = self._clock()
        self._execute(batch_of(sequences))
        return self._clock() - before_s

    def _block_tables(self, sizes: Sequence[int], num_proposals: int) -> list[list[int]]:
        """Return the blocks of sequences of so many tokens, and of the drafts behind them.

        They share those before the first position that is written. Their tokens differ, and so does
        the KV that they write.
        """
        block_size = self._limits.block_size
        shared = self._start // block_size
        most_own, used = self._limits.num_blocks - shared, 0
        tables = []
        for size in sizes:
            end = self._start + size + num_proposals
            count = min(blocks_for(end, block_size) - shared, most_own)
            own = (shared + (used + number) % most_own for number in range(count))
            tables.append([*range(shared), *own])
            used += count
        return tables
