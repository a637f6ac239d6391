"""Ended attempts as spans: whatever happened, each span begins and ends where it did."""

from __future__ import annotations

from typing import Any

import pytest

from kv_transfer.transfer_timing import TransferTiming
from node.flow.attempts.attempt_table import HANDED_OFF, NodeAttempt
from node.watch.attempt_spans import record_attempt
from tests.support.observing.recorded_tracing import RecordedTracing
from tests.unit.node.watch.attempts import PARENT, attempt_with

TIMING = TransferTiming(
    lease_token=9,
    lane="shm",
    num_bytes=1000,
    bytes_hidden=900,
    opened_at_s=10.0,
    first_sent_at_s=12.5,
    last_acked_at_s=14.25,
    committed_at_s=14.0,
    ended_at_s=14.5,
)


def spans_of(attempt: NodeAttempt) -> RecordedTracing:
    tracing = RecordedTracing()
    record_attempt(tracing, attempt, 20.0)
    assert tracing.open() == []
    return tracing


TIERS = ("", ".pool", ".host", ".disk", ".pulled")
COMPUTED: dict[str, Any] = {"computing_since_s": 12.0, "first_token_at_s": 14.0, "num_chunks": 3}


def test_a_handoff_on_the_prefill_node() -> None:
    attempt = attempt_with(is_exported=True, outcome=HANDED_OFF, transfer=TIMING, **COMPUTED)
    tracing = spans_of(attempt)
    assert tracing.shown() == [
        ("prefill", PARENT, 10.0, 14.0, ""),
        ("queue", "prefill", 10.0, 12.0, ""),
        ("compute", "prefill", 12.0, 14.0, ""),
        ("kv transfer", PARENT, 12.5, 14.5, ""),
        ("exposed", "kv transfer", 14.0, 14.5, ""),
    ]
    prefill, _, compute, transfer, _ = tracing.spans
    assert prefill.attributes["pdserve.prompt_tokens"] == 20
    assert compute.attributes["pdserve.chunks"] == 3
    assert transfer.attributes["pdserve.kv.transport"] == "shm"
    assert transfer.attributes["pdserve.kv.bytes"] == 1000
    assert transfer.attributes["pdserve.kv.hidden_bytes"] == 900
    assert transfer.attributes["pdserve.kv.exposed_s"] == 0.5


def test_a_transfer_that_failed() -> None:
    attempt = attempt_with(is_exported=True, outcome="handoff_failed", **COMPUTED)
    assert spans_of(attempt).shown()[3:] == [("kv transfer", PARENT, 14.0, 20.0, "handoff_failed")]


def test_an_answer_after_a_landing() -> None:
    attempt = attempt_with(
        has_remote_kv=True, landed_at_s=13.0, outcome="stop", computing_since_s=13.5
    )
    tracing = spans_of(attempt)
    assert tracing.shown() == [("decode", PARENT, 13.0, 20.0, "")]
    assert tracing.spans[0].attributes["pdserve.attempt"] == 1
    assert tracing.spans[0].attributes["pdserve.outcome"] == "stop"


def test_a_landing_that_never_came() -> None:
    attempt = attempt_with(has_remote_kv=True, outcome="handoff_failed")
    assert spans_of(attempt).shown() == [("landing", PARENT, 10.0, 20.0, "handoff_failed")]


def test_an_answer_that_a_node_computes_alone() -> None:
    assert spans_of(attempt_with(outcome="length", **COMPUTED)).shown() == [
        ("prefill", PARENT, 10.0, 14.0, ""),
        ("queue", "prefill", 10.0, 12.0, ""),
        ("compute", "prefill", 12.0, 14.0, ""),
        ("decode", PARENT, 14.0, 20.0, ""),
    ]


@pytest.mark.parametrize(("outcome", "error"), [("abort", ""), ("deadline_exceeded",) * 2])
def test_a_prompt_that_was_never_computed(outcome: str, error: str) -> None:
    assert spans_of(attempt_with(outcome=outcome)).shown() == [
        ("prefill", PARENT, 10.0, 20.0, error),
        ("queue", "prefill", 10.0, 20.0, ""),
    ]


def test_a_step_that_failed() -> None:
    attempt = attempt_with(outcome="internal_error", computing_since_s=12.0, num_chunks=1)
    assert spans_of(attempt).shown() == [
        ("prefill", PARENT, 10.0, 20.0, "internal_error"),
        ("queue", "prefill", 10.0, 12.0, ""),
        ("compute", "prefill", 12.0, 20.0, ""),
    ]


def test_an_answer_that_goes_on_here() -> None:
    attempt = attempt_with(output_token_ids=(1, 2), outcome="length", computing_since_s=12.0)
    assert spans_of(attempt).shown() == [("decode", PARENT, 12.0, 20.0, "")]


def test_an_answer_that_goes_on_elsewhere_after_its_tokens_were_computed_here() -> None:
    attempt = attempt_with(
        is_exported=True, output_token_ids=(1, 2), outcome=HANDED_OFF, transfer=TIMING, **COMPUTED
    )
    assert [span[0] for span in spans_of(attempt).shown()] == [
        "prefill", "queue", "compute", "kv transfer", "exposed"
    ]  # fmt: skip


@pytest.mark.parametrize(
    "fields",
    [
        {"outcome": "length", **COMPUTED},
        {"outcome": HANDED_OFF, "is_exported": True, "transfer": TIMING, **COMPUTED},
        {"outcome": "stop", "has_remote_kv": True, "landed_at_s": 13.0},
        {"outcome": "handoff_failed", "has_remote_kv": True},
    ],
)
@pytest.mark.parametrize(("num_pulled", "num_shown"), [(0, 0), (5, 5), (9, 8)])
def test_spans_say_what_was_cached_and_where(
    fields: dict[str, Any], num_pulled: int, num_shown: int
) -> None:
    """What was pulled may be evicted again before it is found."""
    attempt = attempt_with(**fields)
    sequence = attempt.sequence
    sequence.num_cached_tokens, sequence.num_host_tokens, sequence.num_disk_tokens = 15, 4, 3
    attempt.num_pulled_tokens = num_pulled
    for span in spans_of(attempt).spans:
        if "pdserve.attempt" in span.attributes:  # its children are parts of it
            told = {name: span.attributes[f"pdserve.cached_tokens{name}"] for name in TIERS}
            assert told == {
                "": 15, ".pool": 8 - num_shown, ".host": 4, ".disk": 3, ".pulled": num_shown,
            }  # fmt: skip
