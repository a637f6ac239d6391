"""Values survive the wire, and what is malformed is named."""

from __future__ import annotations

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import (
    DeadlineExceeded,
    DeadlineUnreachable,
    HandoffFailed,
    InternalError,
    InvalidRequest,
    LayoutMismatch,
    NodeLost,
    Overloaded,
    PdserveError,
    PeerProtocolError,
    StaleEpoch,
)
from common.grammar import Grammar, GrammarKind
from common.ids import AttemptId, Incarnation
from common.kv.prefix_source import PrefixSource
from common.request import (
    GenerationRequest,
    SamplingParams,
)
from common.token_rules import ThinkingBudget, TokenRules
from common.version import PROTOCOL_VERSION
from protos import pdserve_node_pb2 as pb
from protos.codec import (
    attempts_from_proto,
    attempts_to_proto,
    check_envelope,
    make_envelope,
    refusal_to_error,
    refusal_to_proto,
    request_from_proto,
    request_to_proto,
    sampling_from_proto,
    sampling_to_proto,
    source_from_proto,
    source_to_proto,
    to_ms,
)
from protos.rpc_errors import error_of, status_of
from tests.support.examples import everyday

ROUTER = Incarnation("router-0", 3)
NODE = Incarnation("decode-0", 9)
token_ids = st.integers(0, 2**32 - 1)


def wire(message: pb.GenerationRequest) -> pb.GenerationRequest:
    return pb.GenerationRequest.FromString(message.SerializeToString())


sampling_params = st.builds(
    lambda min_tokens, max_tokens, **rest: SamplingParams(
        min_tokens=min(min_tokens, max_tokens), max_tokens=max_tokens, **rest
    ),
    min_tokens=st.integers(0, 2**32 - 1),
    max_tokens=st.integers(1, 2**32 - 1),
    temperature=st.floats(0, 100),
    top_k=st.integers(0, 2**32 - 1),
    top_p=st.floats(0.001, 1),
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(0.01, 10),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    seed=st.integers(0, 2**64 - 1),
    logprobs=st.none() | st.integers(0, 20),
    prompt_logprobs=st.none() | st.integers(0, 20),
    stop_token_ids=st.lists(token_ids, max_size=64).map(tuple),
    ignore_eos=st.booleans(),
    rules=st.builds(
        TokenRules,
        biases=st.lists(st.tuples(token_ids, st.floats(-100, 100)), max_size=5).map(tuple),
        bad_words=st.lists(st.lists(token_ids, min_size=2, max_size=4).map(tuple), max_size=3).map(
            tuple
        ),
        allowed_token_ids=st.lists(token_ids, max_size=5).map(tuple),
        thinking=st.none()
        | st.builds(
            ThinkingBudget,
            num_tokens=st.integers(0, 2**31 - 1),
            end_token_id=token_ids,
            begin_token_ids=st.lists(token_ids, max_size=4).map(tuple),
        ),
    ),
)


@settings(max_examples=everyday(40, of=100))
@given(
    sampling_params,
    st.lists(token_ids, min_size=1, max_size=50),
    st.integers(1, 10**9),
    st.integers(-1000, 1000),
)
def test_requests_survive_the_wire(
    sampling: SamplingParams, prompt: list[int], deadline_ms: int, priority: int
) -> None:
    request = GenerationRequest(
        id=AttemptId("req-1", 2),
        prompt_token_ids=tuple(prompt),
        sampling=sampling,
        deadline_s=deadline_ms / 1000,
        priority=priority,
    )
    received = request_from_proto(wire(request_to_proto(request)))
    assert received.id == request.id
    assert received.prompt_token_ids == request.prompt_token_ids
    assert received.sampling == request.sampling
    assert received.priority == priority
    assert received.deadline_s == pytest.approx(request.deadline_s, abs=0.0011)


@pytest.mark.parametrize("kind", GrammarKind)
def test_a_grammar_survives_the_wire(kind: GrammarKind) -> None:
    params = SamplingParams(max_tokens=1, grammar=Grammar(kind, 'start: "é" \n', "guided_grammar"))
    assert sampling_from_proto(sampling_to_proto(params)) == params


def test_a_grammar_of_an_unknown_kind_is_refused() -> None:
    message = sampling_to_proto(SamplingParams(max_tokens=1))
    assert sampling_from_proto(message).grammar is None
    message.grammar.kind, message.grammar.text = "ebnf", "a"
    with pytest.raises(InvalidRequest, match="'ebnf': wanted json_schema, regex, lark"):
        sampling_from_proto(message)
    message.grammar.kind = "lark"
    message.grammar.text = ""
    with pytest.raises(InvalidRequest, match="has 0 bytes"):
        sampling_from_proto(message)


