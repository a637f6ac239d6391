"""When the lane of a session that is over is closed."""

from __future__ import annotations

from kv_transfer.receiving.lane_uses import LaneUses


def copying(*sessions: bytes) -> LaneUses:
    uses = LaneUses()
    for session in sessions:
        uses.begin_copy(session)
    return uses


def test_a_lane_from_which_nothing_is_copied_is_closed_with_its_session() -> None:
    uses = copying(b"other")
    assert uses.leave(b"a", "shm") == "shm"
    assert uses.end_copy(b"other") == ""


def test_a_lane_is_closed_after_the_last_copy() -> None:
    uses = copying(b"a", b"a", b"other")
    assert uses.leave(b"a", "shm") == ""
    assert uses.end_copy(b"a") == ""
    assert uses.end_copy(b"other") == ""
    assert uses.end_copy(b"a") == "shm"


def test_copies_that_ended_before_keep_nothing_open() -> None:
    uses = copying(b"a")
    assert uses.end_copy(b"a") == ""
    assert uses.leave(b"a", "shm") == "shm"


def test_another_lane_of_a_session_with_the_same_id_leaves_the_first_to_its_copies() -> None:
    uses = copying(b"a")
    assert uses.leave(b"a", "shm") == ""
    assert uses.open(b"a", "zmq") == ""
    assert uses.end_copy(b"a") == "shm"
    assert uses.leave(b"a", "zmq") == "zmq"


def test_a_lane_that_is_open_again_is_not_closed() -> None:
    uses = copying(b"a")
    assert uses.leave(b"a", "shm") == ""
    assert uses.open(b"a", "shm") == ""
    assert uses.end_copy(b"a") == ""


def test_a_session_that_gets_no_lane_has_its_first_closed_after_its_copies() -> None:
    uses = copying(b"a")
    assert uses.leave(b"a", "shm") == ""
    assert uses.open(b"a", "") == ""
    assert uses.end_copy(b"a") == "shm"
    assert LaneUses().open(b"a", "zmq") == ""
