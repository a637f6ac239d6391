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
from tests.support.engine.build import make_request


def queue_of(*lengths: int, priorities: bool = False) -> WaitingQueue:
    queue = WaitingQueue(has_priorities=priorities, requeues_at_tail=False)
    for sequence_id, length in enumerate(lengths):
        queue.join(Sequence(sequence_id, make_request(length, priority=-sequence_id)))
    return queue


def measured(queue: WaitingQueue, *, tokens_per_s: int, for_s: int = 4) -> Shedding:
    """A node from whose queue so many tokens have left in each second."""
    shedding = Shedding()
    for second in range(for_s + 1):
        shedding.on_step(100.0 + second, queue, runs=True)
        queue.num_taken_tokens += tokens_per_s
    return shedding


def end(
    shedding: Shedding, num_tokens: int, span_s: float, landed_at_s: float | None = None
) -> None:
    """End an output at 104 s, when `measured` took its last step."""
    output = tuple(range(num_tokens))
    sequence = Sequence(99, make_request(4, max_tokens=1000, output_token_ids=output))
    attempt = NodeAttempt(AttemptId("r", 1), Incarnation("router", 1), sequence, 1e9, 0.0)
    attempt.first_token_at_s, attempt.landed_at_s = 104.0 - span_s, landed_at_s
    shedding.on_end(attempt, 104.0)


def refusal(
    shedding: Shedding, queue: WaitingQueue, deadline_s: float, length: int = 100, **given: Any
) -> DeadlineUnreachable | None:
    return shedding.refusal(make_request(length, deadline_s=deadline_s, **given), queue)


def test_the_queue_and_its_own_prompt_take_as_long_as_the_queue_has_moved() -> None:
    queue = queue_of(400, 500)
    shedding = measured(queue, tokens_per_s=100)
    assert refusal(shedding, queue, 10.0) is None
    late = refusal(shedding, queue, 7.0)
    assert late is not None
    assert str(late) == (
        "the request would end in 10.0 s, and its deadline is in 7.0 s: 900 tokens wait before it"
    )
    assert late.retry_after_s == pytest.approx(3.0)


def test_the_output_takes_as_long_as_the_latest_ones_and_no_longer_than_its_limit() -> None:
    queue = queue_of(900)
    shedding = measured(queue, tokens_per_s=100)
    for _ in range(50):
        end(shedding, num_tokens=20, span_s=4.0)
    assert refusal(shedding, queue, 14.0, max_tokens=1000) is None
    assert refusal(shedding, queue, 13.9, max_tokens=1000) is not None
    assert refusal(shedding, queue, 11.0, max_tokens=5) is None
    # The latest outputs count more than earlier ones.
    for _ in range(200):
        end(shedding, num_tokens=40, span_s=8.0)
    assert refusal(shedding, queue, 17.5, max_tokens=1000) is not None


def test_nobody_is_refused_without_a_queue_or_before_it_has_moved() -> None:
    queue = queue_of(10_000)
    assert refusal(measured(queue, tokens_per_s=0), queue, 0.1) is None
    assert refusal(measured(queue, tokens_per_s=100, for_s=0), queue, 0.1) is None
    shedding = measured(queue, tokens_per_s=100)
    assert refusal(shedding, queue, 0.1) is not None
    assert refusal(shedding, queue_of(), 0.1) is None


@pytest.mark.parametrize(("span_s", "is_known"), [(0.9, False), (1.0, True)])
def test_less_than_a_second_says_nothing(span_s: float, is_known: bool) -> None:
    queue, shedding = queue_of(900), Shedding()
    shedding.on_step(100.0, queue, runs=True)
    queue.num_taken_tokens = 100
    shedding.on_step(100.0 + span_s, queue, runs=True)
    assert (refusal(shedding, queue, 0.1) is not None) is is_known


def test_what_leaves_within_one_moment_counts_with_the_next_step() -> None:
    queue, shedding = queue_of(900), Shedding()
    for now_s in (100.0, 100.0, 101.0):
        shedding.on_step(now_s, queue, runs=True)
        queue.num_taken_tokens += 50
    assert refusal(shedding, queue, 10.0) is None
    assert refusal(shedding, queue, 9.9) is not None


