"""Copies beside the steps: they read late, and what they write is nothing before their end."""

from __future__ import annotations

import pytest

from common.errors import InternalError
from engine.core.blocks.cache_copy import CacheCopy, CopyKind
from simulator.faults.contents import KVMemory
from simulator.faults.hosts import ProcessClock
from simulator.faults.node.copies import STEPS_PER_COPY, LateCopies
from simulator.timeline import Timeline

STEP_S = 1.0


def some_copies() -> tuple[Timeline, KVMemory, LateCopies]:
    timeline, memory = Timeline(), KVMemory(8, 4, 4, is_staged=True)
    for layer, of_layer in enumerate(memory.slots):
        of_layer[:] = [(8 * layer + block + 1,) * 4 for block in range(8)]
    return timeline, memory, LateCopies(ProcessClock(timeline), memory, STEP_S)


def pass_time(timeline: Timeline, span_s: float) -> None:
    timeline.after(span_s, lambda: None)
    timeline.run()


def test_a_swapped_block_comes_back_through_copies_in_their_order() -> None:
    timeline, memory, copies = some_copies()
    right = memory.of_block(5)
    out = copies.begin(CacheCopy(CopyKind.SWAP_OUT, [5], [2]))
    back = copies.begin(CacheCopy(CopyKind.SWAP_IN, [1], [2]))
    assert memory.of_block(1) != right
    assert not out.is_done()
    pass_time(timeline, STEPS_PER_COPY * STEP_S)
    assert out.is_done()
    assert not back.is_done()
    assert memory.of_block(1) != right, "the second copy has not ended"
    pass_time(timeline, STEPS_PER_COPY * STEP_S)
    assert back.is_done()
    assert memory.of_block(1) == right


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (CacheCopy(CopyKind.SWAP_IN, [1], [2]), CacheCopy(CopyKind.SWAP_OUT, [5], [2])),
        (CacheCopy(CopyKind.SWAP_OUT, [1], [2]), CacheCopy(CopyKind.SWAP_OUT, [5], [2])),
        (CacheCopy(CopyKind.STAGE_OUT, [1]), CacheCopy(CopyKind.STAGE_IN, [1])),
    ],
)
def test_nothing_is_copied_over_what_a_copy_uses(first: CacheCopy, second: CacheCopy) -> None:
    timeline, _, copies = some_copies()
    copies.begin(first)
    pass_time(timeline, STEP_S)
    copies.begin(second)
    assert not copies.wrong
    pass_time(timeline, STEP_S)
    copies.begin(first)
    copies.begin(second)
    assert "is written while a copy uses it" in copies.wrong


def test_a_copy_that_fails_has_written_something() -> None:
    timeline, memory, copies = some_copies()
    copies.is_failing, before = True, memory.of_block(3)
    with pytest.raises(InternalError, match="a copy has failed"):
        copies.begin(CacheCopy(CopyKind.STAGE_IN, [3]))
    assert memory.of_block(3) != before
    copies.is_failing = False
    copy = copies.begin(CacheCopy(CopyKind.STAGE_OUT, [5]))
    pass_time(timeline, STEP_S)
    assert copy.is_done(), "nothing waits for it"


def test_what_is_written_while_a_copy_reads_is_copied() -> None:
    timeline, memory, copies = some_copies()
    copies.begin(CacheCopy(CopyKind.STAGE_OUT, [5]))
    for of_layer in memory.slots:
        of_layer[5] = (77,) * 4
    pass_time(timeline, STEP_S)
    copies.look()
    assert memory.read(0, [5]) == [(77,) * 4]


def test_what_landed_is_used_when_it_was_copied() -> None:
    timeline, memory, copies = some_copies()
    memory.put(0, [3], [(9,) * 4])
    copy = copies.begin(CacheCopy(CopyKind.STAGE_IN, [3]))
    assert memory.slots[0][3] != (9,) * 4
    pass_time(timeline, STEP_S)
    assert copy.is_done()
    assert memory.slots[0][3] == (9,) * 4
