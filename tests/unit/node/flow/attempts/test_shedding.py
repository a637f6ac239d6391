"""Which requests are refused because of their deadlines: the estimate, in numbers."""

from __future__ import annotations

from typing import Any

import pytest

from common.errors import DeadlineUnreachable
from common.ids import AttemptId, Incarnation
from engine.core.sequences.sequence import Sequence
from engine.core.sequences.waiting_queue import WaitingQueue
from node.flow.attempts.attempt_table import NodeAttempt
from node.flow.attempts.shedding import Shedding
from node.flow.attempts.standstills import Standstills
from tests.support.engine.build import make_request


def queue_of(*lengths: int, priorities: bool = False) -> WaitingQueue:
    queue = WaitingQueue(has_priorities=priorities, requeues_at_tail=False)
    for sequence_id, length in enumerate(lengths):
        queue.join(Sequence(sequence_id, make_request(length, priority=-sequence_id)))
    return queue


NINE = [100] * 9
END_S = 105.0
"""When `measured` took its last step."""


def take(queue: WaitingQueue, num: int, num_tokens: int) -> None:
    """So many requests leave the queue, of so many tokens each."""
    queue.num_taken += num
    queue.num_taken_tokens += num * num_tokens


def measured(
    queue: WaitingQueue, *, num: int = 4, num_tokens: int = 100, are_taken: bool = True
) -> Shedding:
    """A node from whose queue so many requests have left, of so many tokens each.

    One left each second, and the next one is about to leave.
    """
    shedding = Shedding(Standstills())
    for second in range(num + 2):
        shedding.on_step(END_S - num - 1 + second, queue, runs=True, are_taken=are_taken)
        take(queue, int(second < num), num_tokens)
    return shedding


def end(
    shedding: Shedding, num_tokens: int, span_s: float, landed_at_s: float | None = None
) -> None:
    """End an output when `measured` took its last step."""
    output = tuple(range(num_tokens))
    sequence = Sequence(99, make_request(4, max_tokens=2000, output_token_ids=output))
    attempt = NodeAttempt(AttemptId("r", 1), Incarnation("router", 1), sequence, 1e9, 0.0)
    attempt.first_token_at_s, attempt.landed_at_s = END_S - span_s, landed_at_s
    shedding.on_end(attempt, END_S)


def refusal(
    shedding: Shedding, queue: WaitingQueue, deadline_s: float, length: int = 100, **given: Any
) -> DeadlineUnreachable | None:
    return shedding.refusal(make_request(length, deadline_s=deadline_s, **given), queue)


def expected_s(shedding: Shedding, queue: WaitingQueue, length: int = 100, **given: Any) -> float:
    """In how many seconds a request would end, as its refusal says; 0 if that is unknown."""
    late = refusal(shedding, queue, 0.0, length, **given)
    return 0.0 if late is None else float(str(late).split()[5])


def test_the_queue_and_its_own_prompt_take_as_long_as_the_queue_has_moved() -> None:
    queue = queue_of(*NINE)
    shedding = measured(queue)
    assert refusal(shedding, queue, 10.0) is None
    late = refusal(shedding, queue, 7.0)
    assert late is not None
    assert str(late) == (
        "the request would end in 10.0 s, and its deadline is in 7.0 s: "
        "9 requests of 900 tokens wait before it"
    )
    assert late.retry_after_s == pytest.approx(3.0)


@pytest.mark.parametrize("num_left", [1, 2, 3, 4])
def test_few_that_have_left_the_queue_say_nothing(num_left: int) -> None:
    queue = queue_of(*NINE)
    assert (expected_s(measured(queue, num=num_left), queue) > 0) is (num_left >= 3)


@pytest.mark.parametrize(("num_left", "at_most_s"), [(1, 0.0), (3, 3.0), (9, 3.0)])
def test_small_prompts_that_have_left_the_queue_do_not_make_a_long_one_late(
    num_left: int, at_most_s: float
) -> None:
    """As where seats limit: 48 tokens would take 48 s by tokens, and two requests 2 s."""
    queue = queue_of(18)
    shedding = measured(queue, num=num_left, num_tokens=1)
    assert expected_s(shedding, queue, length=30) <= at_most_s


def test_long_prompts_that_have_left_the_queue_do_not_make_many_small_ones_late() -> None:
    """As where computing limits: ten requests would take 10 s by number, and 100 tokens 0.1 s."""
    queue = queue_of(*[10] * 9)
    assert expected_s(measured(queue, num_tokens=1000), queue, length=10) == pytest.approx(0.1)


