"""What a node says about an attempt: counts and details travel when they are news."""

from __future__ import annotations

from common.ids import AttemptId, Incarnation
from common.request import NO_DETAILS, FinishReason, RequestCounts, RequestOutput
from engine.core.sequences.sequence import Sequence
from engine.core.step.step_results import StepOutput
from node.flow.attempts.attempt_table import NodeAttempt, emit_tokens
from tests.support.engine.build import make_request


def attempt() -> NodeAttempt:
    sequence = Sequence(1, make_request(5, max_tokens=9))
    return NodeAttempt(
        AttemptId("a", 1), Incarnation("r", 1), sequence, 60.0, 1.0,
        computing_since_s=3.0, first_token_at_s=3.5,
    )  # fmt: skip


def said(of: NodeAttempt, index: int, reason: FinishReason | None = None) -> RequestOutput:
    return emit_tokens(of, StepOutput(of.sequence, index, (7,), (), reason)).output


def test_counts_are_sent_when_they_have_changed() -> None:
    one = attempt()
    one.sequence.num_cached_tokens = 4
    assert said(one, 0).counts == RequestCounts(4)
    assert said(one, 1).counts is None
    one.sequence.num_drafted, one.sequence.num_accepted_drafts = 3, 2
    assert said(one, 2).counts == RequestCounts(4, 3, 2)
    assert said(one, 3).counts is None
    assert said(one, 4, FinishReason.LENGTH).counts is None


def test_what_counts_nothing_sends_no_counts() -> None:
    assert said(attempt(), 0).counts is None


def test_the_first_and_the_last_output_have_details() -> None:
    one = attempt()
    first = said(one, 0).details
    assert (first.queue_s, first.compute_s, first.finish_reason) == (2.0, 0.5, None)
    assert said(one, 1).details is NO_DETAILS
    assert said(one, 2, FinishReason.STOP).details.finish_reason is FinishReason.STOP
    assert one.outcome == "stop"
