"""Copies that a flow waits for: each end is told once, with what has failed."""

from __future__ import annotations

import pytest

from engine.core.blocks.cache_copy import CacheCopy, CopyKind, PrefixCopy
from node.flow.copies_under_way import CHECK_S, CopiesUnderWay
from node.flow.messages import CopyEnded


@pytest.mark.parametrize(("is_out", "kind"), [(True, CopyKind.SWAP_OUT), (False, CopyKind.SWAP_IN)])
@pytest.mark.parametrize("error", [None, OSError("no room")])
def test_the_end_of_a_copy_to_or_from_host_memory_is_told_once(
    *, is_out: bool, kind: CopyKind, error: Exception | None
) -> None:
    ended: list[tuple[object, bool]] = []

    def end(copy: object, *, is_good: bool) -> None:
        ended.append((copy, is_good))

    copies = CopiesUnderWay()
    swap = PrefixCopy([1, 2], [7, 8], [b"a", b"b"], is_out=is_out)
    begin = copies.begin_swap(swap, end)
    assert begin.copy == CacheCopy(kind, [1, 2], [7, 8])
    assert len(copies) == 1
    assert not ended
    assert copies.end(CopyEnded(begin.number, error)) == []
    assert ended == [(swap, error is None)]
    assert len(copies) == 0


def test_an_idle_node_looks_again_soon_while_a_copy_is_under_way() -> None:
    copies = CopiesUnderWay()
    assert copies.next_check_s() is None
    begin = copies.begin(CacheCopy(CopyKind.STAGE_OUT, [1]), lambda error: [])
    assert copies.next_check_s() == 0.0, "it was never looked at"
    copies.on_check(5.0)
    assert copies.next_check_s() == 5.0 + CHECK_S
    copies.end(CopyEnded(begin.number, None))
    assert copies.next_check_s() is None