def test_logprobs_of_none_differ_from_logprobs_of_0() -> None:
    for logprobs in (None, 0, 5):
        params = SamplingParams(max_tokens=1, logprobs=logprobs)
        assert sampling_from_proto(sampling_to_proto(params)).logprobs == logprobs


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"request_id": ""}, "request_id has 0 characters"),
        ({"request_id": "x" * 129}, "request_id has 129 characters"),
        ({"attempt": 0}, "attempt is 0"),
        ({"prompt_token_ids": []}, "prompt is empty"),
        ({"deadline_ms": 0}, "deadline_ms is 0"),
        ({"priority": 1001}, "priority is 1001: wanted -1000 to 1000"),
        ({"priority": -(2**31)}, "priority is -2147483648"),
        ({"sampling": pb.SamplingParams()}, "max_tokens is 0"),
        ({"sampling": pb.SamplingParams(max_tokens=1)}, "top_p is 0"),
        ({"sampling": pb.SamplingParams(max_tokens=1, top_p=float("nan"))}, "top_p is nan"),
    ],
)
def test_a_malformed_request_is_named(change: dict[str, object], text: str) -> None:
    fields: dict[str, object] = {
        "request_id": "req-1",
        "attempt": 1,
        "prompt_token_ids": [1],
        "deadline_ms": 5,
        "sampling": sampling_to_proto(SamplingParams(max_tokens=1)),
    }
    request_from_proto(pb.GenerationRequest(**fields))  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=text):
        request_from_proto(pb.GenerationRequest(**(fields | change)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("prompt", "sampling"),
    [
        ((2**32,), SamplingParams(max_tokens=1)),
        ((-1,), SamplingParams(max_tokens=1)),
        ((1,), SamplingParams(max_tokens=2**32)),
        ((1,), SamplingParams(max_tokens=1, top_k=2**32)),
        ((1,), SamplingParams(max_tokens=1, stop_token_ids=(-5,))),
    ],
)
def test_numbers_that_do_not_fit_the_wire_are_refused(
    prompt: tuple[int, ...], sampling: SamplingParams
) -> None:
    request = GenerationRequest(
        id=AttemptId("req-1", 1), prompt_token_ids=prompt, sampling=sampling, deadline_s=1.0
    )
    with pytest.raises(InvalidRequest, match="fit the wire"):
        request_to_proto(request)


def test_a_request_can_be_written_into_its_place_in_a_larger_message() -> None:
    request = GenerationRequest(
        id=AttemptId("req-1", 2),
        prompt_token_ids=(1, 2),
        sampling=SamplingParams(max_tokens=3),
        deadline_s=1.0,
        priority=-4,
        output_token_ids=(3,),
        traceparent="00-trace",
        cache_salt="salt",
    )
    call = pb.Call()
    request_to_proto(request, call.reserve.request)
    written = pb.GenerationRequest(
        request_id="req-1",
        attempt=2,
        prompt_token_ids=[1, 2],
        sampling=sampling_to_proto(request.sampling),
        deadline_ms=1000,
        priority=-4,
        output_token_ids=[3],
        traceparent="00-trace",
        cache_salt="salt",
    )
    assert call == pb.Call(reserve=pb.ReserveRequest(request=written))
    assert request_to_proto(request) == written


@settings(max_examples=everyday(40, of=100))
@given(st.lists(st.builds(AttemptId, st.text(min_size=1, max_size=9), st.integers(1, 2**32 - 1))))
def test_attempts_survive_the_wire(attempts: list[AttemptId]) -> None:
    assert attempts_from_proto(
        pb.Attempts.FromString(attempts_to_proto(attempts).SerializeToString())
    ) == tuple(attempts)


@pytest.mark.parametrize(
    "message",
    [
        pb.Attempts(request_ids=[""], attempts=[1]),
        pb.Attempts(request_ids=["a"], attempts=[0]),
        pb.Attempts(request_ids=["a", "b"], attempts=[1]),
    ],
)
def test_malformed_attempts_are_refused(message: pb.Attempts) -> None:
    with pytest.raises(InvalidRequest):
        attempts_from_proto(message)


def test_an_envelope_names_its_sender() -> None:
    assert check_envelope(make_envelope(ROUTER, NODE), NODE) == ROUTER


@pytest.mark.covers("F01", "F63", "F118")
@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"protocol_version": 1}, PeerProtocolError, "version is 1: wanted 2 or 3"),
        ({"protocol_version": 0}, PeerProtocolError, "version is 0"),
        ({"protocol_version": 4}, PeerProtocolError, "version is 4"),
        ({"sender_id": ""}, PeerProtocolError, "sender_id"),
        ({"sender_id": "x" * 129}, PeerProtocolError, "sender_id"),
        ({"receiver_epoch": 8}, StaleEpoch, "for decode-0#8, this is decode-0#9"),
        ({"receiver_epoch": 10}, StaleEpoch, "decode-0#10"),
        ({"receiver_id": "decode-1"}, StaleEpoch, "decode-1#9"),
    ],
)
def test_an_envelope_for_somebody_else_is_refused(
    change: dict[str, object], error: type[PdserveError], text: str
) -> None:
    envelope = make_envelope(ROUTER, NODE)
    assert envelope.protocol_version == PROTOCOL_VERSION == 3
    for name, value in change.items():
        setattr(envelope, name, value)
    with pytest.raises(error, match=text):
        check_envelope(envelope, NODE)
    with pytest.raises(PeerProtocolError):
        check_envelope(pb.Envelope(), NODE)


