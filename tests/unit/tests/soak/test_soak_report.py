"""The report of a soak: a stall counts for the fault that caused it, not for one beside it."""

from __future__ import annotations

from tests.soak.clients import Ended, Try
from tests.soak.report import Done, stalls_by_kind
from tests.soak.schedule import Fault

BEGAN_S, ENDED_S = 100.0, 110.0


def done(kind: str, target: str, began_s: float = BEGAN_S, ended_s: float = ENDED_S) -> Done:
    return Done(Fault(kind, target, began_s, ended_s - began_s), began_s, ended_s)


def stream(
    *stalls: tuple[float, float],
    routers: tuple[int, ...] = (1,),
    began_s: float = 90.0,
    first_at_s: float = 91.0,
) -> Ended:
    tries = tuple(Try(router, began_s, 200.0) for router in routers)
    return Ended("stream", began_s, 200.0, 100, list(stalls), first_at_s, tries=tries)


CUT = done("network_cut", "decode-1")
FREEZE = done("freeze_10_s", "router-1", 102.0, 112.0)
IN_FREEZE, BEFORE_FREEZE = (101.9, 112.3), (100.1, 101.3)


def test_the_longest_stall_of_each_stream_counts() -> None:
    stalls = stalls_by_kind([stream((100.1, 101.1), (103.0, 103.4)), stream((101.0, 101.5))], [CUT])
    assert stalls == {
        "network_cut decode": {
            "streams": 2,
            "on_frozen_router": 0,
            "p50_s": 0.75,
            "p99_s": 0.99,
            "longest_s": 1.0,
        }
    }


def test_a_stall_on_a_frozen_router_counts_for_the_freeze_alone() -> None:
    stalls = stalls_by_kind([stream(IN_FREEZE), stream(BEFORE_FREEZE)], [CUT, FREEZE])
    cut, freeze = stalls["network_cut decode"], stalls["freeze_10_s router"]
    assert (cut["streams"], cut["on_frozen_router"], cut["longest_s"]) == (1, 1, 1.2)
    assert (freeze["streams"], freeze["on_frozen_router"], freeze["longest_s"]) == (1, 0, 10.4)


def test_other_stalls_of_a_stream_on_a_frozen_router_still_count() -> None:
    one = stream(BEFORE_FREEZE, (101.3, 101.35), IN_FREEZE)
    cut = stalls_by_kind([one], [CUT, FREEZE])["network_cut decode"]
    assert (cut["streams"], cut["on_frozen_router"], cut["longest_s"]) == (1, 1, 1.2)


def test_a_stall_counts_where_the_router_did_not_stand_still() -> None:
    after = (112.1, 113.1)
    for one in (stream(IN_FREEZE, routers=(2,)), stream(IN_FREEZE, routers=(1, 2)), stream(after)):
        cut = stalls_by_kind([one], [CUT, FREEZE])["network_cut decode"]
        assert (cut["streams"], cut["on_frozen_router"]) == (1, 0)
    killed = done("drain", "router-1", 102.0, 112.0)
    cut = stalls_by_kind([stream(IN_FREEZE)], [CUT, killed])["network_cut decode"]
    assert (cut["streams"], cut["on_frozen_router"]) == (1, 0)


def test_a_fault_whose_stalls_are_all_another_s_has_no_figure() -> None:
    cut = stalls_by_kind([stream(IN_FREEZE)], [CUT, FREEZE])["network_cut decode"]
    assert cut == {"streams": 0, "on_frozen_router": 1}


def test_two_freezes_at_once_do_not_hide_each_other() -> None:
    node, router = done("freeze_10_s", "decode-1"), done("freeze_60_s", "router-2", 90.0, 150.0)
    stalls = stalls_by_kind([stream((100.1, 101.4))], [node, router])
    assert stalls["freeze_10_s decode"]["longest_s"] == 1.3


def test_the_wait_for_a_first_token_counts_without_any_frozen_router() -> None:
    quick = stream((101.5, 101.55), routers=(2,), began_s=101.0, first_at_s=101.5)
    frozen = stream((113.0, 113.05), routers=(1, 2), began_s=101.0, first_at_s=113.0)
    cut = stalls_by_kind([quick, frozen], [CUT, FREEZE])["network_cut decode"]
    assert (cut["streams"], cut["first_token_p99_s"]) == (2, 0.5)
