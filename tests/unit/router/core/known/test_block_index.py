"""Which nodes hold which blocks: the same as in plain sets, however it is asked."""

from __future__ import annotations

import random
import struct
import time
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.ids import Incarnation
from common.kv.blocks import BlockKey, block_keys, hash_full_blocks
from common.kv.tiers import Tier
from router.core.known.block_index import MAX_RUNS, SWEPT_AT_ONCE, BlockIndex
from router.core.known.block_reports import BlockReport, ReportReader

NODES = [Incarnation(f"n{number}", 1) for number in range(12)]
A, B, C = NODES[:3]


def chain(length: int, first: int = 0) -> tuple[BlockKey, ...]:
    return block_keys(hash_full_blocks(range(first, first + length), 1, "f"))


def depth(index: BlockIndex, keys: Sequence[BlockKey], node: Incarnation) -> int:
    return index.held(keys).on(node)


def test_a_node_holds_what_it_reported_until_it_says_otherwise() -> None:
    index, keys = BlockIndex(), chain(10)
    assert index.on_report(A, keys[:6], []) == 0
    index.on_report(B, keys[:3], [])
    assert [depth(index, keys, node) for node in (A, B, C)] == [6, 3, 0]
    index.on_report(A, [], keys[4:])
    assert [depth(index, keys, node) for node in (A, B, C)] == [4, 3, 0]
    assert (len(index), index.num_held(A), index.num_held(B)) == (4, 4, 3)
    assert depth(index, chain(10, first=5), A) == 0
    assert depth(index, [], A) == 0


def test_the_deepest_holders_come_first() -> None:
    index, keys = BlockIndex(), chain(20)
    for node, length in zip(NODES, (3, 9, 3, 12, 9, 3, 3, 12, 3, 3, 3, 3), strict=True):
        index.on_report(node, keys[:length], [])
    held = index.held(keys)

    def drawn(first: int, number: int = 99) -> list[Incarnation]:
        return list(held.deepest(number, lambda _end: first))

    for first in range(12):
        found = drawn(first)
        assert [held.on(node) for node in found] == [12] * 2 + [9] * 2 + [3] * 8
        assert set(found) == set(NODES)
        alike = [int(node.node_id[1:]) for node in found[4:]]
        turned = [(number - first) % 12 for number in alike]
        assert turned == sorted(turned), "those behind the drawn slot first"
        assert drawn(first, 3) == found[:3]
    index.forget(NODES[3])
    assert NODES[3] not in list(index.held(keys).deepest(99, lambda end: 0))
    assert list(index.held(chain(3, first=50)).deepest(99, lambda end: 0)) == []


def test_a_look_up_knows_what_has_changed_since_the_one_before_it() -> None:
    index, keys = BlockIndex(), chain(10)
    steps: list[tuple[Callable[[], object], int]] = [
        (lambda: index.on_report(A, keys[:6], []), 6),
        (lambda: index.expect(keys[:8], A), 8),
        (lambda: index.on_report(A, [], keys[4:]), 4),
        (lambda: index.forget(A), 0),
        (lambda: index.expect(keys[:2], A), 2),
    ]
    for step, wanted in steps:
        step()
        assert depth(index, keys, A) == wanted
        assert depth(index, keys, A) == wanted


@pytest.mark.covers("F110")
def test_a_node_that_left_holds_nothing_and_so_does_its_next_life() -> None:
    index, keys = BlockIndex(), chain(10)
    index.on_report(A, keys, [])
    index.expect(keys, B)
    for node in (A, B):
        index.forget(node)
        index.forget(node)
    assert [depth(index, keys, node) for node in (A, B, Incarnation("n0", 2))] == [0, 0, 0]
    assert len(index) == 0


def test_what_is_expected_is_not_reported() -> None:
    index, keys = BlockIndex(), chain(10)
    index.on_report(A, keys[:6], [])
    index.expect(keys, A)
    index.expect(keys, B)
    assert [depth(index, keys, node) for node in (A, B)] == [10, 10]
    reported = index.held(keys, to_send=True)
    assert [reported.on(node) for node in (A, B)] == [6, 0]
    index.on_report(C, keys[:1], [])
    assert index.held(keys, to_send=True).on(B) == 0
    assert depth(index, keys, B) == 10, "what can be sent is another look-up"