def test_refusals_keep_type_text_and_time() -> None:
    full = refusal_to_proto(Overloaded("no seat", retry_after_s=1.5), free_blocks=3, free_seats=0)
    assert (full.free_blocks, full.free_seats) == (3, 0)
    error = refusal_to_error(full)
    assert isinstance(error, Overloaded)
    assert (str(error), error.retry_after_s) == ("no seat", 1.5)
    shed = refusal_to_error(refusal_to_proto(DeadlineUnreachable("late", retry_after_s=2.5)))
    assert isinstance(shed, DeadlineUnreachable)
    assert (str(shed), shed.retry_after_s) == ("late", 2.5)
    assert type(refusal_to_error(refusal_to_proto(StaleEpoch("old")))) is StaleEpoch
    assert type(refusal_to_error(pb.Refusal(code="?"))) is InternalError
    assert len(refusal_to_proto(InternalError("x" * 5000)).message) == 1000


@pytest.mark.covers("F70")
@pytest.mark.parametrize(
    ("span_s", "ms"),
    [(0.0, 1), (-1.0, 1), (0.0001, 1), (1.0, 1000), (1.0001, 1001), (1e12, 2**32 - 1)],
)
def test_spans_are_rounded_up_and_bounded(span_s: float, ms: int) -> None:
    assert to_ms(span_s) == ms
    assert to_ms(float("nan")) == to_ms(float("inf")) == 2**32 - 1


@pytest.mark.parametrize(
    ("error", "status", "comes_back_as"),
    [
        (StaleEpoch("x"), grpc.StatusCode.FAILED_PRECONDITION, StaleEpoch),
        (InvalidRequest("x"), grpc.StatusCode.INVALID_ARGUMENT, InvalidRequest),
        (Overloaded("x"), grpc.StatusCode.RESOURCE_EXHAUSTED, Overloaded),
        (DeadlineExceeded("x"), grpc.StatusCode.DEADLINE_EXCEEDED, DeadlineExceeded),
        (NodeLost("x"), grpc.StatusCode.UNAVAILABLE, NodeLost),
        (PeerProtocolError("x"), grpc.StatusCode.FAILED_PRECONDITION, StaleEpoch),
        (LayoutMismatch("x"), grpc.StatusCode.ABORTED, NodeLost),
        (HandoffFailed("x"), grpc.StatusCode.ABORTED, NodeLost),
        (InternalError("x"), grpc.StatusCode.INTERNAL, InternalError),
    ],
)
def test_errors_as_statuses(
    error: PdserveError, status: grpc.StatusCode, comes_back_as: type[PdserveError]
) -> None:
    assert status_of(error) is status
    assert type(error_of(status, "x")) is comes_back_as


def test_a_server_without_the_service_breaks_the_protocol() -> None:
    assert type(error_of(grpc.StatusCode.UNIMPLEMENTED, "x")) is PeerProtocolError
    assert type(error_of(grpc.StatusCode.UNKNOWN, "x")) is InternalError


def test_a_source_comes_through_with_what_it_has_to_do() -> None:
    for source in (PrefixSource(NODE, 640), PrefixSource(NODE, 640, 64, 4096)):
        assert source_from_proto(source_to_proto(source)) == source
    earlier = pb.PrefixSource(node_id="decode-0", epoch=9, num_tokens=640)
    assert source_from_proto(earlier) == PrefixSource(NODE, 640, num_queued_tokens=0)


def test_a_single_first_token_of_thinking_is_on_the_wire_as_in_earlier_releases() -> None:
    """Their field 3 is one number, and not a list."""
    assert pb.ThinkingBudget(begin_token_ids=[5]).SerializeToString() == b"\x18\x05"
