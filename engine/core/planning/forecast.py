"""What the scheduler's state will be when the step under way has ended, as far as that is certain.

Every sequence that draws in the step has one more known token, whose value is not known yet. A
sequence that ends by its length has left, and its blocks are available. One that a drawn token ends
is taken to go on, so the forecast never has more seats or blocks than there will be.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np

from engine.core.blocks.block_pool import BlockPool
from engine.core.planner_contract import SequenceView
from engine.core.policies.growth import GrowthColumns, Lacking
from engine.core.sequences.running import Running
from engine.core.sequences.seats import Seats
from engine.core.sequences.sequence import Sequence
from engine.core.sequences.status import SequenceStatus
from engine.core.step.step_in_flight import PlannedStep


class SequenceForecast:
    """A running sequence as it will be (`planner_contract.SequenceView`). It drafts nothing."""

    __slots__ = ("_now", "num_computed", "num_known", "sequence_id", "status")

    draft_token_ids: Items[int] = ()

    def __init__(
        self, now: Sequence, num_known: int, num_computed: int, status: SequenceStatus
    ) -> None:
        self._now = now
        self.sequence_id = now.sequence_id
        self.num_known = num_known
        self.num_computed = num_computed
        self.status = status

    @property
    def arrival(self) -> int:
        return self._now.arrival

    @property
    def priority(self) -> int:
        return self._now.priority

    @property
    def has_remote_kv(self) -> bool:
        return False

    @property
    def num_prompt(self) -> int:
        return self._now.num_prompt

    @property
    def num_output(self) -> int:
        return self.num_known - self._now.num_prompt

    @property
    def max_new_tokens(self) -> int:
        return self._now.max_new_tokens

    @property
    def num_held_blocks(self) -> int:
        return self._now.num_held_blocks

    @property
    def block_table(self) -> list[int]:
        return self._now.block_table

    @property
    def num_swapped(self) -> int:
        return 0

    @property
    def num_bypassed(self) -> int:
        return 0

    @property
    def num_output_since_resume(self) -> int | None:
        before = self._now.num_output_at_preemption
        return None if before is None else self.num_output - before


class PoolForecast:
    """The pool as it will be (`planner_contract.PoolView`): `freed` blocks are available too."""

    def __init__(self, pool: BlockPool, freed: frozenset[int]) -> None:
        self._pool = pool
        self._freed = freed

    @property
    def num_available(self) -> int:
        return self._pool.num_available + len(self._freed)

    def is_evictable(self, block_id: int) -> bool:
        return block_id in self._freed or self._pool.is_evictable(block_id)

    def is_unshared(self, block_id: int) -> bool:
        return self._pool.is_unshared(block_id)


class Forecast:
    """The running sequences, the seats and the pool after `step`, in which nothing is drafted."""

    def __init__(
        self,
        step: PlannedStep,
        running: Running,
        seats: Seats,
        pool: BlockPool,
        block_size: int,
    ) -> None:
        self.running: list[SequenceView] = []
        self._seats, self._block_size = seats, block_size
        self._rows: list[int] = []
        """The seats of `running`."""
        self._drawing: list[int] = []
        self._leaving: list[int] = []
        entries = {s.sequence_id: entry for entry, s in enumerate(step.sequences)}
        num_tokens, is_sampled = step.batch.num_tokens.tolist(), step.batch.is_sampled.tolist()
        counts = seats.num_known[running.rows].tolist(), seats.num_computed[running.rows].tolist()
        freed: list[int] = []
        decode = SequenceStatus.RUNNING_DECODE
        for sequence, num_known, num_computed in zip(running, *counts, strict=True):
            entry = entries.get(sequence.sequence_id)
            if entry is None or not is_sampled[entry]:
                num_computed += 0 if entry is None else num_tokens[entry]
                status = sequence.status
                self.running.append(SequenceForecast(sequence, num_known, num_computed, status))
                self._rows.append(sequence.seat)
            elif sequence.is_exported:
                self._leaving.append(sequence.seat)
            elif num_known + 1 >= sequence.num_prompt + sequence.max_new_tokens:
                self._leaving.append(sequence.seat)
                freed += filter(pool.is_unshared, sequence.block_table)
            else:
                self._drawing.append(sequence.seat)
                self.running.append(SequenceForecast(sequence, num_known + 1, num_known, decode))
                self._rows.append(sequence.seat)
        self.pool = PoolForecast(pool, frozenset(freed)) if freed else pool

    def lacking(self) -> list[Lacking]:
        """Return which of `running` will need blocks for their last known token, by their index."""
        num_known = np.array([sequence.num_known for sequence in self.running], np.int64)
        return self._seats.lacking(np.array(self._rows, np.int64), num_known, self._block_size)

    def growth(self) -> GrowthColumns:
        """Return what a reservation will read of every seat."""
        columns = self._seats.growth()
        drawing, leaving = np.array(self._drawing, np.int64), np.array(self._leaving, np.int64)
        columns.num_known[drawing] += 1
        columns.num_output[drawing] += 1
        for column in (
            columns.num_known,
            columns.num_output,
            columns.max_new_tokens,
            columns.num_held_blocks,
        ):
            column[leaving] = 0
        return columns
