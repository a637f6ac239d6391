"""The transitions of a request flow, one by one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from common.errors import (
    DeadlineExceeded,
    DeadlineUnreachable,
    HandoffFailed,
    InternalError,
    InvalidRequest,
    NodeLost,
    Overloaded,
    PdserveError,
    PeerProtocolError,
    PoolExhausted,
    StaleEpoch,
)
from common.ids import AttemptId, Incarnation
from common.kv.prefix_source import PrefixSource
from common.kv.prompt_blocks import PromptBlocks
from common.request import FinishReason, RequestCounts, RequestOutput, SamplingParams, TokenLogprobs
from router.core.attempts import State
from router.core.effects import (
    Accepted,
    Choose,
    Finish,
    LegClosed,
    PlaceRecord,
    PromptKept,
    SendAbort,
    SendPrefill,
    SendReserve,
    Unplace,
)
from router.core.generation import TokenChunk
from router.core.request_flow import DecodeGrant, PrefillGrant, RequestFlow
from tests.support.nodes.node_outputs import node_output
from tests.unit.router.core.flow_events import (
    D0,
    D1,
    FIRST,
    LOCAL,
    P0,
    P1,
    SECOND,
    TICKET,
    aborts,
    emitted,
    failure,
    new_flow,
    output,
    prefilling,
    reserving,
    running,
)


@pytest.mark.covers("F84")
def test_the_requests_carry_what_is_left_of_the_deadline() -> None:
    flow = new_flow()
    (reserve,) = flow.on_choice(D0, P0, "why", 10.0)
    assert isinstance(reserve, SendReserve)
    assert (reserve.request.id, reserve.request.deadline_s) == (FIRST, 50.0)
    prefill, place = flow.on_reserve_reply(D0, FIRST, TICKET, 12.0)
    assert isinstance(prefill, SendPrefill)
    assert (prefill.node, prefill.ticket, prefill.request.deadline_s) == (P0, "ticket", 48.0)
    assert place == PlaceRecord(FIRST, D0, P0, "why")


def test_a_prefill_node_that_ends_without_token_0_fails_its_attempt() -> None:
    flow = running(first_token=False)
    assert emitted(flow.on_output(D0, output(FIRST, 1, 11, 12))) == []
    effects = flow.on_output(P0, output(FIRST, 0, finish=FinishReason.STOP))
    assert emitted(effects) == []
    assert effects[-1] == Choose(None, frozenset({P0}))


def test_the_requests_carry_their_priority() -> None:
    flow = RequestFlow(
        "r", PromptBlocks((1,)), SamplingParams(max_tokens=2), deadline_at_s=9.0, priority=-7
    )
    flow.start()
    (reserve,) = flow.on_choice(D0, P0, "why", 0.0)
    assert isinstance(reserve, SendReserve)
    prefill, _ = flow.on_reserve_reply(D0, AttemptId("r", 1), TICKET, 0.0)
    assert isinstance(prefill, SendPrefill)
    assert reserve.request.priority == prefill.request.priority == -7


def test_drafts_of_a_lost_attempt_count_as_rejected() -> None:
    flow = prefilling()
    ahead = node_output(
        attempt=FIRST, first_index=1, token_ids=(11, 12, 13), num_drafted=5, num_accepted=2
    )
    assert flow.on_output(D0, ahead) == []
    flow.on_node_lost(D0)
    flow.on_choice(D1, None, "again", 0.0)
    last = node_output(
        attempt=SECOND,
        token_ids=(10, 11, 12),
        num_drafted=3,
        num_accepted=1,
        finish_reason=FinishReason.STOP,
    )
    (emit,) = [e for e in flow.on_output(D1, last) if isinstance(e, TokenChunk)]
    assert emit.counts == RequestCounts(0, 8, 1)


def test_token_0_and_several_tokens_behind_it_leave_as_one_chunk() -> None:
    # Each index once, whichever node is faster, and whatever arrives twice.
    flow = prefilling()
    flow.on_output(D0, output(FIRST, 1, 11, 12, 13, is_started=True))
    assert flow.on_output(D0, output(FIRST, 2, 12, 13)) == []
    effects = flow.on_output(P0, output(FIRST, 0, 10))
    assert emitted(effects) == [10, 11, 12, 13]
    assert emitted(flow.on_output(D0, output(FIRST, 3, 13, 14, 15))) == [14, 15]
    effects = flow.on_output(D0, output(FIRST, 6, 16, 17, finish=FinishReason.LENGTH))
    assert emitted(effects) == [16, 17]
    assert effects[-1] == Finish(FinishReason.LENGTH)


def test_a_deadline_that_passed_meanwhile_is_sent_as_the_shortest_one() -> None:
    flow = new_flow()
    (reserve,) = flow.on_choice(D0, P0, "why", 61.0)
    assert isinstance(reserve, SendReserve)
    assert 0 < reserve.request.deadline_s <= 0.001


def test_tokens_that_run_ahead_of_token_0_are_held_back() -> None:
    flow = prefilling()
    assert flow.on_output(D0, output(FIRST, 1, 11, 12, is_started=True)) == []
    effects = flow.on_output(P0, output(FIRST, 0, 10))
    assert emitted(effects) == [10, 11, 12]
    assert LegClosed(P0, has_prompt=True) in effects


@pytest.mark.covers("F44")
def test_duplicates_are_dropped_and_the_first_arrival_counts() -> None:
    flow = running()
    assert emitted(flow.on_output(D0, output(FIRST, 1, 11, 12))) == [11, 12]
    assert emitted(flow.on_output(D0, output(FIRST, 1, 11, 12, 13))) == [13]
    assert flow.on_output(D0, output(FIRST, 0, 99)) == []


@pytest.mark.covers("T01")
def test_a_cached_prefix_is_reported_from_the_first_chunk_on() -> None:
    (emit,) = prefilling().on_output(P0, output(FIRST, 0, 10))
    assert isinstance(emit, TokenChunk)
    assert emit.counts == RequestCounts(64)


def test_a_finish_that_arrives_before_token_0_waits_for_it() -> None:
    flow = running(first_token=False)
    done = output(FIRST, 1, 11, finish=FinishReason.STOP)
    assert flow.on_output(D0, done) == [LegClosed(D0)]
    assert not flow.is_done
    effects = flow.on_output(P0, output(FIRST, 0, 10))
    assert emitted(effects) == [10, 11]
    assert effects[-2:] == [Unplace(FIRST), Finish(FinishReason.STOP)]
    assert aborts(effects) == set()


def test_a_finish_without_tokens_ends_what_came_before() -> None:
    flow = running()
    flow.on_output(D0, output(FIRST, 1, 11))
    effects = flow.on_output(D0, output(FIRST, 0, finish=FinishReason.LENGTH))
    (emit,) = [effect for effect in effects if isinstance(effect, TokenChunk)]
    assert (emit.token_ids, emit.first_index) == ((), 2)
    assert emit.finish_reason is FinishReason.LENGTH
    assert effects[-1] == Finish(FinishReason.LENGTH)


@pytest.mark.covers("F39")
def test_a_first_token_that_ends_the_answer_aborts_the_reservation() -> None:
    effects = prefilling().on_output(P0, output(FIRST, 0, 10, finish=FinishReason.STOP))
    assert emitted(effects) == [10]
    assert aborts(effects) == {(D0, FIRST)}
    assert effects[-1] == Finish(FinishReason.STOP)


@pytest.mark.covers("F40")
def test_one_token_goes_straight_to_prefill() -> None:
    flow = new_flow(max_tokens=1)
    prefill, place = flow.on_choice(None, P0, "one", 0.0)
    assert isinstance(prefill, SendPrefill)
    assert prefill.ticket is None
    assert place == PlaceRecord(FIRST, None, P0, "one")
    effects = flow.on_output(P0, output(FIRST, 0, 10, finish=FinishReason.LENGTH))
    assert effects[-1] == Finish(FinishReason.LENGTH)
    assert aborts(effects) == set()


def test_one_token_that_does_not_end_without_a_handoff_is_a_broken_peer() -> None:
    flow = new_flow(max_tokens=1)
    flow.on_choice(None, P0, "one", 0.0)
    effects = flow.on_output(P0, output(FIRST, 0, 10))
    assert (P0, FIRST) in aborts(effects)
    assert effects[-1] == Choose(None, frozenset({P0}))


def test_a_local_start_streams_from_token_0() -> None:
    flow = reserving(prefill=None)
    started = flow.on_reserve_reply(D0, FIRST, LOCAL, 0.0)
    assert started == [PlaceRecord(FIRST, D0, None, "why"), Accepted()]
    assert flow.state is State.LOCAL
    assert emitted(flow.on_output(D0, output(FIRST, 0, 10, 11, is_started=True))) == [10, 11]


def test_a_decode_node_may_choose_to_prefill_locally() -> None:
    flow = reserving()
    assert flow.on_reserve_reply(D0, FIRST, LOCAL, 0.0) == [
        LegClosed(P0, has_prompt=True),
        PromptKept(D0),
        PlaceRecord(FIRST, D0, None, "why"),
        Accepted(),
    ]


def test_outputs_may_overtake_the_reply() -> None:
    flow = reserving(prefill=None)
    assert emitted(flow.on_output(D0, output(FIRST, 0, 10, is_started=True))) == [10]
    assert flow.on_reserve_reply(D0, FIRST, LOCAL, 0.0) == [PlaceRecord(FIRST, D0, None, "why")]
    effects = flow.on_output(D0, output(FIRST, 1, 11, finish=FinishReason.STOP))
    assert effects[-1] == Finish(FinishReason.STOP)


def test_a_refused_reservation_goes_to_each_candidate() -> None:
    flow = reserving()
    full = Overloaded("full", retry_after_s=4.0)
    assert flow.on_reserve_reply(D0, FIRST, full, 0.0) == [
        LegClosed(D0),
        LegClosed(P0, has_prompt=True),
        Choose(None, frozenset({D0})),
    ]
    flow.on_choice(D1, P0, "next", 0.0)
    assert flow.attempt == FIRST, "a refusal holds nothing: the attempt goes on"
    fuller = Overloaded("full", retry_after_s=2.0)
    effects = flow.on_reserve_reply(D1, FIRST, fuller, 0.0)
    assert effects[-1] == Choose(None, frozenset({D0, D1}))


@pytest.mark.covers("F85")
@pytest.mark.parametrize("error", [InvalidRequest("top_k"), DeadlineExceeded("late")])
def test_a_refusal_that_is_the_callers_fault_ends_at_once(error: PdserveError) -> None:
    """Nobody else is asked, nobody is blamed."""
    assert failure(reserving().on_reserve_reply(D0, FIRST, error, 0.0)) is error
    effects = prefilling().on_prefill_reply(P0, FIRST, error)
    assert failure(effects) is error
    assert aborts(effects) == {(D0, FIRST)}


def test_a_refused_prefill_goes_to_the_next_prefill_node_with_the_same_ticket() -> None:
    flow = prefilling()
    assert flow.on_prefill_reply(P0, FIRST, Overloaded("full")) == [
        LegClosed(P0, has_prompt=True),
        Choose(D0, frozenset({P0})),
    ]
    prefill, place = flow.on_choice(D0, P1, "next", 0.0)
    assert isinstance(prefill, SendPrefill)
    assert (prefill.node, prefill.ticket, prefill.request.id) == (P1, "ticket", FIRST)
    assert place == PlaceRecord(FIRST, D0, P1, "why")


def test_without_another_prefill_node_the_decode_node_prefills_in_a_new_attempt() -> None:
    flow = prefilling()
    flow.on_prefill_reply(P0, FIRST, Overloaded("full"))
    effects = flow.on_choice(D0, None, "none left", 0.0)
    assert aborts(effects) == {(D0, FIRST)}
    assert Unplace(FIRST) in effects
    (reserve,) = [effect for effect in effects if isinstance(effect, SendReserve)]
    assert (reserve.node, reserve.must_prefill_locally) == (D0, True)
    assert reserve.request.id == SECOND


@pytest.mark.covers("F86")
def test_a_failed_prefill_call_fences_the_attempt() -> None:
    """Nobody knows whether the first node writes: its ticket goes to no second one."""
    flow = prefilling()
    effects = flow.on_call_failed(P0, FIRST, NodeLost("timeout"))
    assert aborts(effects) == {(D0, FIRST), (P0, FIRST)}
    assert effects[-1] == Choose(None, frozenset({P0}))
    assert flow.attempt == SECOND


def test_a_failed_prefill_call_after_its_token_arrived_changes_nothing() -> None:
    flow = prefilling()
    flow.on_output(P0, output(FIRST, 0, 10))
    assert flow.on_call_failed(P0, FIRST, NodeLost("timeout")) == []


@pytest.mark.parametrize("make", [reserving, prefilling])
def test_a_call_that_took_all_the_time_there_was_ends_by_the_deadline(
    make: Callable[[], RequestFlow],
) -> None:
    flow = make()
    node = D0 if flow.state is State.RESERVING else P0
    effects = flow.on_call_failed(node, FIRST, DeadlineExceeded("no answer"))
    assert isinstance(failure(effects), DeadlineExceeded)
    assert (node, FIRST) in aborts(effects)
    assert flow.is_done


def test_a_call_refused_by_status_is_a_refusal() -> None:
    flow = reserving()
    effects = flow.on_call_failed(D0, FIRST, StaleEpoch("another life"))
    assert effects == [LegClosed(D0), LegClosed(P0, has_prompt=True), Choose(None, frozenset({D0}))]
    assert flow.attempt == FIRST


def test_a_request_whose_deadline_no_node_can_meet_is_shed_and_waits_nowhere() -> None:
    flow = reserving()
    late = DeadlineUnreachable("late", retry_after_s=4.0)
    flow.on_reserve_reply(D0, FIRST, late, 0.0)
    flow.on_choice(D1, P0, "next", 0.0)
    flow.on_reserve_reply(D1, FIRST, DeadlineUnreachable("later", retry_after_s=7.0), 0.0)
    error = failure(flow.on_no_choice(Overloaded("nobody")))
    assert isinstance(error, DeadlineUnreachable)
    assert error.retry_after_s == 4.0
    assert "later" in str(error)


def test_a_node_that_is_only_full_may_queue_what_another_one_shed() -> None:
    flow = reserving()
    flow.on_reserve_reply(D0, FIRST, DeadlineUnreachable("late"), 0.0)
    flow.on_choice(D1, P0, "next", 0.0)
    flow.on_reserve_reply(D1, FIRST, Overloaded("full"), 0.0)
    assert flow.on_no_choice(Overloaded("nobody")) == [Choose(None, frozenset({D0}))]


def test_when_nobody_is_left_after_a_failed_handoff_the_failure_is_the_answer() -> None:
    flow = reserving()
    flow.on_call_failed(D0, FIRST, HandoffFailed("no route"))
    assert isinstance(failure(flow.on_no_choice(Overloaded("nobody"))), HandoffFailed)


@pytest.mark.parametrize("node", [P0, D0])
def test_a_lost_node_before_any_token_starts_another_attempt(node: Incarnation) -> None:
    flow = prefilling()
    effects = flow.on_node_lost(node)
    assert aborts(effects) == {(D0, FIRST), (P0, FIRST)}
    assert Unplace(FIRST) in effects
    assert effects[-1] == Choose(None, frozenset({node}))


@pytest.mark.covers("F87")
@pytest.mark.parametrize("node", [P0, D0])
def test_a_lost_node_after_a_token_is_continued_behind_it(node: Incarnation) -> None:
    flow = prefilling()
    flow.on_output(P0, output(FIRST, 0, 10))
    effects = flow.on_node_lost(node)
    assert aborts(effects) == {(D0, FIRST), (P0, FIRST)}
    assert effects[-1] == Choose(None, frozenset({node}))
    (reserve,) = flow.on_choice(D1, P1, "again", 0.0)
    assert isinstance(reserve, SendReserve)
    assert reserve.request.output_token_ids == (10,)
    flow.on_reserve_reply(D1, SECOND, LOCAL, 0.0)
    assert emitted(flow.on_output(D1, output(SECOND, 1, 11, 12))) == [11, 12]


def test_the_prefill_node_does_not_matter_once_decode_started() -> None:
    assert running().on_node_lost(P0) == []


def test_the_prefill_node_matters_until_token_0_is_here() -> None:
    flow = running(first_token=False)
    flow.on_output(D0, output(FIRST, 1, 11, 12))
    effects = flow.on_node_lost(P0)
    assert aborts(effects) == {(D0, FIRST), (P0, FIRST)}
    flow.on_choice(D1, None, "again", 0.0)
    flow.on_reserve_reply(D1, SECOND, LOCAL, 0.0)
    assert flow.on_output(D0, output(FIRST, 3, 13)) == []
    assert emitted(flow.on_output(D1, output(SECOND, 0, 20, 21))) == [20, 21]


@pytest.mark.covers("F85")
@pytest.mark.parametrize(
    ("error", "is_retried"),
    [
        (NodeLost("x"), True),
        (HandoffFailed("x"), True),
        (StaleEpoch("x"), True),
        (InternalError("x"), False),
        (InvalidRequest("x"), False),
        (DeadlineExceeded("x"), False),
    ],
)
def test_an_error_output_before_any_token(error: PdserveError, is_retried: bool) -> None:
    flow = prefilling()
    effects = flow.on_output(D0, output(FIRST, 0, error=error))
    assert (D0, FIRST) not in aborts(effects), "it ended by itself"
    assert (P0, FIRST) in aborts(effects)
    if is_retried:
        assert effects[-1] == Choose(None, frozenset({P0})), "another pair, or decode alone"
    else:
        assert type(failure(effects)) is type(error)


def test_a_node_that_is_too_small_for_the_answer_is_not_asked_again() -> None:
    effects = prefilling().on_output(D0, output(FIRST, 0, error=PoolExhausted("4 blocks")))
    assert effects[-1] == Choose(None, frozenset({D0})), "the prefill node did its part"
    error = failure(running().on_output(D0, output(FIRST, 0, error=PoolExhausted("4 blocks"))))
    assert isinstance(error, PoolExhausted)


@pytest.mark.parametrize("node", [D0, P0])
def test_a_node_that_has_no_room_after_all_is_not_asked_again(node: Incarnation) -> None:
    """As for the grammar of a prompt that it has taken."""
    flow = prefilling()
    effects = flow.on_output(node, output(FIRST, 0, error=Overloaded("grammars take 192 MiB")))
    other = P0 if node == D0 else D0
    assert (node, FIRST) not in aborts(effects), "it ended by itself"
    assert (other, FIRST) in aborts(effects)
    assert effects[-1] == Choose(None, frozenset({node}))
    error = failure(flow.on_no_choice(Overloaded("nobody", retry_after_s=9.0)))
    assert isinstance(error, Overloaded), "a new request does not wait for room"
    assert str(error) == f"nobody; {node} said last: grammars take 192 MiB"


def test_an_error_output_after_a_token_is_final() -> None:
    flow = running()
    error = failure(flow.on_output(D0, output(FIRST, 0, error=PeerProtocolError("checksum"))))
    assert isinstance(error, PeerProtocolError)
    assert str(error) == "checksum"


def test_an_abort_that_nobody_asked_for_is_a_lost_node() -> None:
    flow = running()
    effects = flow.on_output(D0, output(FIRST, 0, finish=FinishReason.ABORT))
    assert effects[-1] == Choose(None, frozenset({D0}))
    assert isinstance(flow.failure, NodeLost)


@pytest.mark.covers("F58")
def test_a_client_that_goes_away_aborts_every_leg() -> None:
    effects = prefilling().on_client_gone()
    assert aborts(effects) == {(D0, FIRST), (P0, FIRST)}
    assert effects[-2:] == [Unplace(FIRST), Finish(FinishReason.ABORT)]


def test_the_deadline_is_one_for_the_whole_request() -> None:
    flow = prefilling()
    assert flow.on_time(59.999) == []
    effects = flow.on_time(60.0)
    assert isinstance(failure(effects), DeadlineExceeded)
    assert aborts(effects) == {(D0, FIRST), (P0, FIRST)}


def test_nothing_happens_after_the_end() -> None:
    flow = running()
    flow.on_client_gone()
    assert flow.on_client_gone() == []
    assert flow.on_time(1e9) == []
    assert flow.on_node_lost(D0) == []
    assert flow.on_output(D0, output(FIRST, 1, 11)) == []
    assert flow.on_choice(D0, P0, "late", 0.0) == []
    assert flow.on_no_choice(Overloaded("late")) == []
    assert flow.on_failure(InternalError("late")) == []


@pytest.mark.covers("F12")
def test_a_grant_that_comes_too_late_is_given_back() -> None:
    flow = reserving()
    flow.on_client_gone()
    assert flow.on_reserve_reply(D0, FIRST, TICKET, 0.0) == [SendAbort(D0, FIRST)]
    flow = prefilling()
    flow.on_client_gone()
    assert flow.on_prefill_reply(P0, FIRST, PrefillGrant()) == [SendAbort(P0, FIRST)]
    assert flow.on_prefill_reply(P0, FIRST, Overloaded("full")) == []


def source_named(
    num_tokens: int, num_on_decode: int, named: Incarnation = P1
) -> PrefixSource | None:
    """The source that the prefill node hears of; without tokens none is known."""
    flow = new_flow()
    source = PrefixSource(named, num_tokens, num_queued_tokens=9) if num_tokens else None
    flow.on_choice(D0, P0, "why", 10.0, source)
    effects = flow.on_reserve_reply(D0, FIRST, DecodeGrant("ticket", num_on_decode), 11.0)
    (asked,) = [effect for effect in effects if isinstance(effect, SendPrefill)]
    return asked.source


def test_a_prefill_node_hears_which_node_has_most_of_the_prompt() -> None:
    assert source_named(128, 64) == PrefixSource(P1, 128, num_queued_tokens=9)
    assert source_named(64, 64) == PrefixSource(D0, 64), "KV travels between these two anyway"
    assert source_named(64, 128) == PrefixSource(D0, 128), "more than it has reported so far"
    assert source_named(64, 128, D0) == PrefixSource(D0, 128, num_queued_tokens=9)
    assert source_named(0, 64) == PrefixSource(D0, 64)
    assert source_named(0, 0) is None


def test_another_prefill_node_hears_of_its_own_source() -> None:
    flow = new_flow()
    flow.on_choice(D0, P0, "why", 10.0, PrefixSource(P1, 128))
    flow.on_reserve_reply(D0, FIRST, TICKET, 11.0)
    flow.on_prefill_reply(P0, FIRST, Overloaded("full"))
    effects = flow.on_choice(D0, P1, "next", 12.0, PrefixSource(P0, 192))
    (asked,) = [effect for effect in effects if isinstance(effect, SendPrefill)]
    assert (asked.node, asked.source) == (P1, PrefixSource(P0, 192))


def test_a_prompt_for_one_token_can_be_pulled_too() -> None:
    alone = new_flow(max_tokens=1)
    effects = alone.on_choice(None, P0, "one token", 10.0, PrefixSource(P1, 128))
    (asked,) = [effect for effect in effects if isinstance(effect, SendPrefill)]
    assert asked.source == PrefixSource(P1, 128)


def test_an_acceptance_that_comes_after_the_work_is_no_news() -> None:
    assert running().on_prefill_reply(P0, FIRST, PrefillGrant()) == []


@pytest.mark.parametrize(
    ("node", "wrong"),
    [
        (D0, output(FIRST, 8, 1)),  # beyond max_tokens
        (D0, output(FIRST, 3, 1, finish=FinishReason.STOP)),  # ends with a gap
        (P0, output(FIRST, 1, 1)),  # prefill sends token 0 alone
        (P0, output(FIRST, 0, finish=FinishReason.STOP)),  # an empty answer
    ],
)
def test_what_no_node_may_send_fences_that_node(node: Incarnation, wrong: RequestOutput) -> None:
    flow = prefilling()
    effects = flow.on_output(node, wrong)
    assert aborts(effects) == {(D0, FIRST), (P0, FIRST)}
    assert effects[-1] == Choose(None, frozenset({node}))


def test_a_ticket_for_a_request_that_must_be_local_is_a_broken_peer() -> None:
    effects = reserving(prefill=None).on_reserve_reply(D0, FIRST, TICKET, 0.0)
    assert aborts(effects) == {(D0, FIRST)}
    assert effects[-1] == Choose(None, frozenset({D0}))


def test_missing_logprobs_are_a_broken_peer_and_surplus_ones_are_dropped() -> None:
    flow = new_flow(logprobs=0)
    flow.on_choice(D0, None, "why", 0.0)
    effects = flow.on_output(D0, output(FIRST, 0, 10))
    assert effects[-1] == Choose(None, frozenset({D0}))

    flow = reserving(prefill=None)
    with_logprobs = node_output(attempt=FIRST, token_ids=(10,), logprobs=(TokenLogprobs(-0.5),))
    _, emit = flow.on_output(D0, with_logprobs)
    assert isinstance(emit, TokenChunk)
    assert emit.logprobs == ()


def test_logprobs_stay_with_their_tokens() -> None:
    flow = new_flow(logprobs=2)
    flow.on_choice(D0, P0, "why", 0.0)
    flow.on_reserve_reply(D0, FIRST, TICKET, 0.0)
    later = (TokenLogprobs(-1.0), TokenLogprobs(-2.0))
    flow.on_output(D0, node_output(FIRST, 1, (11, 12), logprobs=later))
    first = (TokenLogprobs(-0.5, ((10, -0.5),)),)
    effects = flow.on_output(P0, node_output(attempt=FIRST, token_ids=(10,), logprobs=first))
    (emit,) = [effect for effect in effects if isinstance(effect, TokenChunk)]
    assert emit.logprobs == (*first, *later)


def test_outputs_of_other_nodes_and_attempts_are_ignored() -> None:
    flow = prefilling()
    assert flow.on_output(D1, output(FIRST, 0, 10)) == []
    assert flow.on_output(D0, output(SECOND, 0, 10)) == []
    assert flow.on_output(D0, output(AttemptId("other", 1), 0, 10)) == []
    assert flow.on_node_lost(D1) == []
    assert flow.on_reserve_reply(D1, FIRST, TICKET, 0.0) == []


def test_decode_far_ahead_of_a_missing_first_token_is_a_failure() -> None:
    sampling = SamplingParams(max_tokens=100_000)
    flow = RequestFlow("req", PromptBlocks((1,)), sampling, deadline_at_s=60.0)
    flow.start()
    flow.on_choice(D0, P0, "why", 0.0)
    flow.on_reserve_reply(D0, FIRST, TICKET, 0.0)
    assert flow.on_output(D0, output(FIRST, 1, *range(4096))) == []
    effects = flow.on_output(D0, output(FIRST, 4097, 1))
    assert aborts(effects) == {(D0, FIRST), (P0, FIRST)}


def test_a_node_that_refuses_after_it_answered_is_a_broken_peer() -> None:
    flow = prefilling()
    flow.on_output(P0, output(FIRST, 0, 10))
    error = failure(flow.on_prefill_reply(P0, FIRST, Overloaded("full")))
    assert isinstance(error, PeerProtocolError)


def test_what_started_in_an_old_attempt_is_not_started_in_the_new_one() -> None:
    flow = running(first_token=False)
    flow.on_node_lost(P0)
    flow.on_choice(D1, P1, "again", 0.0)
    flow.on_reserve_reply(D1, SECOND, TICKET, 0.0)
    flow.on_output(P1, output(SECOND, 0, 10))
    assert aborts(flow.on_client_gone()) == {(D1, SECOND), (P1, SECOND)}
