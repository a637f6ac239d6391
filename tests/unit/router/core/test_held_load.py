"""What a node holds now, by its last report and by what this router did since."""

from __future__ import annotations

import pytest

from common.nodes import NodeLoad, Role
from router.core.held_load import Held, OwnLoad
from tests.support.nodes.node_records import record

RECORD = record("p0", Role.PREFILL, block_size=16, max_num_seqs=8)


def load(num_running: int, *, used: int = 0, queued: int = 0) -> NodeLoad:
    return NodeLoad(
        free_blocks=100 - used,
        free_seats=8 - num_running,
        num_running=num_running,
        num_waiting=0,
        queued_tokens=queued,
    )


def own(num_requests: int, num_tokens: int = 160) -> OwnLoad:
    """Requests with prompts of `num_tokens`."""
    load = OwnLoad()
    for _ in range(num_requests):
        load.open(num_tokens)
    return load


def test_what_other_routers_have_counts_as_it_was_reported() -> None:
    assert own(0).held(RECORD, load(3, used=30, queued=400)) == Held(3, 30, 400)


def test_prompts_count_on_a_node_without_requests_of_this_router() -> None:
    mine = own(1)
    mine.close(0)  # its tokens count elsewhere
    assert mine.held(RECORD, load(1, used=5, queued=40)) == Held(1, 15, 200)


def test_what_was_sent_since_the_report_counts() -> None:
    assert own(2).held(RECORD, load(0)) == Held(2, 20, 320)


@pytest.mark.covers("F123")
def test_what_ended_before_the_report_was_read_does_not_count() -> None:
    mine = own(3)
    for _ in range(3):
        mine.close(160)
    mine.on_listing()  # of a report that was made before they ended
    assert mine.held(RECORD, load(3, used=30, queued=480)) == Held(0, 0, 0)
    mine.on_listing()  # the same report: the node made no other one
    assert mine.held(RECORD, load(3, used=30, queued=480)) == Held(0, 0, 0)
    mine.on_listing()
    assert mine.held(RECORD, load(3, used=30, queued=480)) == Held(3, 30, 480), "of others"


def test_a_report_and_what_is_known_are_not_added() -> None:
    mine = own(3)
    mine.on_listing()
    assert mine.held(RECORD, load(3, used=30, queued=480)) == Held(3, 30, 480)


def test_of_what_was_reported_the_part_counts_that_still_runs() -> None:
    mine = own(4, num_tokens=0)  # a decode node: it holds more than the prompts
    mine.on_listing()
    mine.close(0)
    assert mine.held(RECORD, load(8, used=80)) == Held(7, 70, 0)


def test_of_a_node_without_a_report_only_what_was_sent_is_known() -> None:
    assert own(2).held(RECORD, None) == Held(2, 20, 320)