def test_an_output_whose_prompt_was_computed_elsewhere_began_when_it_landed() -> None:
    queue = queue_of(900)
    shedding = measured(queue, tokens_per_s=100)
    end(shedding, num_tokens=20, span_s=4.0, landed_at_s=101.0)
    assert refusal(shedding, queue, 13.1, max_tokens=1000) is None
    assert refusal(shedding, queue, 12.9, max_tokens=1000) is not None


def test_what_leaves_while_nobody_waits_measures_nothing() -> None:
    queue = queue_of(900)
    shedding = measured(queue, tokens_per_s=100)
    empty = queue_of()
    empty.num_taken_tokens = queue.num_taken_tokens
    shedding.on_step(105.0, empty, runs=False)
    empty.num_taken_tokens += 1_000_000
    shedding.on_step(106.0, empty, runs=False)
    assert refusal(shedding, queue, 9.9) is not None
    assert refusal(shedding, queue, 10.1) is None


def test_the_estimate_follows_the_load() -> None:
    queue = queue_of(900)
    shedding = measured(queue, tokens_per_s=100, for_s=60)
    taken = queue.num_taken_tokens
    for second in range(1, 41):
        queue.num_taken_tokens = taken + 1000 * second
        shedding.on_step(160.0 + second, queue, runs=True)
    late = refusal(shedding, queue, 0.5)
    assert late is not None
    assert 1.0 <= float(str(late).split()[5]) <= 1.2


def test_an_answer_that_has_begun_is_never_refused() -> None:
    queue = queue_of(900)
    shedding = measured(queue, tokens_per_s=100)
    begun = make_request(100, deadline_s=0.1, output_token_ids=(5,))
    assert shedding.refusal(begun, queue) is None


def test_where_priorities_count_only_those_before_it_delay_a_request() -> None:
    queue = queue_of(100, 300, 500, priorities=True)
    shedding = measured(queue, tokens_per_s=100)
    for priority, ahead in ((1, 0), (0, 100), (-1, 400), (-2, 900)):
        late = refusal(shedding, queue, 0.0, priority=priority)
        assert late is not None
        assert f"{ahead} tokens wait" in str(late)


def test_nobody_is_asked_to_come_back_at_once_or_after_more_than_a_minute() -> None:
    queue = queue_of(900)
    shedding = measured(queue, tokens_per_s=100)
    soon, late = refusal(shedding, queue, 9.9), refusal(shedding, queue, 9.9, length=50_000)
    assert soon is not None
    assert late is not None
    assert (soon.retry_after_s, late.retry_after_s) == (1.0, 60.0)


def test_a_prompt_that_is_sent_on_has_no_output_here() -> None:
    """The outputs that a node has measured are those of its earlier role."""
    queue = queue_of(400, 500)
    shedding = measured(queue, tokens_per_s=100)
    end(shedding, num_tokens=100, span_s=50.0)
    request = make_request(100, deadline_s=10.0, max_tokens=100)
    assert shedding.refusal(request, queue) is not None
    assert shedding.refusal(request, queue, is_prompt=True) is None


@pytest.mark.parametrize("runs", [True, False], ids=["in a step", "while it waits for others"])
def test_a_time_in_which_the_node_stood_still_does_not_make_the_queue_slow(*, runs: bool) -> None:
    queue, shedding = queue_of(900), Shedding()
    for tenth in range(40):
        shedding.on_step(100.0 + tenth / 10, queue, runs=runs)
        queue.num_taken_tokens += 10
    shedding.on_step(124.0, queue, runs=runs)
    assert refusal(shedding, queue, 13.0) is None
    # The longest turn that may be usual counts.
    assert refusal(shedding, queue, 12.0) is not None


def test_an_output_is_not_long_because_the_node_stood_still() -> None:
    queue = queue_of(900)
    shedding = measured(queue, tokens_per_s=100)
    output = Sequence(99, make_request(4, max_tokens=1000, output_token_ids=tuple(range(20))))
    attempt = NodeAttempt(AttemptId("r", 1), Incarnation("router", 1), output, 1e9, 0.0)
    attempt.first_token_at_s = 104.0
    shedding.on_end(attempt, 164.0)
    shedding.on_step(164.0, queue, runs=True)
    late = refusal(shedding, queue, 0.0, max_tokens=1000)
    assert late is not None
    assert float(str(late).split()[5]) < 40.0
