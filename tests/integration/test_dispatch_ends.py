"""What a dispatcher over scripted nodes counts for an answer that ends before it is whole."""

from __future__ import annotations

import asyncio

import pytest

from common.nodes import Role
from tests.integration.scripted_cluster import DEADLINE_S, Cluster, asked, start, wait_until
from tests.integration.scripted_cluster import scripted_cluster as scripted_cluster
from tests.support.clocks.manual_clock import ManualClock


@pytest.mark.parametrize(
    ("waited_s", "outcome"),
    [
        (0.0, "abort"),
        (DEADLINE_S - 1.0, "abort"),
        (DEADLINE_S - 0.05, "deadline_exceeded"),
        (DEADLINE_S + 0.05, "deadline_exceeded"),
    ],
)
async def test_an_answer_that_leaves_at_its_deadline_counts_as_late(
    cluster: Cluster, waited_s: float, outcome: str
) -> None:
    """The HTTP edge has the same deadline, and may notice first."""
    clock = ManualClock()
    d = await cluster.add("d0", Role.DECODE)
    answer = start(await cluster.router(clock=clock))
    request = await asked(d)
    clock.advance(waited_s)
    answer.cancel()
    await asyncio.gather(answer, return_exceptions=True)
    await wait_until(lambda: request.id in d.aborted, "aborted")
    ends = ("pdserve_router_choices_total", {"outcome": outcome})
    assert cluster.registry.get_sample_value(*ends) == 1
    assert cluster.registry.get_sample_value("pdserve_router_choices_in_progress") == 0
