"""Slots into which a read failed: when they are moved, fenced and free, on a machine alone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.lanes.rdma.read_fences import ReadFences, Step


def fences(*reads: str) -> ReadFences[str]:
    made: ReadFences[str] = ReadFences()
    for read in reads:
        made.begin(read)
    return made


def test_reads_that_end_well_need_no_fence() -> None:
    reading = fences("a", "b")
    reading.end("b")
    reading.end("a")
    assert reading.next_step() is None


def test_the_slots_of_a_failed_read_are_free_after_a_fence() -> None:
    reading = fences("a")
    assert not reading.fail("a")
    assert reading.next_step() is Step.MOVE
    reading.moved(is_beside=True)
    assert reading.next_step() is Step.FENCE
    assert reading.fenced() == ["a"]
    assert reading.next_step() is None


def test_a_fence_waits_for_what_others_read_to_the_earlier_address_alone() -> None:
    reading = fences("a", "other", "third")
    reading.fail("a")
    assert reading.next_step() is Step.MOVE
    reading.moved(is_beside=True)
    reading.begin("at the new address")
    assert reading.next_step() is None
    reading.end("other")
    assert reading.next_step() is None
    assert not reading.fail("third")
    assert reading.next_step() is Step.FENCE
    assert reading.fenced() == ["a", "third"]
    assert reading.next_step() is None, "what failed at the earlier address needs no second move"
    reading.end("at the new address")


def test_a_fence_does_not_wait_where_reads_cannot_go_elsewhere_meanwhile() -> None:
    reading = fences("a", "other")
    reading.fail("a")
    reading.moved(is_beside=False)
    assert reading.next_step() is Step.FENCE
    assert reading.fenced() == ["a"]
    assert reading.fail("other"), "it was fenced already"
    assert reading.next_step() is None


def test_a_read_that_fails_at_the_new_address_waits_for_a_fence_of_its_own() -> None:
    reading = fences("a", "slow")
    reading.fail("a")
    reading.moved(is_beside=True)
    reading.begin("b")
    assert not reading.fail("b")
    assert reading.next_step() is None, "one move at a time"
    reading.end("slow")
    assert reading.next_step() is Step.FENCE
    assert reading.fenced() == ["a"]
    assert reading.next_step() is Step.MOVE
    reading.moved(is_beside=True)
    assert reading.next_step() is Step.FENCE
    assert reading.fenced() == ["b"]


@given(st.lists(st.sampled_from(["begin", "end", "fail", "step", "step beside nothing"])))
def test_nothing_is_free_while_its_address_can_be_reached(events: list[str]) -> None:
    """A failed read is set free once, after the address that it was begun at was removed."""
    reading: ReadFences[int] = ReadFences()
    present, reachable = 0, {0}
    address_of: dict[int, int] = {}
    under_way: list[int] = []
    failed: set[int] = set()

    def step(is_beside: bool) -> None:
        nonlocal present
        match reading.next_step():
            case Step.MOVE:
                present += 1
                reachable.add(present)
                reading.moved(is_beside=is_beside)
            case Step.FENCE:
                reachable.remove(min(reachable))
                assert reachable == {present}
                free = set(reading.fenced())
                assert free == {one for one in failed if address_of[one] != present}
                failed.difference_update(free)

    for number, event in enumerate(events):
        if event == "begin":
            reading.begin(number)
            address_of[number] = present
            under_way.append(number)
        elif event.startswith("step"):
            step(event == "step")
        elif under_way and event == "end":
            reading.end(under_way.pop(0))
        elif under_way:
            read = under_way.pop()
            assert reading.fail(read) == (address_of[read] not in reachable)
            failed |= {read} if address_of[read] in reachable else set()
    for read in under_way:
        reading.end(read)
    for _ in range(4):
        step(is_beside=True)
    assert not failed
    assert reading.next_step() is None
