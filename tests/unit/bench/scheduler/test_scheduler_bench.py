"""`bench.scheduler` measures what it says: nobody is seated, ends or is preempted meanwhile."""

from __future__ import annotations

import pytest

from bench.scheduler.__main__ import BusyNode, Case
from bench.scheduler.overlap import DEVICE_S, step_periods_s


@pytest.mark.parametrize(
    "case",
    [
        Case("free", 30),
        Case("full", 30, has_free_seats=False),
        Case("drafts", 30, method="ngram"),
        Case("wide", 30, num_running=512),
    ],
    ids=lambda case: case.name,
)
def test_every_step_decodes_all_and_seats_nobody(case: Case) -> None:
    node = BusyNode(case)
    for _ in range(5):
        spans = node.step()
        assert min(spans.plan_s, spans.plan_cpu_s, spans.apply_s, spans.flatten_s) > 0
    node.check()
    assert node.scheduler.statistics().counters.last_step_tokens >= case.num_running


def test_a_case_that_is_not_what_it_says_is_not_reported() -> None:
    node = BusyNode(Case("free", 30))
    node.scheduler.finish(node.scheduler.running[0])
    with pytest.raises(AssertionError, match="ended"):
        node.check()


def test_steps_on_a_device_are_planned_ahead_or_one_after_the_other() -> None:
    # That all are planned ahead, or none, is checked by the function itself.
    for periods_s in step_periods_s(8, 20):
        assert len(periods_s) == 20
        assert sum(periods_s) >= 19 * DEVICE_S
