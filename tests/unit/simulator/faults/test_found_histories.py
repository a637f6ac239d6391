"""Short histories in which something was wrong once, in the simulator or in what it runs."""

from __future__ import annotations

from dataclasses import replace

from simulator.faults.history import Fault
from simulator.faults.hosts import ProcessClock
from simulator.faults.kinds import FaultKind
from simulator.timeline import Timeline
from tests.unit.simulator.faults.histories import (
    a_history,
    a_shape,
    an_asked_request,
    outcomes,
    plain_history,
    run,
)


def test_a_connection_that_breaks_before_it_is_open_again_is_opened_once() -> None:
    # It was opened twice, and the calls on the first one were never answered.
    drawn = plain_history(127)
    shape = replace(drawn.shape, num_prefill=0, num_decode=0, num_mixed=1)
    breaks = [
        Fault(at_s=at_s, kind=FaultKind.REPEAT, target="router", other="mixed-0")
        for at_s in (0.4613, 0.5360)
    ]
    asked = [an_asked_request(0.55 + 0.01 * i, f"r{i}") for i in range(30)]
    history = replace(drawn, shape=shape, requests=tuple(asked), faults=tuple(breaks))
    assert outcomes(run(history)) <= {"length", "stop"}


def test_a_node_reads_what_came_while_it_dropped_a_landing() -> None:
    # The end of the landing was read with the next message, and the blocks were held until then.
    drawn = plain_history(2036)
    names = ("r2", "r16", "r15", "r13", "r0", "r1")
    asked = tuple(one for one in drawn.requests if one.name in names)
    freeze = Fault(at_s=0.1176, kind=FaultKind.FREEZE, target="prefill-0", span_s=7.0)
    history = replace(drawn, requests=asked, faults=(freeze,))
    assert len(run(history).outcomes()) == len(names)


def test_what_waits_at_a_cut_path_does_not_arrive_before_a_break() -> None:
    # The node was to read it before the connection broke, for ever.
    run(plain_history(100059))


def test_a_node_that_leaves_refuses_the_kv_that_is_sent_to_it() -> None:
    # Its peer waited for it, and could not leave in time.
    shape = replace(a_shape(), num_decode=1, drain_s=0.02, kv_message_s=0.015, step_s=0.03)
    drains = [
        Fault(at_s=at_s, kind=FaultKind.DRAIN, target=target, other="router")
        for at_s, target in ((0.0405, "decode-0"), (0.2137, "prefill-0"))
    ]
    asked = an_asked_request(0.0261, "r14", num_prompt=9, max_tokens=3)
    assert not run(a_history(shape, [asked], *drains)).nodes, "both have left"


def test_a_clock_that_has_jumped_reaches_what_is_due() -> None:
    # A node looked at a deadline that was one rounding ahead of its clock, for ever.
    timeline = Timeline()
    clock = ProcessClock(timeline)
    clock.jump(0.05)
    seen: list[float] = []
    clock.at(0.17500000000000002, lambda: seen.append(clock.now_s()))
    timeline.run()
    assert seen[0] >= 0.17500000000000002
