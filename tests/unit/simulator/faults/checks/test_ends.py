"""How requests may end, by what is broken in their histories: what is noticed, and what is not."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import pytest

from common.nodes import Role
from common.prompt_logprobs import PromptLogprobs
from common.request import TokenLogprobs
from simulator.clients import ClientRequest
from simulator.faults.checks.ends import Ends, check_logprobs, check_time
from simulator.faults.checks.violation import Violation
from simulator.faults.contents import STOP_TOKEN_ID, logprobs_of
from simulator.faults.history import AskedRequest, Fault
from simulator.faults.kinds import BREAKING, FaultKind
from simulator.faults.router import Answered
from simulator.faults.shape import Shape
from simulator.trace_file import TraceRequest
from tests.unit.simulator.faults.histories import a_history, a_shape, an_asked_request

PROMPT = (3, 4, 5)
RIGHT = tuple(range(10, 70))
STOPPED = (*RIGHT[:5], STOP_TOKEN_ID)
EVEN = a_shape()
UNEVEN = replace(EVEN, pools=(5, 40, 11))
"""Its nodes hold 16, 156 and 40 tokens: one to prefill and two to decode."""
BY_LOAD = replace(UNEVEN, target_ttft_s=1.0, target_tpot_s=0.1)
TOO_LONG = "invalid_request"
ROLES = {"prefill-0": Role.PREFILL, "decode-0": Role.DECODE, "decode-1": Role.DECODE}


def a_request(**given: Any) -> AskedRequest:
    asked = an_asked_request(2.0, "r1", num_prompt=len(PROMPT), max_tokens=len(RIGHT))
    return replace(asked, **given)


def answered(outcome: str, tokens: Iterable[int] = (), *, at_s: float = 5.0) -> Answered:
    trace = TraceRequest(2.0, len(PROMPT), len(RIGHT))
    found = Answered(ClientRequest(trace, 1, len(RIGHT), 0), 2.0)
    found.outcome, found.ended_at_s = outcome, at_s
    found.tokens = list(tokens)
    return found


def a_fault(kind: FaultKind, at_s: float = 1.0, target: str = "decode-0") -> Fault:
    return Fault(at_s=at_s, kind=kind, target=target, other="router")


def noticed(says: str, *, is_fine: bool) -> AbstractContextManager[object]:
    return nullcontext() if is_fine else pytest.raises(Violation, match=says)


def check(
    shape: Shape,
    asked: AskedRequest,
    found: Answered,
    *faults: Fault,
    right: tuple[int, ...] = RIGHT,
) -> None:
    Ends(a_history(shape, [asked], *faults)).check(asked, found, right)


@pytest.mark.parametrize(
    ("outcome", "tokens", "right"),
    [("length", RIGHT, RIGHT), ("stop", STOPPED, STOPPED)],
)
def test_a_right_answer_is_right(outcome: str, tokens: Any, right: Any) -> None:
    check(EVEN, a_request(), answered(outcome, tokens), right=right)


@pytest.mark.parametrize(
    ("outcome", "tokens", "right", "says"),
    [
        ("length", (*RIGHT[:2], 0), RIGHT, "r1 was answered"),
        ("node_lost", (0,), RIGHT, "r1 was answered"),
        ("length", (*RIGHT, 3), RIGHT, "r1 was answered"),
        ("length", RIGHT[:-1], RIGHT, "r1 ends by length after"),
        ("stop", RIGHT[:-1], RIGHT, "r1 ends by stop after"),
        ("stop", RIGHT, RIGHT, "r1 ends by stop after"),
        ("length", STOPPED, STOPPED, "r1 ends by length after"),
        ("", (), RIGHT, "r1 ended by $"),
        ("abort", (), RIGHT, "r1 ended by abort"),
    ],
)
def test_another_answer_is_noticed(outcome: str, tokens: Any, right: Any, says: str) -> None:
    crash = a_fault(FaultKind.CRASH)
    for faults in ((), (crash,)):
        with pytest.raises(Violation, match=says):
            check(EVEN, a_request(), answered(outcome, tokens), *faults, right=right)


def test_a_client_that_leaves_ends_its_request() -> None:
    check(EVEN, a_request(leaves_at_s=3.0), answered("abort", RIGHT[:3]))


def test_an_answer_that_goes_on_as_long_as_nodes_hold_it_may_not_be_shorter() -> None:
    cut = a_request(is_cut=True, max_tokens=len(RIGHT))
    long, short = answered("length", RIGHT[:37]), answered("length", RIGHT[:36])
    decoding = replace(UNEVEN, pools=(5, 11, 11))
    check(decoding, cut, long)
    with pytest.raises(Violation, match="r1 ends by length after"):
        check(decoding, cut, short)
    with pytest.raises(Violation, match="r1 ends by length after"):
        check(decoding, replace(cut, is_cut=False), long)
    with pytest.raises(Violation, match="r1 ends by stop after"):
        check(decoding, cut, answered("stop", long.tokens))


LEAVES = a_fault(FaultKind.DRAIN)


@pytest.mark.parametrize(
    ("shape", "asked", "faults", "is_fine"),
    [
        pytest.param(UNEVEN, {}, (), False, id="still"),
        pytest.param(UNEVEN, {"at_s": 0.5}, (), True, id="before all nodes are heard"),
        pytest.param(BY_LOAD, {}, (), True, id="roles follow the load"),
        pytest.param(
            replace(UNEVEN, target_ttft_s=1.0), {}, (), False, id="roles follow one target: none"
        ),
        pytest.param(UNEVEN, {}, (LEAVES,), True, id="a node leaves"),
        pytest.param(UNEVEN, {}, (a_fault(FaultKind.ROLE),), True, id="a role changes"),
        pytest.param(UNEVEN, {}, (a_fault(FaultKind.CRASH),), True, id="a node is lost"),
        pytest.param(UNEVEN, {}, (a_fault(FaultKind.DISK),), False, id="a disk fails"),
    ],
)
def test_where_nodes_do_not_stay_what_they_are_lengths_are_those_of_any_of_them(
    shape: Shape, asked: dict[str, Any], faults: tuple[Fault, ...], is_fine: bool
) -> None:
    """The shortest node, which prefills, holds 13 tokens behind the prompt, the longest one all."""
    with noticed("r1 ends by length after", is_fine=is_fine):
        check(shape, a_request(is_cut=True, **asked), answered("length", RIGHT[:13]), *faults)
    with noticed("r1 ended by invalid_request", is_fine=is_fine):
        check(shape, a_request(**asked), answered(TOO_LONG), *faults)


def test_a_length_that_no_node_holds_is_refused_and_one_that_all_hold_is_not() -> None:
    long = a_request(max_tokens=160)
    check(UNEVEN, long, answered(TOO_LONG))
    for faults in ((), (LEAVES,), (a_fault(FaultKind.CRASH),)):
        with pytest.raises(Violation, match="r1 ended by invalid_request"):
            check(EVEN, a_request(), answered(TOO_LONG), *faults)


@pytest.mark.parametrize("outcome", ["node_lost", "overloaded"])
def test_a_request_may_end_with_the_only_node_that_is_large_enough(outcome: str) -> None:
    found = answered(outcome, RIGHT[:2])
    check(UNEVEN, a_request(), found, LEAVES)
    check(BY_LOAD, a_request(), found)
    for shape, asked, faults in (
        (UNEVEN, a_request(), ()),
        (UNEVEN, a_request(max_tokens=160), ()),
        (UNEVEN, a_request(max_tokens=13), (LEAVES,)),
        (EVEN, a_request(), (LEAVES,)),
        (EVEN, a_request(), (a_fault(FaultKind.ROLE),)),
    ):
        with pytest.raises(Violation, match=f"r1 ended by {outcome}"):
            check(shape, asked, found, *faults)


CRASH, STEP = a_fault(FaultKind.CRASH), a_fault(FaultKind.STEP)
ALL_LEAVE = (LEAVES, a_fault(FaultKind.DRAIN, target="decode-1"))
LED = replace(EVEN, target_ttft_s=1.0, target_tpot_s=0.1)
FULL, SHEDS = replace(EVEN, max_queued=1), replace(EVEN, sheds=True)


@pytest.mark.parametrize(
    ("outcome", "shape", "grammar", "faults", "is_fine"),
    [
        ("deadline_exceeded", EVEN, "", (), True),
        ("node_lost", EVEN, "", (), False),
        ("node_lost", EVEN, "", (CRASH,), True),
        ("node_lost", EVEN, "", (replace(CRASH, at_s=5.1),), False),
        ("handoff_failed", EVEN, "", (LEAVES,), False),
        ("router_lost", EVEN, "", (), False),
        ("router_lost", EVEN, "", (CRASH,), True),
        ("internal_error", EVEN, "", (CRASH,), False),
        ("internal_error", EVEN, "", (STEP,), True),
        ("internal_error", EVEN, "", (replace(STEP, at_s=5.1), CRASH), False),
        ("overloaded", EVEN, "", (), False),
        ("overloaded", EVEN, "", (LEAVES,), False),
        ("overloaded", EVEN, "", ALL_LEAVE, True),
        ("overloaded", EVEN, "", tuple(replace(one, at_s=5.1) for one in ALL_LEAVE), False),
        ("overloaded", LED, "", (), False),
        ("overloaded", LED, "", (LEAVES,), True),
        ("overloaded", replace(LED, num_mixed=1), "", ALL_LEAVE, False),
        ("overloaded", FULL, "", (), True),
        ("overloaded", SHEDS, "", (), False),
        ("overloaded", EVEN, "late", (), True),
        ("overloaded", EVEN, "slow", (), False),
        ("deadline_unreachable", EVEN, "", (), False),
        ("deadline_unreachable", FULL, "", (), False),
        ("deadline_unreachable", SHEDS, "", (), True),
        (TOO_LONG, EVEN, "refused", (), True),
        (TOO_LONG, EVEN, "late", (), False),
    ],
)
def test_errors_have_their_reasons(
    outcome: str, shape: Shape, grammar: str, faults: tuple[Fault, ...], is_fine: bool
) -> None:
    asked, found = a_request(grammar=grammar), answered(outcome)
    with noticed(f"r1 ended by {outcome}", is_fine=is_fine):
        check(shape, asked, found, *faults)


def test_attempts_fail_by_faults_and_nodes_that_leave_alone() -> None:
    found = answered("length", RIGHT)
    found.failure = "handoff_failed: its peer is gone"
    check(EVEN, a_request(), found, CRASH)
    check(EVEN, a_request(), found, LEAVES)
    for faults in ((), (a_fault(FaultKind.ROLE),), (replace(CRASH, at_s=5.1),)):
        with pytest.raises(Violation, match="an attempt of r1 failed by itself: handoff_failed"):
            check(EVEN, a_request(), found, *faults)


def test_no_token_comes_under_a_grammar_that_is_refused() -> None:
    with pytest.raises(Violation, match="under a grammar that is refused"):
        check(EVEN, a_request(grammar="refused"), answered("length", RIGHT))


def check_late(found: Answered, *faults: Fault, **given: Any) -> None:
    roles, shape = given.pop("roles", ROLES), given.pop("shape", EVEN)
    asked = a_request(deadline_s=200.0, **given)
    Ends(a_history(shape, [asked], *faults)).check_answered(asked, found, roles)


EXCEEDED, UNREACHABLE = answered("deadline_exceeded"), answered("deadline_unreachable")


@pytest.mark.parametrize("kind", BREAKING, ids=lambda kind: kind.value)
def test_what_is_not_late_is_neither_kept_nor_refused_as_late(kind: FaultKind) -> None:
    for late in (EXCEEDED, UNREACHABLE):
        with pytest.raises(Violation, match="r1 waited until its deadline, and nothing was in"):
            check_late(late, a_fault(kind))


PREFILLING = dict.fromkeys(ROLES, Role.PREFILL)


@pytest.mark.parametrize(
    "given",
    [
        pytest.param({"roles": PREFILLING}, id="no node decodes"),
        pytest.param({"roles": {}}, id="no node is there"),
        pytest.param({"shape": replace(EVEN, num_blocks=16), "max_tokens": 60}, id="too long"),
        pytest.param({"shape": replace(EVEN, step_s=0.4)}, id="steps take long"),
        pytest.param({"faults": (replace(CRASH, at_s=172.1),)}, id="a late fault"),
        pytest.param({"faults": (replace(CRASH, span_s=172.0),)}, id="a long fault"),
        pytest.param({"faults": (replace(LEAVES, span_s=172.0),)}, id="a node that is long away"),
    ],
)
def test_what_stands_in_the_way_of_a_request_makes_it_late(given: dict[str, Any]) -> None:
    check_late(EXCEEDED, *given.pop("faults", ()), **given)


def test_an_answer_that_has_tokens_wants_room_for_one_more() -> None:
    shape, tokens = replace(EVEN, num_blocks=5), RIGHT[:13]
    check_late(answered("deadline_exceeded", tokens), shape=shape, is_cut=True)
    with pytest.raises(Violation, match="r1 waited until its deadline"):
        check_late(answered("deadline_exceeded", tokens[:-1]), shape=shape, is_cut=True)


@pytest.mark.parametrize("outcome", ["node_lost", "handoff_failed", "internal_error", "draining"])
def test_nodes_end_no_request_long_after_the_last_fault(outcome: str) -> None:
    found, crash = answered(outcome, at_s=60.0), replace(CRASH, span_s=2.0)
    check_late(found, crash, at_s=23.0)
    check_late(found, crash, at_s=23.1, roles=PREFILLING)
    check_late(answered("overloaded"), crash, at_s=23.1)
    with pytest.raises(Violation, match=f"r1 ended by {outcome}, long after the last fault"):
        check_late(found, crash, at_s=23.1)


def test_the_last_node_that_decodes_stays_where_nothing_is_broken_and_one_router_decides() -> None:
    for shape, faults in (
        (EVEN, (CRASH,)),
        (EVEN, (LEAVES,)),
        (replace(EVEN, num_routers=2), ()),
    ):
        Ends(a_history(shape, [], *faults)).check_roles(PREFILLING.values())
    still = Ends(a_history(EVEN, [], a_fault(FaultKind.ROLE)))
    still.check_roles(ROLES.values())
    with pytest.raises(Violation, match="the last node that decodes was given another role"):
        still.check_roles(PREFILLING.values())


def test_a_request_ends_by_its_deadline() -> None:
    asked = a_request(deadline_s=10.0)
    check_time(asked, answered("length", at_s=13.0), 0.0)
    check_time(asked, answered("length", at_s=15.0), 2.0)
    with pytest.raises(Violation, match=r"r1 ended 3\.000 s after its deadline"):
        check_time(asked, answered("length", at_s=15.0), 1.9)


def test_log_probabilities_are_those_of_the_tokens_and_come_where_they_are_wanted() -> None:
    found = answered("length", RIGHT[:2])
    check_logprobs(a_request(), found, PROMPT)
    wanted = a_request(has_logprobs=True)
    values = logprobs_of((*PROMPT, *RIGHT[:2]), len(PROMPT))
    found.logprobs = [TokenLogprobs(value) for value in values]
    check_logprobs(wanted, found, PROMPT)
    for asked, logprobs in (
        (a_request(), found.logprobs),
        (wanted, found.logprobs[:1]),
        (wanted, found.logprobs[::-1]),
        (wanted, []),
    ):
        found.logprobs = logprobs
        with pytest.raises(Violation, match="r1 was answered log probabilities"):
            check_logprobs(asked, found, PROMPT)


def test_log_probabilities_of_a_prompt_come_once() -> None:
    found, wanted = answered("length", RIGHT[:2]), a_request(has_prompt_logprobs=True)
    texts = PROMPT, PROMPT[::-1]
    right, wrong = (PromptLogprobs(0, logprobs_of(text, 1), (), (), ()) for text in texts)
    found.prompt_logprobs = [right]
    check_logprobs(wanted, found, PROMPT)
    check_logprobs(wanted, answered("node_lost"), PROMPT)
    check_logprobs(wanted, answered("length", RIGHT[:2]), PROMPT[:1])
    for asked, of_prompt in (
        (a_request(), [right]),
        (wanted, []),
        (wanted, [right, right]),
        (wanted, [wrong]),
    ):
        found.prompt_logprobs = of_prompt
        with pytest.raises(Violation, match="r1 was answered other log probabilities"):
            check_logprobs(asked, found, PROMPT)
