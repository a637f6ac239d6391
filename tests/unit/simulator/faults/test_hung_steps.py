"""Steps that hang while their process goes on and says so."""

from __future__ import annotations

from dataclasses import replace

from simulator.faults.history import Fault
from simulator.faults.kinds import FaultKind
from tests.unit.simulator.faults.histories import (
    a_history,
    a_shape,
    an_asked_request,
    outcomes,
    run,
)

HANG_S = 20.0
SHAPE = replace(a_shape(), num_blocks=120, max_num_seqs=2, step_s=0.1)
"""Two decode nodes with two seats each."""


def ends_s(num_requests: int, target: str, at_s: float = 2.0, max_tokens: int = 24) -> list[float]:
    """Return when each request has ended where a step of one node hangs."""
    asked = [
        an_asked_request(0.5 + 0.3 * number, f"r{number}", max_tokens=max_tokens)
        for number in range(num_requests)
    ]
    hang = Fault(at_s=at_s, kind=FaultKind.HANG, target=target, span_s=HANG_S)
    cluster = run(a_history(SHAPE, asked, hang))
    assert outcomes(cluster) <= {"length", "stop"}
    return cluster.ended_s()


def test_answers_on_a_node_whose_step_hangs_go_on_elsewhere() -> None:
    assert max(ends_s(2, "decode-0")) < 10.0


def test_answers_on_it_go_on_where_others_have_room_only_later() -> None:
    # When the node is suspected both seats of the other one are taken, and soon they are free.
    ended_s = sorted(ends_s(4, "decode-0", max_tokens=80))
    assert 6.0 < ended_s[1] < ended_s[3] < 18.0


def test_prompts_on_a_node_whose_step_hangs_are_computed_elsewhere() -> None:
    assert max(ends_s(2, "prefill-0", at_s=0.4)) < 10.0


def test_without_anything_to_do_a_node_hangs_in_its_next_step() -> None:
    assert max(ends_s(2, "decode-0", at_s=0.1)) < 10.0
