"""Reads out of other nodes' rings: in order from each, failed ones until they are free, alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import HandoffFailed
from kv_transfer.lanes.rdma.read_fences import Step
from kv_transfer.lanes.rdma.ring_reads import RingReads, RingSource

Source = RingSource[str]
ERROR = HandoffFailed("the read failed")


class Reading:
    """Reads of the test, which are letters."""

    def __init__(self) -> None:
        self.reads: RingReads[str] = RingReads()

    def source(self, reads: str) -> Source:
        """Return a source from which these are read."""
        source: Source = RingSource()
        for read in reads:
            self.reads.begin(source, read)
        return source

    def fence(self, *, is_beside: bool = True) -> list[str]:
        """Move and fence; return what that sets free."""
        assert self.reads.next_step() is Step.MOVE
        self.reads.moved(is_beside=is_beside)
        assert self.reads.next_step() is Step.FENCE
        free = self.reads.fenced()
        assert {error for _, error in free} == {ERROR}
        return [read for read, _ in free]


@pytest.fixture
def reading() -> Reading:
    return Reading()


def test_reads_of_a_source_end_in_their_order(reading: Reading) -> None:
    source, other = reading.source("abc"), reading.source("xy")
    for one, read in ((source, "a"), (other, "x"), (source, "b"), (source, "c"), (other, "y")):
        reading.reads.end(one, read)
    assert not source.pending
    assert not other.pending
    assert source.error is None
    assert reading.reads.next_step() is None


def test_all_reads_of_a_source_fail_with_the_first(reading: Reading) -> None:
    source = reading.source("abc")
    reading.reads.end(source, "a")
    assert reading.reads.fail(source, ERROR) == [], "they may land late"
    assert source.error is ERROR
    assert not source.pending
    assert reading.fence() == ["b", "c"]
    assert reading.reads.next_step() is None


def test_a_source_that_fails_again_has_nothing_to_give(reading: Reading) -> None:
    source = reading.source("a")
    reading.reads.fail(source, ERROR)
    assert reading.reads.fail(source, HandoffFailed("and again")) == []
    assert reading.fence() == ["a"], "with the error that it failed with"


def test_reads_of_other_sources_do_not_fail_and_are_waited_for(reading: Reading) -> None:
    source, other = reading.source("a"), reading.source("xy")
    reading.reads.fail(source, ERROR)
    assert reading.reads.next_step() is Step.MOVE
    reading.reads.moved(is_beside=True)
    later = reading.source("z")
    reading.reads.end(other, "x")
    assert other.error is None
    assert reading.reads.next_step() is None, "one is still read to the earlier address"
    reading.reads.end(other, "y")
    assert reading.reads.next_step() is Step.FENCE
    assert reading.reads.fenced() == [("a", ERROR)]
    reading.reads.end(later, "z")
    assert reading.reads.next_step() is None


def test_reads_to_an_address_that_is_gone_are_free_at_once(reading: Reading) -> None:
    """Each has the error of its own source."""
    source, other = reading.source("a"), reading.source("xy")
    reading.reads.fail(source, ERROR)
    reading.fence(is_beside=False)  # Those of the other one go nowhere from now on.
    error = HandoffFailed("the address is gone")
    assert reading.reads.fail(other, error) == [("x", error), ("y", error)]
    assert reading.reads.next_step() is None


def test_only_those_to_the_present_address_wait_for_the_next_fence(reading: Reading) -> None:
    source, both = reading.source("a"), reading.source("x")
    reading.reads.fail(source, ERROR)
    reading.fence(is_beside=False)
    reading.reads.begin(both, "y")
    assert reading.reads.fail(both, ERROR) == [("x", ERROR)]
    assert reading.fence() == ["y"]


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["begin", "end", "fail", "step"]), st.integers(0, 2)),
        max_size=60,
    ),
    is_beside=st.booleans(),
)
def test_each_read_ends_or_is_free_once_and_never_while_its_address_is_there(
    steps: list[tuple[str, int]], is_beside: bool
) -> None:
    reads: RingReads[int] = RingReads()
    sources: list[RingSource[int]] = [RingSource() for _ in range(3)]
    present, there = 0, {0}
    address_of: dict[int, int] = {}
    over: list[int] = []

    def free(failed: list[tuple[int, HandoffFailed]]) -> None:
        for read, _ in failed:
            assert address_of[read] not in there, "it may still land"
            over.append(read)

    def do_step() -> bool:
        nonlocal present, there
        step = reads.next_step()
        if step is Step.MOVE:
            present += 1
            there = {*there, present}
            reads.moved(is_beside=is_beside)
        elif step is Step.FENCE:
            there = {present}
            free(reads.fenced())
        return step is not None

    for what, number in steps:
        source = sources[number]
        if what == "begin" and source.error is None:
            read = len(address_of)
            address_of[read] = present
            reads.begin(source, read)
        elif what == "end" and source.pending:
            over.append(source.pending[0])
            reads.end(source, source.pending[0])
        elif what == "fail" and source.error is None:
            free(reads.fail(source, ERROR))
            sources[number] = RingSource()  # Of the next session.
        elif what == "step":
            do_step()
    for source in sources:
        while source.pending:
            over.append(source.pending[0])
            reads.end(source, source.pending[0])
    while do_step():
        pass
    assert sorted(over) == list(address_of)
