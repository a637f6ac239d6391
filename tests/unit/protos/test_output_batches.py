"""Outputs as columns: what is sent is what is read, and nothing malformed is read as anything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import PeerProtocolError
from common.ids import AttemptId
from common.prompt_logprobs import PromptLogprobs
from common.request import FinishReason, RequestOutput, TokenLogprobs
from protos import pdserve_node_pb2 as pb
from protos.output_batches import outputs_from_proto, outputs_to_proto
from tests.support.examples import everyday
from tests.support.nodes.node_outputs import node_output

numbers = st.integers(0, 2**32 - 1)
micros = st.integers(0, 10**9).map(lambda span_us: span_us / 1e6)
logprobs = st.builds(
    TokenLogprobs,
    st.floats(-50, 0, width=32),
    st.lists(st.tuples(numbers, st.floats(-50, 0, width=32)), max_size=3).map(tuple),
)


@st.composite
def prompt_logprobs(draw: st.DrawFn) -> PromptLogprobs:
    num_top, count = draw(st.integers(0, 3)), draw(st.integers(0, 4))
    floats = st.floats(-50, 0, width=32)

    def column(values: st.SearchStrategy[Any], size: int) -> tuple[Any, ...]:
        return tuple(draw(st.lists(values, min_size=size, max_size=size)))

    return PromptLogprobs(
        num_top,
        column(floats, count),
        column(numbers, count),
        column(numbers, count * num_top),
        column(floats, count * num_top),
    )


@st.composite
def outputs(draw: st.DrawFn) -> RequestOutput:
    token_ids = tuple(draw(st.lists(numbers, max_size=4)))
    num_drafted = draw(st.integers(0, 9))
    finish = draw(st.none() | st.sampled_from(FinishReason))
    has_logprobs = draw(st.booleans())
    return node_output(
        attempt=AttemptId(draw(st.text(min_size=1, max_size=20)), draw(st.integers(1, 2**32 - 1))),
        first_index=draw(numbers),
        token_ids=token_ids,
        logprobs=tuple(draw(logprobs) for _ in token_ids) if has_logprobs else (),
        num_cached_tokens=draw(st.integers(0, 1) | numbers),
        num_drafted=num_drafted,
        num_accepted=draw(st.integers(0, num_drafted)),
        queue_s=draw(micros),
        compute_s=draw(micros),
        is_started=draw(st.booleans()),
        finish_reason=finish,
        error_code="node_lost" if finish is FinishReason.ERROR else "",
        error_message="why" if finish is FinishReason.ERROR else "",
        prompt_logprobs=draw(st.none() | prompt_logprobs()),
    )


def received(sent: Sequence[RequestOutput]) -> list[RequestOutput]:
    return outputs_from_proto(pb.OutputBatch.FromString(outputs_to_proto(sent).SerializeToString()))


@settings(max_examples=everyday(40, of=100))
@given(st.lists(outputs(), max_size=6))
def test_outputs_survive_the_wire_in_their_order(sent: list[RequestOutput]) -> None:
    assert received(sent) == sent


def test_an_error_has_a_short_text() -> None:
    (failed,) = received(
        [
            node_output(
                attempt=AttemptId("req-1", 1),
                finish_reason=FinishReason.ERROR,
                error_code="node_lost",
                error_message="x" * 5000,
            )
        ]
    )
    assert failed.details.error_message == "x" * 1000


def test_a_step_of_plain_tokens_has_no_more_than_it_needs() -> None:
    ids = [AttemptId(f"r{index}", 1) for index in range(8)]
    batch = outputs_to_proto(
        [RequestOutput(attempt, 7, (index,)) for index, attempt in enumerate(ids)]
    )
    assert {field.name for field, _ in batch.ListFields()} == {
        "request_ids",
        "attempts",
        "first_indexes",
        "num_tokens",
        "token_ids",
    }


def one(**changes: object) -> pb.OutputBatch:
    fields: dict[str, object] = {
        "request_ids": ["r"],
        "attempts": [1],
        "first_indexes": [0],
        "num_tokens": [1],
        "token_ids": [1],
    }
    return pb.OutputBatch(**(fields | changes))  # type: ignore[arg-type]


def of_prompt(**columns: Any) -> pb.OutputBatch:
    return one(details=[pb.OutputDetails(prompt_logprobs=pb.PromptLogprobs(**columns))])


TOP = pb.TokenLogprobs(top_token_ids=[1], top_logprobs=[])
MANY = pb.TokenLogprobs(top_token_ids=[1] * 21, top_logprobs=[0.0] * 21)


@pytest.mark.parametrize(
    "batch",
    [
        one(request_ids=[""]),
        one(request_ids=["x" * 129]),
        one(request_ids=[]),
        one(attempts=[0]),
        one(attempts=[]),
        one(first_indexes=[]),
        one(first_indexes=[0, 1]),
        one(num_tokens=[]),
        one(num_tokens=[2]),
        one(num_tokens=[0]),
        one(token_ids=[]),
        one(is_started=[True, False]),
        one(num_cached_tokens=[1, 1]),
        one(num_drafted=[1], num_accepted=[2]),
        one(num_accepted=[1]),
        one(details=[pb.OutputDetails(place=1)]),
        one(details=[pb.OutputDetails(finish_reason="tired")]),
        one(details=[pb.OutputDetails(finish_reason="error")]),
        one(details=[pb.OutputDetails(logprobs=[pb.TokenLogprobs()] * 2)]),
        one(details=[pb.OutputDetails(logprobs=[TOP])]),
        one(details=[pb.OutputDetails(logprobs=[MANY])]),
        of_prompt(num_top=0, logprobs=[-1.0], ranks=[]),
        of_prompt(num_top=1, logprobs=[-1.0], ranks=[1]),
        of_prompt(num_top=1, logprobs=[-1.0], ranks=[1], top_token_ids=[1]),
        of_prompt(num_top=0, logprobs=[-1.0], ranks=[1], top_logprobs=[-1.0]),
        of_prompt(
            num_top=21,
            logprobs=[-1.0],
            ranks=[1],
            top_token_ids=[1] * 21,
            top_logprobs=[-1.0] * 21,
        ),
        pb.OutputBatch(token_ids=[1]),
        pb.OutputBatch(details=[pb.OutputDetails()]),
    ],
)
def test_a_malformed_batch_is_a_broken_peer(batch: pb.OutputBatch) -> None:
    outputs_from_proto(one())
    with pytest.raises(PeerProtocolError):
        outputs_from_proto(batch)