def test_what_is_in_any_tier_can_be_sent_and_what_is_on_disk_alone_is_read_first() -> None:
    index, keys = BlockIndex(), chain(10)
    index.on_report(A, keys[:3], [])
    assert index.num_in_memory(keys, A, 3) == 3, "it has no disk"
    assert index.num_in_memory(keys, B, 0) == 0, "it has nothing"
    index.on_report(A, keys[2:7], [], Tier.HOST)
    index.on_report(A, keys[:9], [], Tier.DISK)
    assert depth(index, keys, A) == index.held(keys, to_send=True).on(A) == 9
    assert index.num_in_memory(keys, A, 9) == 7
    assert index.num_in_memory(keys, A, 5) == 5
    index.on_report(B, keys[:9], [], Tier.DISK)
    assert index.num_in_memory(keys, B, 9) == 0
    index.on_report(A, [], keys[5:7], Tier.HOST)
    assert index.num_in_memory(keys, A, 9) == 5
    index.on_report(A, [], keys[4:9], Tier.DISK)
    assert depth(index, keys, A) == index.held(keys, to_send=True).on(A) == 5


@pytest.mark.covers("F112")
def test_what_was_placed_is_expected_until_the_node_reports_it_or_its_end() -> None:
    index, keys = BlockIndex(), chain(10)
    index.expect(keys[:8], A)
    assert depth(index, keys, A) == 8
    index.on_report(A, keys[:8], [])
    assert depth(index, keys, A) == 8
    index.on_report(A, [], keys[5:8])
    assert depth(index, keys, A) == 5
    index.expect(keys, A)
    assert depth(index, keys, A) == 10
    index.on_report(A, [], keys[9:])
    assert depth(index, keys, A) == 9, "an end is believed, though its beginning was not told"


@pytest.mark.covers("F78", "F145")
def test_what_is_expected_is_bounded_and_loses_ends_before_beginnings() -> None:
    index, first, second = BlockIndex(max_expected=6), chain(4), chain(4, first=100)
    index.expect(first, A)
    index.expect(second, B)
    assert (depth(index, first, A), depth(index, second, B)) == (2, 4)
    index.expect(chain(1, first=200), C)
    assert (depth(index, first, A), depth(index, second, B)) == (1, 4)


@pytest.mark.covers("F78")
@pytest.mark.parametrize("seed", range(8))
def test_what_was_expected_first_is_dropped_first_whatever_happened_since(seed: int) -> None:
    """The same as in a plain dict: what another node is to have comes last again, and what a node
    says is no more expected of it."""
    rng, most = random.Random(seed), 24
    index, keys = BlockIndex(max_expected=most), chain(60)
    expected: dict[BlockKey, set[Incarnation]] = {}
    for _ in range(2000):
        key, node = rng.choice(keys), rng.choice(NODES[:3])
        if rng.random() < 0.25:
            index.on_report(node, [], [key])
            expected.get(key, set()).discard(node)
            if not expected.get(key, {node}):
                del expected[key]
        else:
            index.expect((key,), node)
            if node not in expected.get(key, ()):
                expected[key] = expected.pop(key, set()) | {node}
            if len(expected) > most:
                del expected[next(iter(expected))]
        for one in NODES[:3]:
            assert depth(index, (key,), one) == (one in expected.get(key, ()))
    assert {key for key in keys if index.held((key,)).runs} == expected.keys()


def test_nothing_grows_while_what_is_expected_is_reported() -> None:
    """Behind the bound as well, which was reached once."""
    index, keys = BlockIndex(max_expected=8), chain(1000)
    index.expect(keys[:12], A)
    for key in keys[12:]:
        index.expect((key,), B)
        index.on_report(B, [key], [])
        index.on_report(B, [], [key])
    sizes = {name: len(part) for name, part in vars(index).items() if hasattr(part, "__len__")}
    assert max(sizes.values()) <= 12, sizes


def test_what_is_known_or_was_reported_takes_no_room_among_what_is_expected() -> None:
    index, first, second = BlockIndex(max_expected=6), chain(10), chain(4, first=100)
    index.on_report(A, first[:8], [])
    index.expect(second, B)
    index.expect(first, A)
    assert (depth(index, first, A), depth(index, second, B)) == (10, 4), "two are new"
    index.on_report(A, first[8:], [])
    index.expect(chain(2, first=200), C)
    assert (depth(index, first, A), depth(index, second, B)) == (10, 4), "they are reported"


def test_what_is_expected_of_another_node_too_is_the_last_to_be_dropped() -> None:
    index, first, second = BlockIndex(max_expected=6), chain(4), chain(2, first=100)
    index.expect(first, A)
    index.expect(second, A)
    index.expect(first, B)
    index.expect(chain(2, first=200), C)
    assert [depth(index, first, node) for node in (A, B)] == [4, 4]
    assert depth(index, second, A) == 0


