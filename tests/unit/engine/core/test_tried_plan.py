"""The plan that showed that a request can be seated is taken while it is the one to be made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from engine.core.blocks.block_pool import BlockUse
from engine.core.planning.planner import plan_step
from engine.core.sequences.sequence import Sequence
from tests.support.engine.build import Engine, check_books, make_request, state_of

Event = Callable[[Engine], object]


def two_decode() -> Engine:
    """Two sequences decode, one receives KV, and a prompt that has ended is cached."""
    made = Engine(num_blocks=32, seats=6)
    made.add(make_request(20, seed=5, max_tokens=1))
    for seed in (1, 2):
        made.add(make_request(9, seed=seed, max_tokens=12, ignore_eos=True))
    made.add(make_request(6, seed=6, max_tokens=12), has_remote_kv=True)
    made.step()
    made.step()
    return made


def nothing(made: Engine) -> None: ...


def one_ends(made: Engine) -> None:
    made.scheduler.finish(made.scheduler.running[0])


def kv_lands(made: Engine) -> None:
    (receiving,) = made.scheduler.receiving.values()
    made.land(receiving)


def another_one_waits(made: Engine) -> None:
    made.add(make_request(4, seed=8))


def a_prefix_is_pulled(made: Engine) -> None:
    assert made.scheduler.prefix_transfers.begin([], [bytes(16)]) is not None


def what_was_kept_is_free(made: Engine) -> None:
    """A transfer that reads blocks of an ended prompt has read them."""
    (sent,) = made.scheduler.exporting.values()
    made.scheduler.release(sent)


def a_prompt_is_sent(made: Engine) -> None:
    made.add(make_request(5, seed=9, max_tokens=1), is_exported=True)
    made.step()


@pytest.mark.parametrize(
    ("before", "event", "is_taken"),
    [
        (nothing, nothing, True),
        (nothing, one_ends, False),
        (nothing, kv_lands, False),
        (nothing, another_one_waits, False),
        (nothing, a_prefix_is_pulled, False),
        (a_prompt_is_sent, what_was_kept_is_free, False),
    ],
)
@pytest.mark.parametrize("is_first", [True, False], ids=["event, queued", "queued, event"])
def test_a_tried_plan_is_taken_unless_something_happens(
    monkeypatch: pytest.MonkeyPatch, before: Event, event: Event, is_taken: bool, is_first: bool
) -> None:
    plans: list[Any] = []

    def counting(**given: Any) -> Any:
        plans.append(given)
        return plan_step(**given)

    monkeypatch.setattr("engine.core.scheduler.plan_step", counting)
    trying, other = two_decode(), two_decode()
    for made in (trying, other):
        before(made)
        sequence = Sequence(100, make_request(11, seed=3), has_remote_kv=True)
        if made is trying:
            assert made.scheduler.can_seat(sequence)
        if is_first:
            event(made)
        made.scheduler.add(sequence)
        if not is_first:
            event(made)
        plans.clear()
        step = made.scheduler.plan()
        assert sequence in step.reserved
        assert len(plans) == (0 if is_taken and made is trying else 1)
    assert state_of(trying.scheduler) == state_of(other.scheduler)
    check_books(trying.scheduler)


def test_a_tried_plan_of_a_sequence_that_is_not_queued_is_forgotten() -> None:
    trying, other = two_decode(), two_decode()
    tried = Sequence(100, make_request(11, seed=3), has_remote_kv=True)
    assert trying.scheduler.can_seat(tried)
    for made in (trying, other):
        made.add(make_request(11, seed=4), has_remote_kv=True)
        made.step()
    assert state_of(trying.scheduler) == state_of(other.scheduler)


def test_no_plan_is_kept_of_a_sequence_that_has_no_place() -> None:
    made = two_decode()
    made.scheduler.pool.allocate(made.scheduler.pool.num_available, BlockUse.RUNNING)
    sequence = Sequence(100, make_request(11, seed=3), has_remote_kv=True)
    assert not made.scheduler.can_seat(sequence)
    made.scheduler.add(sequence)
    assert sequence not in made.scheduler.plan().reserved
