"""What is known of the files on disk: found, bounded, in order, and told as news."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.blocks.disk_index import DiskIndex, bytes_taken
from engine.core.blocks.disk_jobs import OWN_FOLDER, DiskScan

FILE_BYTES = 5000
TAKEN = 8192


def index(num_blocks: float = 4) -> DiskIndex:
    return DiskIndex(int(num_blocks * TAKEN), FILE_BYTES)


def name(number: int) -> bytes:
    return bytes([number]) * 16


def fill(into: DiskIndex, *numbers: int) -> None:
    for number in numbers:
        assert into.make_room(1) == []
        into.add(name(number))


def test_what_was_not_used_for_longest_makes_room() -> None:
    known = index(3.9)
    fill(known, 1, 2, 3)
    assert (len(known), known.num_bytes, known.most_blocks) == (3, 3 * TAKEN, 3)
    known.use(name(1))
    known.use(name(9))  # one that is not there
    assert known.make_room(2) == [name(2), name(3)]
    assert [known.find(name(n)) for n in (1, 2, 3)] == [OWN_FOLDER, None, None]
    with pytest.raises(ValueError, match="at most 3"):
        known.make_room(4)


def test_what_other_models_left_counts_and_goes_first() -> None:
    known = index()
    known.take_own(DiskScan(own=(name(1), name(2)), strangers=(("a/x", 1), ("a/y", 5000))))
    assert known.num_bytes == 3 * TAKEN + 4096
    assert known.make_room(1) == ["a/x"]
    assert known.make_room(3) == ["a/y", name(1)]


def test_a_smaller_bound_than_before_removes_what_is_too_much() -> None:
    known = index(2)
    known.take_own(DiskScan(own=tuple(map(name, range(5)))))
    assert known.make_room(0) == [name(0), name(1), name(2)]


def test_a_block_of_another_node_is_found_there_until_it_is_gone() -> None:
    known = index()
    known.take_others({name(1): "node-7", name(2): "node-7"})
    fill(known, 2)
    assert [known.find(name(n)) for n in (1, 2, 3)] == ["node-7", OWN_FOLDER, None]
    assert (len(known), known.num_others) == (1, 2)
    known.forget(name(2), OWN_FOLDER)
    assert known.find(name(2)) == "node-7"
    known.forget(name(1), "node-3")
    assert known.find(name(1)) == "node-7"
    known.forget(name(1), "node-7")
    assert known.find(name(1)) is None
    known.take_others({})
    assert known.find(name(2)) is None


def test_a_disk_without_room_for_a_block_takes_none() -> None:
    assert index(0.9).most_blocks == 0
    assert bytes_taken(0) == 0
    assert (bytes_taken(1), bytes_taken(4096), bytes_taken(4097)) == (4096, 4096, 8192)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 7)), max_size=40))
def test_news_say_what_is_there(done: list[tuple[int, int]]) -> None:
    """Whoever takes all news knows what can be found, and the bound holds."""
    known, told = index(3), set[bytes]()
    known.keep_news()
    for kind, number in done:
        if kind == 0:
            if known.find(name(number)) != OWN_FOLDER:
                known.make_room(1)
                known.add(name(number))
        elif kind == 1:
            known.forget(name(number), OWN_FOLDER)
        elif kind == 2:
            known.take_others({name(n): "node-1" for n in range(number)})
        elif kind == 3:
            known.forget(name(number), "node-1")
        elif kind == 4:
            known.take_own(DiskScan(own=tuple(name(n) for n in range(min(number, 3)))))
        else:
            known.use(name(number))
        for block_hash, is_there in known.take_news().items():
            (told.add if is_there else told.discard)(block_hash)
        assert told == {name(n) for n in range(8) if known.find(name(n)) is not None}
        assert known.num_bytes <= known.max_bytes
        known.check()


def test_news_of_other_nodes_come_in_the_order_of_what_was_seen() -> None:
    """In every process: that of a set of hashes is another one in each."""
    names = [name(number) for number in range(50)]
    known = index()
    known.take_others(dict.fromkeys(names[:40], "a"))
    known.keep_news()
    known.take_others(dict.fromkeys(reversed(names[10:]), "a"))
    left, came = names[:10], names[:39:-1]
    assert list(known.take_news().items()) == [(n, n in came) for n in (*left, *came)]