@pytest.mark.covers("F78", "F145")
def test_what_is_reported_is_bounded() -> None:
    index, keys = BlockIndex(max_blocks=6), chain(10)
    assert index.on_report(A, keys, []) == 4
    assert index.on_report(B, keys, []) == 4
    assert (len(index), depth(index, keys, A), depth(index, keys, B)) == (6, 6, 6)
    index.on_report(A, [], keys)
    index.on_report(B, [], keys)
    assert index.on_report(B, chain(6, first=50), []) == 0


@pytest.mark.covers("F145")
def test_many_lives_of_many_nodes_leave_nothing_behind() -> None:
    index = BlockIndex(max_expected=64)
    for epoch in range(300):
        node, keys = Incarnation("n", epoch), chain(20, first=epoch)
        index.on_report(node, keys, [])
        index.expect(chain(5, first=1000 + epoch), node)
        assert index.held(keys).runs[0][1].bit_length() <= 2, "places of those that left are free"
        index.forget(node)
        assert depth(index, keys, node) == 0
    assert len(index) == 0


def test_nodes_that_have_left_are_not_told_apart_before_all_of_theirs_is_swept() -> None:
    index, keys = BlockIndex(), chain(100)
    for number in range(1, MAX_RUNS + 2):
        left = Incarnation("left", number)
        index.on_report(left, keys[: 10 + number], [])
        index.on_report(left, range(1 << 20, (1 << 20) + SWEPT_AT_ONCE), [])
        index.expect(chain(30)[: 20 + number], left)
    index.on_report(A, keys[:5], [])
    assert depth(index, keys, A) == 0, "the deepest are told apart"
    for number in range(1, MAX_RUNS + 2):
        index.forget(Incarnation("left", number))
    assert depth(index, keys, A) == 5
    assert len(index.held(keys).runs) == 1


@pytest.mark.parametrize("tier", Tier)
def test_blocks_of_a_node_that_has_left_are_taken_out_in_bounded_pieces(tier: Tier) -> None:
    index = BlockIndex()
    index.on_report(A, range(3 * SWEPT_AT_ONCE), [], tier)
    index.forget(A)
    assert len(index) == 2 * SWEPT_AT_ONCE
    index.on_report(B, [], [])
    assert len(index) == SWEPT_AT_ONCE
    index.on_report(B, [], [])
    assert len(index) == 0


def test_what_is_expected_of_nodes_that_have_left_is_not_told_apart() -> None:
    index, keys = BlockIndex(), chain(30)
    index.on_report(A, keys[:5], [])
    for number in range(1, MAX_RUNS + 2):
        index.expect(keys[: 10 + number], Incarnation("left", number))
    for number in range(1, MAX_RUNS + 2):
        index.forget(Incarnation("left", number))
    assert depth(index, keys, A) == 5


def test_many_nodes_may_leave_at_once() -> None:
    """In CPU time, which a busy machine does not stretch: a pass for each takes far more."""
    index, rng = BlockIndex(), random.Random(1)
    index.expect([rng.getrandbits(64) for _ in range(60_000)], A)
    lost = [Incarnation(f"lost{number}", 1) for number in range(1000)]
    for number, node in enumerate(lost):
        index.on_report(node, [number], [])
        index.expect(chain(1), node)
    began_s = time.process_time()
    for node in lost:
        index.forget(node)
    assert time.process_time() - began_s < 2.0
    index.expect(chain(3, first=7), B)
    assert index.held(chain(3, first=7)).runs[0][1].bit_length() <= 1001, "their places are free"


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["report", "evict", "forget", "expect"]),
        st.integers(0, 2),
        st.integers(0, 2),
        st.integers(0, 8),
    ),
    max_size=30,
)


@given(steps=STEPS)
def test_the_index_is_that_of_a_set_for_each_node(
    steps: list[tuple[str, int, int, int]],
) -> None:
    """Caches as nodes have them: a prefix enters before, and leaves after, its continuations."""
    chains = [chain(8, first=100 * number) for number in range(3)]
    index, told = BlockIndex(), {(node, number): 0 for node in range(3) for number in range(3)}
    hoped = dict(told)
    for what, node, number, length in steps:
        at, keys = (node, number), chains[number]
        if what == "report" and length > told[at]:
            index.on_report(NODES[node], keys[told[at] : length], [])
            told[at] = length
            hoped[at] = max(hoped[at], length)
        elif what == "evict" and length < told[at]:
            index.on_report(NODES[node], [], keys[length : told[at]])
            hoped[at] = length if hoped[at] == told[at] else hoped[at]
            told[at] = length
            if hoped[at] > length:  # a gap: nothing is promised beyond it
                index.on_report(NODES[node], [], keys[length:])
                hoped[at] = length
        elif what == "forget":
            index.forget(NODES[node])
            for other in range(3):
                told[node, other] = hoped[node, other] = 0
        elif what == "expect":
            index.expect(keys[:length], NODES[node])
            hoped[at] = max(hoped[at], length)
        for one, other in told:
            assert depth(index, chains[other], NODES[one]) == hoped[one, other]
    assert len(index) == sum(max(told[node, number] for node in range(3)) for number in range(3))


