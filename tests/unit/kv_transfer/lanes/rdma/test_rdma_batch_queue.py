"""What is moved in batches, and when items are told, on the queue alone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.lanes.rdma.batch_queue import (
    MAX_BATCH_RANGES,
    MAX_BATCHES_UNDER_WAY,
    BatchQueue,
    QueuedPart,
)

BATCH_BYTES = 100
Queue = BatchQueue[str, str]


def put(queue: Queue, part: str, num_bytes: int = BATCH_BYTES, num_ranges: int = 1) -> None:
    queue.put(QueuedPart(part, num_ranges, num_bytes))


def begin(queue: Queue) -> list[list[str]]:
    """Begin what may be under way; return the parts of each batch."""
    begun = []
    while (batch := queue.next_batch()) is not None:
        begun.append(batch.parts)
    return begun


def filled(*parts: str) -> Queue:
    queue: Queue = BatchQueue(BATCH_BYTES)
    for part in parts:
        put(queue, part)
    return queue


def test_two_batches_are_under_way_and_the_next_begins_when_the_first_is_moved() -> None:
    queue = filled("a", "b", "c")
    assert begin(queue) == [["a"], ["b"]]
    assert queue.first is not None
    assert queue.first.parts == ["a"]
    queue.moved()
    assert begin(queue) == [["c"]]
    assert queue.is_empty


def test_what_fits_is_gathered_into_one_batch() -> None:
    queue: Queue = BatchQueue(BATCH_BYTES)
    for part, num_bytes in (("a", 60), ("b", 40), ("c", 1)):
        put(queue, part, num_bytes)
    assert begin(queue) == [["a", "b"], ["c"]]


def test_a_batch_has_no_more_ranges_than_the_engine_takes() -> None:
    queue: Queue = BatchQueue(BATCH_BYTES)
    for part, num_ranges in (("a", MAX_BATCH_RANGES - 1), ("b", 1), ("c", 1)):
        put(queue, part, 1, num_ranges)
    assert begin(queue) == [["a", "b"], ["c"]]


def test_a_move_that_is_larger_than_a_batch_goes_alone() -> None:
    queue: Queue = BatchQueue(BATCH_BYTES)
    put(queue, "large", 2 * BATCH_BYTES)
    put(queue, "small", 1)
    assert begin(queue) == [["large"], ["small"]]


def test_items_are_told_with_the_batch_that_has_what_is_before_them() -> None:
    queue: Queue = BatchQueue(BATCH_BYTES)
    for part in "ab":
        put(queue, part, 60)
        assert not queue.tell_after(f"after {part}")
    begin(queue)
    assert queue.moved() == ["after a"]
    assert queue.moved() == ["after b"]


def test_an_item_is_told_at_once_when_nothing_is_before_it() -> None:
    queue: Queue = BatchQueue(BATCH_BYTES)
    assert queue.tell_after("nothing is queued")
    put(queue, "a")
    assert not queue.tell_after("queued")
    begin(queue)
    assert not queue.tell_after("under way")
    assert queue.moved() == ["queued"]
    begin(queue)
    assert queue.moved() == ["under way"]
    assert not queue.tell_after("others are being told")
    queue.told()
    begin(queue)
    assert queue.moved() == ["others are being told"]
    queue.told()
    assert queue.tell_after("nothing is under way")


def test_a_queue_that_was_stopped_forgets_what_did_not_begin() -> None:
    queue = filled("a", "b", "c")
    begin(queue)
    queue.stop()
    put(queue, "d")
    assert not queue.tell_after("d")
    assert queue.is_over
    assert queue.first is not None
    assert queue.first.parts == ["a"], "it continues"
    queue.moved()
    assert begin(queue) == []
    queue.moved()
    queue.told()
    assert not queue.tell_after("e")


def test_a_queue_that_ends_moves_what_is_queued_and_nothing_more() -> None:
    queue = filled("a")
    queue.end()
    was_over = queue.is_over
    put(queue, "b")
    assert not queue.tell_after("b")
    assert begin(queue) == [["a"]]
    assert (was_over, queue.is_over) == (False, True)
    assert queue.moved() == []
    queue.told()
    assert queue.tell_after("nothing is before it")


@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("put"), st.integers(1, 2 * BATCH_BYTES)),
            st.sampled_from([("tell", 0), ("begin", 0), ("moved", 0)]),
        ),
        max_size=60,
    )
)
def test_each_part_is_begun_once_and_each_item_told_behind_all_before_it(
    steps: list[tuple[str, int]],
) -> None:
    queue: BatchQueue[int, int] = BatchQueue(BATCH_BYTES)
    num_put, begun, moved = 0, [], 0
    under_way: list[list[int]] = []
    told: list[int] = []

    def begin_one() -> None:
        batch = queue.next_batch()
        if batch is not None:
            assert batch.num_bytes <= BATCH_BYTES or len(batch.parts) == 1
            begun.extend(batch.parts)
            under_way.append(batch.parts)

    def moved_one() -> None:
        nonlocal moved
        moved += len(under_way.pop(0))
        for item in queue.moved():
            assert item <= moved, "it is told before what is queued before it is moved"
            told.append(item)
        queue.told()

    for step, num_bytes in steps:
        if step == "put":
            queue.put(QueuedPart(num_put, 1, num_bytes))
            num_put += 1
        elif step == "tell" and queue.tell_after(num_put):
            assert moved == num_put
            told.append(num_put)
        elif step == "begin":
            begin_one()
        elif step == "moved" and under_way:
            moved_one()
        assert len(under_way) <= MAX_BATCHES_UNDER_WAY
    while not queue.is_empty or under_way:
        begin_one()
        moved_one()
    assert begun == list(range(num_put))
    assert len(told) == sum(step == "tell" for step, _ in steps)
    assert told == sorted(told)
