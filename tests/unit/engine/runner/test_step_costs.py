"""Measured costs rise with the rows, and measuring ends in time."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from engine.core.runner_contract import ScheduledSequence, StepCosts
from engine.runner.flat_batch import BatchLimits
from engine.runner.step_costs import DecodeShape, measure_step_costs

LIMITS = BatchLimits(max_tokens=512, max_len=512, num_blocks=20, block_size=16, vocab_size=97)
ALONE = DecodeShape(64)


class Machine:
    """A clock, and steps that take as long as they should; every fourth one twice as long."""

    def __init__(self, row_s: float, step_s: float, draft_s: float = 0.0) -> None:
        self.now_s = 0.0
        self.batches: list[list[ScheduledSequence]] = []
        self._row_s, self._step_s, self._draft_s = row_s, step_s, draft_s

    def execute(self, batch: Sequence[ScheduledSequence]) -> None:
        drafts = sum(one.num_proposals for one in batch)
        rows = sum(len(one.token_ids) for one in batch)
        spent_s = self._step_s + self._row_s * rows + self._draft_s * drafts
        self.now_s += spent_s * (2 if len(self.batches) % 4 == 0 else 1)
        self.batches.append(list(batch))

    def measure(
        self,
        limits: BatchLimits = LIMITS,
        widest: DecodeShape = ALONE,
        *,
        has_proposals: bool = False,
    ) -> StepCosts:
        return measure_step_costs(
            self.execute, limits, widest, has_proposals=has_proposals, clock=lambda: self.now_s
        )


class MixtureMachine(Machine):
    """Steps that take as long as reading the experts to which their tokens are sent: 8 of 128."""

    def __init__(self) -> None:
        super().__init__(0.0, 0.0)

    def execute(self, batch: Sequence[ScheduledSequence]) -> None:
        tokens = {token for one in batch for token in one.token_ids}
        chosen = {expert for token in tokens for expert in experts_of(token)}
        self.now_s += 0.001 * len(chosen)
        self.batches.append(list(batch))


def experts_of(token: int) -> list[int]:
    """The experts of a token, the same for equal ones."""
    return random.Random(token).sample(range(128), 8)


def test_rows_of_a_mixture_are_sent_to_experts_of_their_own() -> None:
    """With equal tokens a step of 64 rows would seem to read no more experts than one of a row."""
    limits = replace(LIMITS, vocab_size=32_000)
    costs = MixtureMachine().measure(limits, DecodeShape(64, 4), has_proposals=True)
    for rows, step_s in zip(costs.rows, costs.step_s, strict=True):
        expected = 128 * (1 - (1 - 8 / 128) ** rows)
        assert step_s == pytest.approx(0.001 * expected, rel=0.15)
    [alone, wide] = MixtureMachine().measure(limits).step_s
    assert wide > 2 * alone


@pytest.mark.parametrize("sizes", [(1, 1), (64, 1), (16, 4)])
def test_no_two_tokens_of_a_measured_step_are_equal(sizes: tuple[int, int]) -> None:
    machine = Machine(0.0001, 0.001)
    machine.measure(replace(LIMITS, vocab_size=32_000), DecodeShape(*sizes), has_proposals=True)
    for batch in machine.batches:
        tokens = [token for one in batch for token in one.token_ids]
        assert len(set(tokens)) == len(tokens)
    machine.measure(LIMITS, DecodeShape(*sizes), has_proposals=True)
    assert all(max(one.token_ids) < 97 for batch in machine.batches[-9:] for one in batch)


def test_the_least_of_several_measurements_counts() -> None:
    costs = Machine(0.0001, 0.001, 0.0005).measure(has_proposals=True)
    assert costs.rows == (1, 2, 3, 4, 6, 7, 8, 10, 11, 12, 16, 32, 64)
    assert costs.step_s == pytest.approx([0.001 + 0.0001 * rows for rows in costs.rows])
    assert costs.draft_s == pytest.approx(0.0005)


def test_without_drafts_the_widest_step_is_measured_twice_and_a_narrow_one_once() -> None:
    machine = Machine(0.0001, 0.001)
    costs = machine.measure()
    assert [len(batch) for batch in machine.batches] == [8, 64, 64, 8]
    assert costs.rows == (8, 64)
    assert costs.step_s == pytest.approx((0.0018, 0.0074))
    # The first step is slow on this machine, the fifth too.
    machine.batches = machine.batches[:2]
    assert machine.measure().step_s == pytest.approx((0.0018, 0.0074)), "the lesser one counts"


@pytest.mark.parametrize(
    ("row_s", "measured"), [(0.05, [8, 32, 32, 8]), (0.1, [8, 16, 16]), (0.3, [8]), (9.0, [8])]
)
def test_without_drafts_a_slow_model_is_measured_as_far_as_time_allows(
    row_s: float, measured: list[int]
) -> None:
    machine = Machine(row_s / 2, 0.0)  # the first step takes twice as long
    costs = machine.measure()
    assert [len(batch) for batch in machine.batches] == measured
    assert costs.rows == tuple(sorted(set(measured[1:] or measured)))


def test_without_drafts_no_step_is_outside_the_limits() -> None:
    machine = Machine(0.0001, 0.001)
    for most, measured in ((3, [3]), (20, [8, 16, 16, 8])):
        machine.batches.clear()
        machine.measure(replace(LIMITS, max_tokens=most))
        assert [len(batch) for batch in machine.batches] == measured


def test_without_a_drafting_layer_drafts_cost_nothing() -> None:
    machine = Machine(0.0001, 0.001)
    assert machine.measure().draft_s == 0.0
    assert not any(one.num_proposals for batch in machine.batches for one in batch)


def test_more_rows_never_seem_cheaper() -> None:
    costs = Machine(-0.00001, 0.002).measure(has_proposals=True)
    assert len(costs.rows) > 1
    assert list(costs.step_s) == sorted(costs.step_s)


@pytest.mark.parametrize(("step_s", "most_s"), [(0.02, 2.0), (0.1, 2.4), (5.0, 80.0)])
def test_a_slow_model_is_measured_less_often(step_s: float, most_s: float) -> None:
    machine = Machine(step_s / 50, step_s, step_s / 10)
    costs = machine.measure(has_proposals=True)
    assert {1, 2, 3, 4, 6, 8} <= set(costs.rows)
    assert machine.now_s < most_s


def test_on_a_busy_machine_wide_steps_leave_time_to_repeat_narrow_ones() -> None:
    machine = Machine(0.003, 0.03, 0.002)
    costs = machine.measure(has_proposals=True)
    drafting = [batch for batch in machine.batches if batch[0].num_proposals]
    assert len(drafting) >= 3
    assert costs.draft_s == pytest.approx(0.002)
    assert costs.rows[-1] > 8


def test_verified_drafts_are_measured_up_to_the_widest_step() -> None:
    machine = Machine(0.0001, 0.001)
    costs = machine.measure(replace(LIMITS, max_tokens=2048), DecodeShape(256, 6))
    assert costs.rows[-1] == 256 * 6
    wide = [batch for batch in machine.batches if len(batch[0].token_ids) > 1]
    assert [len(batch) for batch in wide] == [21, 42, 85, 170, 256]
    assert {one.num_drafts for batch in wide for one in batch} == {5}
    assert all(one.start > 0 for batch in machine.batches for one in batch)
    most = max(one.start + len(one.token_ids) for batch in wide for one in batch)
    assert most <= len(wide[0][0].block_table) * LIMITS.block_size


def test_the_widest_steps_of_a_slow_machine_are_left_to_the_steps_that_run() -> None:
    machine = Machine(0.004, 0.012)
    costs = machine.measure(replace(LIMITS, max_tokens=2048), DecodeShape(256, 6))
    assert 64 < costs.rows[-1] < 256 * 6
    assert machine.now_s < 3.2


def test_no_step_is_outside_the_limits() -> None:
    limits = replace(LIMITS, max_tokens=3, max_len=2, num_blocks=2, block_size=1)
    machine = Machine(0.0001, 0.001)
    costs = machine.measure(limits, DecodeShape(2, 2), has_proposals=True)
    assert costs.rows == (1, 2, 3)
    for one in (one for batch in machine.batches for one in batch):
        assert one.start + len(one.token_ids) <= len(one.block_table) <= 2
        assert {*one.block_table} <= {0, 1}
    assert {one.num_proposals for batch in machine.batches for one in batch} == {0, 2}


def test_no_two_sequences_write_the_same_blocks() -> None:
    """Their tokens differ: what one of them writes is not what the other would."""
    machine = Machine(0.0001, 0.001)
    limits = replace(LIMITS, num_blocks=1000)
    machine.measure(limits, DecodeShape(64, 4), has_proposals=True)
    shared = 31 // limits.block_size
    for batch in machine.batches:
        assert {tuple(one.block_table[:shared]) for one in batch} == {tuple(range(shared))}
        own = [block for one in batch for block in one.block_table[shared:]]
        assert len({*own}) == len(own)
        assert min(own) >= shared


def test_few_blocks_are_written_by_several_sequences() -> None:
    machine = Machine(0.0001, 0.001)
    machine.measure(LIMITS, DecodeShape(64, 4), has_proposals=True)
    sequences = [one for batch in machine.batches for one in batch]
    assert {block for one in sequences for block in one.block_table} == {*range(20)}


@pytest.mark.parametrize("has_proposals", [True, False])
@pytest.mark.parametrize(("num_seqs", "per_seq"), [(1, 1), (4, 1), (32, 1), (4, 4), (6, 3)])
def test_no_step_has_more_sequences_than_may_run(
    num_seqs: int, per_seq: int, has_proposals: bool
) -> None:
    """A card has room for no more; rows are the tokens of longer sequences, and drafts first."""
    machine = Machine(0.0001, 0.001)
    costs = machine.measure(LIMITS, DecodeShape(num_seqs, per_seq), has_proposals=has_proposals)
    assert max(len(batch) for batch in machine.batches) == num_seqs
    assert costs.rows[-1] == 64
    sequences = [one for batch in machine.batches for one in batch]
    for one in sequences:
        count = len(one.token_ids)
        assert one.num_drafts == (count - 1 if count <= per_seq else 0)
        assert one.start + count <= len(one.block_table) * LIMITS.block_size