@pytest.mark.parametrize("below", [Tier.HOST, Tier.DISK])
def test_a_block_is_held_while_any_tier_has_it(below: Tier) -> None:
    index, keys = BlockIndex(), chain(10)
    index.on_report(A, keys, [])
    index.on_report(A, keys[4:8], [], below)
    assert (len(index), index.num_held(A), index.num_held(A, below)) == (10, 10, 4)
    index.on_report(A, [], keys[4:])
    assert depth(index, keys, A) == 8
    assert index.held(keys).on(B) == 0
    index.on_report(A, [], keys[6:8], below)
    assert (depth(index, keys, A), index.num_held(A, below)) == (6, 2)
    index.on_report(A, [], keys)
    assert depth(index, chain(10, first=1), A) == 0
    index.on_report(A, [], keys, below)
    assert len(index) == 0


def test_the_last_of_many_nodes_to_have_a_block_may_have_it_in_several_tiers() -> None:
    """Its bit is not one of the small integers, of which Python has one object each."""
    index, keys = BlockIndex(), chain(4)
    for node in NODES:
        index.on_report(node, keys[:1], [])
    last = NODES[-1]
    for tier in Tier:
        index.on_report(last, keys, [], tier)
    for node in NODES[:-1]:
        index.on_report(node, [], keys[:1])
    for tier in Tier:
        assert [depth(index, keys, node) for node in (A, last)] == [0, 4]
        index.on_report(last, [], keys, tier)
    assert len(index) == depth(index, keys, last) == depth(index, keys, A) == 0


def test_a_block_that_is_in_two_tiers_below_the_pool_leaves_with_the_last() -> None:
    index, keys = BlockIndex(), chain(4)
    for tier in (Tier.HOST, Tier.DISK):
        index.on_report(A, keys, [], tier)
        index.on_report(B, keys, [], tier)
    index.on_report(A, [], keys, Tier.HOST)
    assert depth(index, keys, A) == 4
    index.on_report(A, [], keys, Tier.DISK)
    assert (depth(index, keys, A), depth(index, keys, B)) == (0, 4)
    index.forget(B)
    assert len(index) == 0


def test_what_is_expected_enters_the_pool_and_host_memory_says_nothing_of_it() -> None:
    index, keys = BlockIndex(), chain(4)
    index.expect(keys, A)
    index.on_report(A, keys, [], Tier.HOST)
    index.on_report(A, [], keys, Tier.HOST)
    assert depth(index, keys, A) == 4
    index.on_report(A, [], keys)
    assert depth(index, keys, A) == 0


@pytest.mark.covers("F78")
def test_all_tiers_share_one_bound() -> None:
    index, keys = BlockIndex(max_blocks=6), chain(10)
    assert index.on_report(A, keys[:4], []) == 0
    assert index.on_report(A, keys, [], Tier.HOST) == 4, "the first four take no further room"
    assert index.on_report(B, keys, []) == 4
    assert len(index) == 6
    index.on_report(A, [], keys, Tier.HOST)
    assert index.on_report(B, chain(2, first=50), []) == 2, "all six are still in pools"
    index.on_report(B, [], keys[4:])
    assert index.on_report(B, chain(2, first=50), []) == 0


@given(
    steps=st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from(Tier), st.integers(0, 8)), max_size=30
    )
)
def test_a_node_holds_the_beginning_that_its_tiers_have_together(
    steps: list[tuple[int, Tier, int]],
) -> None:
    index, keys = BlockIndex(), chain(8)
    told = {(node, tier): 0 for node in range(3) for tier in Tier}
    for node, tier, length in steps:
        before, told[node, tier] = told[node, tier], length
        added, removed = keys[before:length], keys[length:before]
        index.on_report(NODES[node], added, removed, tier)
        for one in range(3):
            longest = max(told[one, tier] for tier in Tier)
            assert depth(index, keys, NODES[one]) == longest
            assert index.num_held(NODES[one], tier) == told[one, tier]
    assert len(index) == max(told.values())
    for left in NODES[:3]:
        index.forget(left)
    assert len(index) == 0


