"""A node that has lost time and refuses what would end too late: it refuses nothing for that."""

from __future__ import annotations

from dataclasses import replace

import pytest

from simulator.faults.history import Fault
from simulator.faults.kinds import FaultKind
from tests.unit.simulator.faults.histories import (
    a_history,
    a_shape,
    an_asked_request,
    outcomes,
    run,
)


@pytest.mark.parametrize(
    ("kind", "span_s"), [(FaultKind.FREEZE, 4.0), (FaultKind.CLOCK, 20.0), (FaultKind.CLOCK, 40.0)]
)
def test_what_can_be_served_is_served_after_a_node_has_lost_time(
    kind: FaultKind, span_s: float
) -> None:
    one_node = replace(a_shape(), num_prefill=0, num_decode=0, num_mixed=1)
    shape = replace(one_node, sheds=True, max_num_seqs=2, max_queued=60, step_s=0.1)
    first = [0.1 + 0.02 * number for number in range(12)]
    later = [2.0 + 0.01 * number for number in range(20)]
    asked = [
        an_asked_request(at_s, f"r{number}", num_prompt=10, max_tokens=10)
        for number, at_s in enumerate(first + later)
    ]
    lost = Fault(at_s=1.5, kind=kind, target="mixed-0", span_s=span_s)
    assert outcomes(run(a_history(shape, asked, lost))) == {"length"}
