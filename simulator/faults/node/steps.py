"""Steps that take their time, write KV layer by layer, and draw from what they read."""

from __future__ import annotations

from functools import partial

import numpy as np
import numpy.typing as npt

from common.errors import InternalError
from engine.core.runner_contract import DrawnTokens, OnLayer, RunnerResult
from engine.core.step.step_batch import StepBatch
from simulator.faults.contents import (
    NUM_LAYERS,
    KVMemory,
    next_state,
    token_of,
    total_of,
)
from simulator.faults.hosts import ProcessClock

TOKEN_S = 50e-6
_States = list[list[int]]
_MASK = (1 << 64) - 1


class ComputedExecution:
    """The `Execution` of a node's step loop. The loop's turn at `ends_at_s` takes the results."""

    is_beside = True

    def __init__(
        self,
        clock: ProcessClock,
        memory: KVMemory,
        step_s: float,
        most_tokens: int,
        *,
        plans_ahead: bool,
    ) -> None:
        self.plans_ahead = plans_ahead
        self._clock = clock
        self._memory = memory
        self._step_s = step_s
        self._most_tokens = most_tokens
        self._batch: StepBatch | None = None
        self._states: _States = []
        self._began_s = 0.0
        self.ends_at_s = 0.0
        self.ended_s: list[float] = []
        self.num_runs = 0

    @property
    def is_running(self) -> bool:
        """Whether a step is under way."""
        return self._batch is not None

    def begin(self, batch: StepBatch, on_layer: OnLayer | None) -> None:
        """Begin a step. Its layers are written one after the other where somebody is told.

        Raises `InternalError` for a step of more tokens than the budget.
        """
        if int(batch.num_tokens.sum()) > self._most_tokens:
            raise InternalError("a step of more tokens than its budget has")
        self._batch, self._began_s = batch, self._clock.now_s()
        self._states = []
        self.num_runs += 1
        took_s = self._step_s + TOKEN_S * int(batch.num_tokens.sum())
        self.ends_at_s = self._began_s + took_s
        if on_layer is not None:
            for layer in range(NUM_LAYERS):
                at_s = self._began_s + took_s * (layer + 1) / NUM_LAYERS
                self._clock.at(min(at_s, self.ends_at_s), partial(self._layer, layer, on_layer))

    def interrupt(self) -> bool:
        """Return that nothing changes: a step ends when it ends."""
        return False

    def go_on(self) -> bool:
        """Return False: every step is planned."""
        return False

    def wait_until_queued(self) -> None:
        """Return at once: there is no interpreter to share."""

    def wait(self) -> tuple[RunnerResult, float]:
        """Return the results."""
        batch = self._batch
        assert batch is not None, "a step is under way"
        if not self._states:
            for layer in range(NUM_LAYERS):
                self._write(layer)
        drawn = [self._draw(batch, entry) for entry in range(len(batch))]
        self._batch = None
        self.ended_s = [self._clock.now_s()]
        return RunnerResult(drawn), self.ended_s[0] - self._began_s

    def close(self) -> None:
        """Have nothing to close."""

    def _layer(self, layer: int, on_layer: OnLayer) -> None:
        self._write(layer)
        if self._memory.is_staged:
            self._stage(layer)
        on_layer(layer)

    def _stage(self, layer: int) -> None:
        """Copy one layer of the blocks that the step has written to where transfers read them."""
        batch, size = self._batch, self._memory.block_size
        assert batch is not None, "a layer is written while its step runs"
        for entry, states in enumerate(self._states):
            table, start = batch.seats.block_tables[batch.rows[entry]], int(batch.starts[entry])
            end = start + len(states)
            self._memory.stage_out(table[start // size : -(-end // size)].tolist(), layer)

    def _write(self, layer: int) -> None:
        batch = self._batch
        assert batch is not None, "a layer is written while its step runs"
        if not self._states:
            self._states = [self._compute(batch, entry) for entry in range(len(batch))]
        for entry, states in enumerate(self._states):
            table = batch.seats.block_tables[batch.rows[entry]]
            self._memory.write(layer, table, int(batch.starts[entry]), states)

    def _compute(self, batch: StepBatch, entry: int) -> list[int]:
        row, start = batch.rows[entry], int(batch.starts[entry])
        table = batch.seats.block_tables[row]
        num_held = int(batch.seats.num_blocks[row]) * self._memory.block_size
        assert start + int(batch.num_tokens[entry]) <= num_held, "tokens without a block"
        state = self._memory.state_before(table, start)
        states = []
        for token_id in _tokens(batch, entry):
            state = next_state(state, token_id)
            states.append(state)
        return states

    def _draw(self, batch: StepBatch, entry: int) -> DrawnTokens | None:
        if not batch.is_sampled[entry]:
            return None
        seats, row = batch.seats, batch.rows[entry]
        num_drafts = int(batch.num_drafts[entry])
        num_known = int(batch.starts[entry]) + int(batch.num_tokens[entry]) - num_drafts
        seed = int(seats.sampling["seed"][row])
        total = self._memory.total(seats.block_tables[row], num_known)
        drawn = [token_of(total, seed, num_known)]
        states = self._states[entry]
        for index, draft in enumerate(batch.drafts(entry)):
            if drawn[-1] != draft:
                break
            total = (total + total_of((states[len(states) - num_drafts + index],))) & _MASK
            drawn.append(token_of(total, seed, num_known + index + 1))
        return DrawnTokens(tuple(drawn))


def _tokens(batch: StepBatch, entry: int) -> list[int]:
    row, start = batch.rows[entry], int(batch.starts[entry])
    of_row: npt.NDArray[np.int32] = batch.seats.token_ids[row]
    found: list[int] = of_row[start : start + int(batch.num_tokens[entry])].tolist()
    return found