def test_where_seats_are_free_the_tokens_of_the_queue_take_its_time() -> None:
    queue = queue_of(18)
    shedding = measured(queue, num_tokens=1, are_taken=False)
    assert expected_s(shedding, queue, length=30) == pytest.approx(48.0)
    for second in range(5):
        shedding.on_step(END_S + second, queue, runs=True, are_taken=True)
        take(queue, 1, 1)
    shedding.on_step(END_S + 5.0, queue, runs=True, are_taken=True)
    assert expected_s(shedding, queue, length=30) == pytest.approx(48.0), "half of the time"
    shedding.on_step(END_S + 5.5, queue, runs=True, are_taken=True)
    assert expected_s(shedding, queue, length=30) < 3.0, "more than half of it"


@pytest.mark.parametrize("each_s", [1.0, 7.0, 40.0])
def test_a_queue_that_moves_evenly_is_never_judged_slower_than_it_is(each_s: float) -> None:
    queue, shedding = queue_of(*NINE), Shedding(Standstills())
    num_steps = int(each_s / 0.5)
    for step in range(60 * num_steps):
        take(queue, int(step > 0 and step % num_steps == 0), 100)
        shedding.on_step(100.0 + step / 2, queue, runs=True, are_taken=True)
        assert expected_s(shedding, queue) <= 10 * each_s + 0.1
        if step > 40 * num_steps:
            assert expected_s(shedding, queue) >= 10 * each_s * 0.8


def test_a_slow_queue_is_judged_by_the_latest_ten_that_have_left_it() -> None:
    """One that left after 20 s, among others that did after 60 s, is not half of what is known."""
    queue, shedding = queue_of(*NINE), Shedding(Standstills())
    now_s = 100.0
    shedding.on_step(now_s, queue, runs=True, are_taken=True)
    for span_s in [60.0] * 30 + [20.0]:
        for _ in range(60):
            now_s += span_s / 60
            shedding.on_step(now_s, queue, runs=True, are_taken=True)
        take(queue, 1, 100)
        now_s += 0.001
        shedding.on_step(now_s, queue, runs=True, are_taken=True)
    assert 440.0 <= expected_s(shedding, queue) <= 600.0


def test_the_output_takes_as_long_as_the_latest_ones_and_no_longer_than_its_limit() -> None:
    queue = queue_of(*NINE)
    shedding = measured(queue)
    for _ in range(50):
        end(shedding, num_tokens=20, span_s=4.0)
    assert refusal(shedding, queue, 14.0, max_tokens=1000) is None
    assert refusal(shedding, queue, 13.9, max_tokens=1000) is not None
    assert refusal(shedding, queue, 11.0, max_tokens=5) is None
    # The latest outputs count more than earlier ones.
    for _ in range(200):
        end(shedding, num_tokens=40, span_s=8.0)
    assert refusal(shedding, queue, 17.5, max_tokens=1000) is not None


@pytest.mark.parametrize(("num_outputs", "output_s"), [(1, 0.0), (2, 0.0), (3, 200.0)])
def test_few_outputs_say_nothing_of_the_next_one(num_outputs: int, output_s: float) -> None:
    queue = queue_of(*NINE)
    shedding = measured(queue)
    for _ in range(num_outputs):
        end(shedding, num_tokens=1000, span_s=200.0)
    assert expected_s(shedding, queue, max_tokens=1000) == pytest.approx(10.0 + output_s)


def test_nobody_is_refused_without_a_queue_or_before_it_has_moved() -> None:
    queue = queue_of(*[1000] * 10)
    assert refusal(measured(queue, num=0), queue, 0.1) is None
    still = Shedding(Standstills())
    for second in range(100):
        still.on_step(100.0 + second, queue, runs=True, are_taken=True)
    assert refusal(still, queue, 0.1) is None
    shedding = measured(queue)
    assert refusal(shedding, queue, 0.1) is not None
    assert refusal(shedding, queue_of(), 0.1) is None


@pytest.mark.parametrize(("span_s", "is_known"), [(0.9, False), (1.0, True)])
def test_less_than_a_second_says_nothing(span_s: float, is_known: bool) -> None:
    queue, shedding = queue_of(*NINE), Shedding(Standstills())
    shedding.on_step(100.0, queue, runs=True, are_taken=True)
    take(queue, 4, 100)
    shedding.on_step(100.0 + span_s, queue, runs=True, are_taken=True)
    assert (refusal(shedding, queue, 0.1) is not None) is is_known


def test_what_leaves_within_one_moment_counts_with_the_next_step() -> None:
    queue, shedding = queue_of(*NINE), Shedding(Standstills())
    for now_s in (100.0, 100.0, 101.0):
        shedding.on_step(now_s, queue, runs=True, are_taken=True)
        take(queue, 2, 100)
    assert expected_s(shedding, queue) == pytest.approx(10 / 5)