def test_the_deepest_of_many_different_nodes_are_told_apart() -> None:
    index, keys = BlockIndex(), chain(100)
    for number, node in enumerate(NODES):
        index.on_report(node, keys[: 5 * (number + 1)], [])
    found = index.held(keys)
    assert len(found.runs) == MAX_RUNS
    depths = [found.on(node) for node in NODES]
    assert depths[-MAX_RUNS:] == [5 * (number + 1) for number in range(12)][-MAX_RUNS:]
    assert set(depths[:-MAX_RUNS]) == {0}


@given(lengths=st.lists(st.integers(0, 40), max_size=12), asked=st.integers(0, 40))
def test_a_look_up_finds_each_depth_and_who_ends_there(lengths: list[int], asked: int) -> None:
    index, keys = BlockIndex(), chain(40)
    ends: dict[int, set[Incarnation]] = {}
    for node, length in zip(NODES, lengths, strict=False):
        index.on_report(node, keys[:length], [])
        if end := min(length, asked):
            ends.setdefault(end, set()).add(node)
    found = index.held(keys[:asked])
    assert [
        (end, {node for slot, node in enumerate(found.nodes) if node and holders >> slot & 1})
        for end, holders in found.runs
    ] == sorted(ends.items(), reverse=True)[:MAX_RUNS]


def test_a_look_up_reads_few_blocks_of_a_long_prompt() -> None:
    """A count of reads, which no load of the machine changes."""
    index, keys, rng = BlockIndex(), chain(1000), random.Random(1)
    for number in range(1000):
        node = Incarnation(f"n{number}", 1)
        index.on_report(node, keys[: rng.choice((100, 600, 900))], [])
    num_read = 0

    class Counted(list[BlockKey]):
        def __getitem__(self, at: object) -> BlockKey:  # type: ignore[override]
            nonlocal num_read
            num_read += 1
            return super().__getitem__(at)  # type: ignore[call-overload,no-any-return]

    assert {index.held(Counted(keys)).on(Incarnation(f"n{n}", 1)) for n in range(1000)} == {
        *(100, 600, 900)
    }
    num_read = 0
    assert len(index.held(Counted(keys)).runs) == 3
    assert num_read <= 29, "a search from the beginning for each of three depths reads more"


# Reports of a stream.


def packed(*found: int) -> bytes:
    return struct.pack(f">{len(found)}Q", *found)


def test_reports_are_read_in_their_order() -> None:
    reader = ReportReader()
    assert reader.take(1, 0, packed(1, 2**64 - 1), b"") == BlockReport(True, (1, 2**64 - 1), ())
    assert reader.take(2, 0, b"", packed(1)) == BlockReport(False, (), (1,))
    assert reader.take(3, 0, b"", b"") == BlockReport(False, (), ())
    assert reader.take(1, 0, packed(5), b"") == BlockReport(True, (5,), ()), "it says all again"
    assert reader.take(2, 0, packed(6), b"") == BlockReport(False, (6,), ())
    assert not reader.has_lost


@pytest.mark.covers("F77")
@pytest.mark.parametrize(
    ("number", "added", "removed"),
    [(4, b"", b""), (2, b"", b""), (3, b"1234567", b""), (3, b"", b"1")],
)
def test_after_a_report_that_is_missing_or_wrong_nothing_is_known_until_all_is_said_again(
    number: int, added: bytes, removed: bytes
) -> None:
    reader = ReportReader()
    reader.take(1, 0, packed(1), b"")
    reader.take(2, 0, packed(2), b"")
    assert reader.take(number, 0, added, removed) == BlockReport(is_first=True)
    assert reader.has_lost
    assert reader.take(number + 1, 0, packed(9), b"") is None
    assert reader.take(1, 0, packed(7), b"") == BlockReport(True, (7,), ())
    assert not reader.has_lost


def test_a_report_is_of_its_tier_and_a_tier_that_is_not_known_is_skipped() -> None:
    reader = ReportReader()
    assert reader.take(1, 3, packed(1), b"") == BlockReport(True)
    assert reader.take(2, 0, packed(2), b"") == BlockReport(False, (2,), ())
    assert reader.take(3, 1, packed(3), packed(4)) == BlockReport(False, (3,), (4,), Tier.HOST)
    assert reader.take(4, 2, packed(5), b"") == BlockReport(False, (5,), (), Tier.DISK)
    assert reader.take(6, 1, packed(3), b"") == BlockReport(is_first=True), "one is missing"
