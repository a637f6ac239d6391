"""Steps that take time, write KV layer by layer, and draw tokens from the slots that they read.

Where the next step is offered, it has begun when a step ends: it writes even for sequences that
have ended, and is checked when it is taken. The host draws one token of eight, and those under a
grammar; a step that has begun before them cannot have computed them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import count
from typing import NamedTuple

from common.errors import InternalError
from common.prompt_logprobs import PromptLogprobs
from common.request import TokenLogprobs
from engine.core.runner_contract import (
    DeviceLost,
    DrawnTokens,
    OnLayer,
    RunnerResult,
    SequencesFailed,
)
from engine.core.sequences.seats import NOT_ASKED, Seats
from engine.core.step.prompt_rows import prompt_rows
from engine.core.step.step_batch import StepBatch
from simulator.faults.contents import (
    NUM_LAYERS,
    KVMemory,
    drawn_token,
    forced_after,
    logprob_of,
    next_state,
    total_of,
)
from simulator.faults.hosts import ProcessClock

TOKEN_S = 50e-6
DRAWN_BY_HOST = 8
"""The host draws one of this many tokens."""
_MASK = (1 << 64) - 1


class WrongStep(DeviceLost):
    """A violation in a step. The step loop takes every other error for a failed step."""


class _Entry(NamedTuple):
    """One entry of a step: single values are slow to read out of arrays."""

    row: int
    start: int
    num_tokens: int
    num_drafts: int
    is_sampled: bool

    @property
    def end(self) -> int:
        """The position after its last token."""
        return self.start + self.num_tokens


class _Begun(NamedTuple):
    """One entry of a step that has begun."""

    row: int
    start: int
    block: int


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
        self._entries: list[_Entry] = []
        self._states: list[list[int]] = []
        """The states of each entry's tokens, from the first layer's write on."""
        self._after: list[_Begun | None] = []
        """The entries of the step that has begun after this one; None: left out of it."""
        self.began_s = 0.0
        self.ends_at_s = self.hangs_until_s = 0.0
        self.failing = ""
        """The sequences, `all` or `some`, for which steps that begin now fail; empty: none."""
        self._failed: set[int] = set()
        """The entries of the step that have no result."""
        self._fails_whole = False
        self.ended_s: list[float] = []
        self.num_runs = 0

    @property
    def is_running(self) -> bool:
        """Whether a step is under way."""
        return self._batch is not None

    def begin(self, batch: StepBatch, on_layer: OnLayer | None) -> None:
        """Begin a step. With `on_layer` its layers are written one after the other.

        Raises `WrongStep` for a step of more tokens than the budget, and for one that differs from
        the step that has begun.
        """
        columns = batch.rows, batch.starts, batch.num_tokens, batch.num_drafts, batch.is_sampled
        self._entries = list(map(_Entry, *[one.tolist() for one in columns]))
        num_tokens = sum(batch.num_tokens.tolist())
        if num_tokens > self._most_tokens:
            raise WrongStep("a step of more tokens than its budget has")
        self._take_begun(batch)
        batch.has_gone_on = batch.going_on is not None
        self._fails_whole = self.failing == "all"
        self._failed = set(range(len(batch))) if self.failing else set()
        if self.failing == "some":
            self._failed = {one for one in self._failed if (one + self.num_runs) % 2}
        self._batch, self.began_s = batch, self._clock.now_s()
        self._states = []
        self.num_runs += 1
        took_s = self._step_s + TOKEN_S * num_tokens
        self.ends_at_s = max(self.began_s + took_s, self.hangs_until_s)
        if on_layer is not None:
            for layer in range(NUM_LAYERS):
                at_s = self.began_s + took_s * (layer + 1) / NUM_LAYERS
                self._clock.at(min(at_s, self.ends_at_s), partial(self._layer, layer, on_layer))

    def hang(self, until_s: float) -> None:
        """Delay the end of the step that runs, or of the next one, to `until_s`."""
        self.hangs_until_s = until_s
        if self.is_running:
            self.ends_at_s = max(self.ends_at_s, until_s)

    def interrupt(self) -> bool:
        """Return False: a step cannot be interrupted."""
        return False

    def go_on(self) -> bool:
        """Return False: every step is planned."""
        return False

    def wait_until_queued(self) -> None:
        """Return at once: there is no interpreter to share."""

    def wait(self) -> tuple[RunnerResult, float]:
        """Return the results. Raises `SequencesFailed` or `RuntimeError` for a step that fails."""
        batch = self._batch
        assert batch is not None, "a step is under way"
        if not self._states:
            for layer in range(NUM_LAYERS):
                self._write(layer)
        drawn = [
            None if index in self._failed else self._draw(batch.seats, entry, self._states[index])
            for index, entry in enumerate(self._entries)
        ]
        self._batch = None
        self.ended_s = [self._clock.now_s()]
        if self._fails_whole:
            raise RuntimeError("the step has failed")
        left_behind = self._go_behind(batch, drawn) if batch.going_on is not None else ()
        scores = self._scores(batch)
        results = RunnerResult(drawn, scores, left_behind=left_behind)
        if self._failed:
            error = InternalError("its logits are not finite")
            raise SequencesFailed(dict.fromkeys(sorted(self._failed), error), results)
        return results, self.ended_s[0] - self.began_s

    def close(self) -> None:
        """Do nothing: there is no thread to end."""

    def _take_begun(self, batch: StepBatch) -> None:
        """Check that a step which has begun computes what its batch says."""
        begun, self._after = self._after, []
        if batch.continues is None:
            return
        taken = [begun[place] for place in batch.continues.tolist()]
        wanted = [self._begun(batch, one.row, one.start) for one in self._entries]
        if taken != wanted:
            raise WrongStep(f"the step that has begun computes {taken}: wanted {wanted}")

    def _go_behind(self, batch: StepBatch, drawn: Sequence[DrawnTokens | None]) -> list[int]:
        """Begin the next step; return the entries of this one that it leaves out."""
        assert batch.going_on is not None, "it is offered"
        left_behind = []
        for index in batch.going_on.tolist():
            entry, result = self._entries[index], drawn[index]
            if result is None:
                self._after.append(None)
                continue
            (token_id,) = result.token_ids
            begun: _Begun | None = self._begun(batch, entry.row, entry.end)
            if token_id % DRAWN_BY_HOST == 0 or batch.seats.has_grammar.item(entry.row):
                left_behind.append(index)
                begun, token_id = None, token_id + 1
            self._after.append(begun)
            state = next_state(self._states[index][-1], token_id)
            for layer in range(NUM_LAYERS):
                self._memory.write(layer, _table(batch.seats, entry.row), entry.end, [state])
        return left_behind

    def _begun(self, batch: StepBatch, row: int, start: int) -> _Begun:
        num_held = batch.seats.num_blocks.item(row) * self._memory.block_size
        if start >= num_held:
            raise WrongStep("a step was offered without a block for every entry")
        return _Begun(row, start, _table(batch.seats, row)[start // self._memory.block_size])

    def _layer(self, layer: int, on_layer: OnLayer) -> None:
        self._write(layer)
        if self._memory.is_staged:
            self._stage(layer)
        on_layer(layer)

    def _stage(self, layer: int) -> None:
        """Copy one layer of the blocks that the step has written to where transfers read them."""
        batch, size = self._batch, self._memory.block_size
        assert batch is not None, "a layer is written while its step runs"
        for entry in self._entries:
            table = _table(batch.seats, entry.row)
            self._memory.stage_out(table[entry.start // size : -(-entry.end // size)], layer)

    def _write(self, layer: int) -> None:
        batch = self._batch
        assert batch is not None, "a layer is written while its step runs"
        if not self._states:
            self._states = [self._compute(batch.seats, entry) for entry in self._entries]
            for index in self._failed:
                self._states[index] = [state ^ 1 for state in self._states[index]]
        for entry, states in zip(self._entries, self._states, strict=True):
            self._memory.write(layer, _table(batch.seats, entry.row), entry.start, states)

    def _compute(self, seats: Seats, entry: _Entry) -> list[int]:
        num_held = seats.num_blocks.item(entry.row) * self._memory.block_size
        if entry.end > num_held:
            raise WrongStep("tokens without a block")
        state = self._memory.state_before(_table(seats, entry.row), entry.start)
        states = []
        for token_id in seats.token_ids[entry.row, entry.start : entry.end].tolist():
            state = next_state(state, token_id)
            states.append(state)
        return states

    def _draw(self, seats: Seats, entry: _Entry, states: list[int]) -> DrawnTokens | None:
        if not entry.is_sampled:
            return None
        num_known = entry.end - entry.num_drafts
        seed: int = seats.sampling["seed"].item(entry.row)
        total = self._memory.total(_table(seats, entry.row), num_known)
        begins: int | None = None
        if seats.has_grammar.item(entry.row):
            begins = seats.num_prompt.item(entry.row)
        drawn = [drawn_token(total, seed, num_known, begins)]
        totals = [total]
        drafts: list[int] = seats.token_ids[entry.row, num_known : entry.end].tolist()
        for index, draft in enumerate(drafts):
            if drawn[-1] != draft:
                break
            total = (total + total_of((states[len(states) - entry.num_drafts + index],))) & _MASK
            drawn.append(drawn_token(total, seed, num_known + index + 1, begins))
            totals.append(total)
        forced = forced_after(num_known + len(drawn), begins)
        logprobs: tuple[TokenLogprobs, ...] = ()
        if seats.sampling["num_logprobs"].item(entry.row) != NOT_ASKED:
            found = map(logprob_of, totals, count(num_known))
            logprobs = tuple(map(TokenLogprobs, found))
        return DrawnTokens(tuple(drawn), logprobs, forced_token_ids=forced)

    def _scores(self, batch: StepBatch) -> dict[int, PromptLogprobs]:
        """Return the log probabilities of tokens of prompts that are asked for, by entry."""
        scores = {}
        for rows in prompt_rows(batch):
            entry, num_rows = self._entries[rows.entry], len(rows.following)
            table = _table(batch.seats, entry.row)
            ends = range(entry.start + 1, entry.start + 1 + num_rows)
            found = tuple(logprob_of(self._memory.total(table, end), end) for end in ends)
            if rows.entry not in self._failed:
                scores[rows.entry] = PromptLogprobs(0, found, (1,) * num_rows, (), ())
        return scores


def _table(seats: Seats, row: int) -> list[int]:
    table: list[int] = seats.block_tables[row].tolist()
    return table