def test_an_output_whose_prompt_was_computed_elsewhere_began_when_it_landed() -> None:
    queue = queue_of(*NINE)
    shedding = measured(queue)
    for _ in range(3):
        end(shedding, num_tokens=20, span_s=4.0, landed_at_s=END_S - 3.0)
    assert refusal(shedding, queue, 13.1, max_tokens=1000) is None
    assert refusal(shedding, queue, 12.9, max_tokens=1000) is not None


def test_what_leaves_while_nobody_waits_measures_nothing() -> None:
    queue = queue_of(*NINE)
    shedding = measured(queue)
    empty = queue_of()
    empty.num_taken, empty.num_taken_tokens = queue.num_taken, queue.num_taken_tokens
    shedding.on_step(END_S, empty, runs=False, are_taken=True)
    take(empty, 1000, 1000)
    shedding.on_step(END_S + 1.0, empty, runs=False, are_taken=True)
    assert expected_s(shedding, queue) == pytest.approx(10.0)
    # What was known before an idle time is known after it.
    take(queue, 1000, 1000)
    shedding.on_step(END_S + 3600.0, queue, runs=True, are_taken=True)
    assert expected_s(shedding, queue) == pytest.approx(10.0)


def test_the_estimate_follows_the_load() -> None:
    queue = queue_of(*NINE)
    shedding = measured(queue, num=60)
    for second in range(1, 41):
        take(queue, 10, 100)
        shedding.on_step(END_S + second, queue, runs=True, are_taken=True)
    assert 1.0 <= expected_s(shedding, queue) <= 1.2


def test_an_answer_that_has_begun_is_never_refused() -> None:
    queue = queue_of(*NINE)
    shedding = measured(queue)
    begun = make_request(100, deadline_s=0.1, output_token_ids=(5,))
    assert shedding.refusal(begun, queue) is None


def test_where_priorities_count_only_those_before_it_delay_a_request() -> None:
    queue = queue_of(100, 300, 500, priorities=True)
    shedding = measured(queue)
    for priority, num_ahead, ahead in ((1, 0, 0), (0, 1, 100), (-1, 2, 400), (-2, 3, 900)):
        late = refusal(shedding, queue, 0.0, priority=priority)
        assert late is not None
        assert f"{num_ahead} requests of {ahead} tokens wait" in str(late)


def test_nobody_is_asked_to_come_back_at_once_or_after_more_than_a_minute() -> None:
    queue = queue_of(*NINE)
    shedding = measured(queue)
    soon, late = refusal(shedding, queue, 9.9), refusal(shedding, queue_of(*[100] * 200), 9.9)
    assert soon is not None
    assert late is not None
    assert (soon.retry_after_s, late.retry_after_s) == (1.0, 60.0)


def test_a_prompt_that_is_sent_on_has_no_output_here() -> None:
    """The outputs that a node has measured are those of its earlier role."""
    queue = queue_of(*NINE)
    shedding = measured(queue)
    for _ in range(3):
        end(shedding, num_tokens=100, span_s=50.0)
    request = make_request(100, deadline_s=10.0, max_tokens=100)
    assert shedding.refusal(request, queue) is not None
    assert shedding.refusal(request, queue, is_prompt=True) is None


@pytest.mark.parametrize("runs", [True, False], ids=["in a step", "while it waits for others"])
def test_a_time_in_which_the_node_stood_still_does_not_make_the_queue_slow(*, runs: bool) -> None:
    queue, shedding = queue_of(*NINE), Shedding(Standstills())
    for tenth in range(40):
        shedding.on_step(100.0 + tenth / 10, queue, runs=runs, are_taken=True)
        take(queue, int(tenth % 10 == 9), 100)
    shedding.on_step(124.0, queue, runs=runs, are_taken=True)
    # The longest turn that may be usual counts: a second.
    assert expected_s(shedding, queue) == pytest.approx(10 * 4.9 / 5)


def test_an_output_is_not_long_because_the_node_stood_still() -> None:
    queue = queue_of(*NINE)
    shedding = measured(queue)
    for number in range(3):
        output = Sequence(99, make_request(4, max_tokens=1000, output_token_ids=tuple(range(20))))
        attempt = NodeAttempt(AttemptId("r", number), Incarnation("router", 1), output, 1e9, 0.0)
        attempt.first_token_at_s = END_S
        shedding.on_end(attempt, END_S + 60.0)
    shedding.on_step(END_S + 60.0, queue, runs=True, are_taken=True)
    assert expected_s(shedding, queue, max_tokens=1000) < 40.0
