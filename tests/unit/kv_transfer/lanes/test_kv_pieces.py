"""The bytes of a chunk: what is gathered, what is sent as it lies, and where it is written."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from kv_transfer.lanes import pieces
from kv_transfer.lanes.inline_lane import Gatherer
from kv_transfer.lanes.pieces import PieceRows
from kv_transfer.lanes.pool_memory import Bytes
from kv_transfer.receiving.effects import Write
from kv_transfer.shared.block_arrays import as_blocks
from kv_transfer.shared.chunks import LayerChunk, split_chunks
from kv_transfer.shared.limits import DEFAULT_WINDOW_BYTES, Limits
from kv_transfer.wire.frames import Data
from tests.support.examples import everyday
from tests.support.kv.pool_shapes import kv_pool

NUM_BLOCKS = 40
LAYER = 1
ROWS = PieceRows()


def pool_of(piece_bytes: int, seed: int) -> Bytes:
    shape = (2, 2, NUM_BLOCKS, piece_bytes)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def chunk_of(blocks: Sequence[int], ordinals: Sequence[int] | None = None) -> LayerChunk:
    ordinals = range(len(blocks)) if ordinals is None else ordinals
    return LayerChunk(LAYER, as_blocks(ordinals), as_blocks(blocks))


def data_of(chunk: LayerChunk, runs: tuple[int, ...]) -> Data:
    return Data(
        seq=0,
        lease_token=1,
        generation=1,
        layer=chunk.layer,
        ordinals=tuple(chunk.ordinals.tolist()),
        runs=runs,
        source_blocks=(),
        sums=b"",
    )


def gatherer(most_bytes: int = DEFAULT_WINDOW_BYTES) -> Gatherer:
    return Gatherer(ROWS, most_bytes)


def is_view_of(pool: Bytes, part: memoryview) -> bool:
    return np.shares_memory(pool, np.frombuffer(part, np.uint8))


@settings(max_examples=everyday(50, of=150), deadline=None)
@given(
    # 96 bytes are no row for the kernel; the others are on both sides of what is gathered.
    st.sampled_from([96, 4 << 10, 64 << 10, 256 << 10]),
    st.lists(st.integers(0, NUM_BLOCKS - 1), min_size=1, max_size=20, unique=True),
    st.randoms(use_true_random=False),
)
def test_every_block_gets_to_its_target(piece_bytes: int, sources: list[int], rng: object) -> None:
    source, target = _POOLS[piece_bytes]
    targets = rng.sample(range(NUM_BLOCKS), len(sources))  # type: ignore[attr-defined]
    ordinals = as_blocks(range(len(sources)))
    (chunk,) = split_chunks(LAYER, ordinals, as_blocks(sources), max_blocks=NUM_BLOCKS)
    payload = gatherer().payload(kv_pool(source), chunk, is_summed=True)
    assert sum(payload.runs) == len(sources)
    assert [part.nbytes for part in payload.parts] == [
        count * piece_bytes for count in payload.runs for _ in "kv"
    ]

    wanted = target.copy()
    ordered = [targets[ordinal] for ordinal in chunk.ordinals]
    wanted[LAYER][:, ordered] = source[LAYER][:, chunk.source_blocks]
    data = data_of(chunk, payload.runs)
    sums = pieces.pool_sums(kv_pool(source), LAYER, chunk.source_blocks, chunk.ordinals)
    assert payload.sums == sums
    write = Write(b"", "zmq", "block", data, as_blocks(ordered))
    assert ROWS.copy_parts(write, payload.parts, kv_pool(target)) == sums
    assert np.array_equal(target, wanted)


_POOLS = {size: (pool_of(size, 1), pool_of(size, 2)) for size in (96, 4 << 10, 64 << 10, 256 << 10)}


@pytest.mark.parametrize(
    ("piece_kib", "blocks", "runs", "views"),
    [
        # One range is never copied, however short.
        (4, [3], (1,), [True]),
        (4, [3, 4, 5], (3,), [True]),
        # Short ranges are gathered into one part each of keys and values.
        (64, [0, 2, 4, 6], (4,), [False]),
        (64, [0, 1, 2, 8, 9], (5,), [False]),
        # From 256 KiB on a range is sent as it lies, and what is beside it is not drawn in.
        (64, [0, 1, 2, 3, 8], (4, 1), [True, True]),
        (64, [0, 2, 4, 5, 6, 7, 20, 30], (2, 4, 2), [False, True, False]),
        (256, [0, 2, 4], (1, 1, 1), [True, True, True]),
    ],
)
def test_short_ranges_are_gathered_and_long_ones_are_not_copied(
    piece_kib: int, blocks: list[int], runs: tuple[int, ...], views: list[bool]
) -> None:
    pool = pool_of(piece_kib << 10, 3)
    payload = gatherer().payload(kv_pool(pool), chunk_of(blocks), is_summed=False)
    assert payload.runs == runs
    assert [is_view_of(pool, part) for part in payload.parts] == [v for v in views for _ in "kv"]
    assert payload.sums == b"", "sums of some blocks that nobody asked for"


@pytest.mark.parametrize("blocks", [[3], [3, 4, 5, 6], [0, 1, 2, 3, 8]])
def test_blocks_that_are_summed_are_copied_in_the_same_pass(blocks: list[int]) -> None:
    pool = pool_of(64 << 10, 3)
    payload = gatherer().payload(kv_pool(pool), chunk_of(blocks), is_summed=True)
    assert payload.runs == (len(blocks),)
    assert not any(is_view_of(pool, part) for part in payload.parts)
    assert payload.sums


def test_beyond_the_bound_blocks_that_are_summed_are_sent_as_they_lie() -> None:
    pool = pool_of(64 << 10, 3)
    payload = gatherer(1).payload(kv_pool(pool), chunk_of([3, 4, 8]), is_summed=True)
    assert payload.runs == (2, 1)
    assert all(is_view_of(pool, part) for part in payload.parts)
    ordinals = as_blocks(range(3))
    assert payload.sums == pieces.pool_sums(kv_pool(pool), LAYER, as_blocks([3, 4, 8]), ordinals)


@pytest.mark.parametrize(
    ("piece_kib", "blocks", "runs", "is_view"),
    [
        (64, list(range(16)), (16,), True),  # 1 MiB of keys is one part,
        (64, list(range(17)), (8, 9), True),  # more are two,
        (64, list(range(40)), (13, 13, 14), True),
        (64, list(range(0, 40, 2)), (10, 10), False),  # gathered or not.
        (2048, [0, 1], (1, 1), True),  # A piece is not cut.
    ],
)
def test_no_part_is_longer_than_what_is_fast(
    piece_kib: int, blocks: list[int], runs: tuple[int, ...], is_view: bool
) -> None:
    pool = np.zeros((2, 2, NUM_BLOCKS, piece_kib << 10), np.uint8)
    payload = gatherer().payload(kv_pool(pool), chunk_of(blocks), is_summed=False)
    assert payload.runs == runs
    assert [part.nbytes >> 10 for part in payload.parts] == [
        count * piece_kib for count in runs for _ in "kv"
    ]
    assert {is_view_of(pool, part) for part in payload.parts} == {is_view}


def test_copies_that_are_not_let_go_of_are_bounded() -> None:
    """Then ranges are sent from the pool, until the transport has released some copies."""
    pool = pool_of(1 << 10, 8)
    chunk = chunk_of([4, 6, 8])  # 6 KiB
    bounded = gatherer(13 << 10)
    held = [bounded.payload(kv_pool(pool), chunk, is_summed=False) for _ in range(4)]
    assert [payload.runs for payload in held] == [(3,), (3,), (1, 1, 1), (1, 1, 1)]
    assert all(is_view_of(pool, part) for part in held[3].parts)
    assert b"".join(held[3].parts[::2]) == bytes(held[0].parts[0])

    sent = held.pop(0).parts[1]
    assert bounded.payload(kv_pool(pool), chunk, is_summed=False).runs == (
        1,
        1,
        1,
    )  # one half of it is still in use
    del sent
    held.append(bounded.payload(kv_pool(pool), chunk, is_summed=False))
    assert held[-1].runs == (3,)
    assert bounded.payload(kv_pool(pool), chunk, is_summed=False).runs == (1, 1, 1)


@pytest.mark.parametrize(("kv_lanes", "num_gathered"), [(1, 4), (2, 10), (4, 20)])
def test_each_worker_may_gather_a_frame_beside_the_windows_of_all_connections(
    kv_lanes: int, num_gathered: int
) -> None:
    """Else many workers make frames of a thousand parts as soon as the network is slow."""
    limits = Limits(max_channels=kv_lanes)
    pool = np.zeros((2, 2, NUM_BLOCKS, 204 << 10), np.uint8)
    chunk = chunk_of(range(0, NUM_BLOCKS, 2))  # 8 MiB: one of the largest frames.
    bounded = gatherer(limits.gathered_bytes)
    held = [bounded.payload(kv_pool(pool), chunk, is_summed=False) for _ in range(num_gathered + 1)]
    are_copies = [not is_view_of(pool, payload.parts[0]) for payload in held]
    assert are_copies == [True] * num_gathered + [False]


@pytest.mark.parametrize("piece_bytes", [96, 256, 4 << 10])
def test_blocks_are_copied_out_of_another_pool(piece_bytes: int) -> None:
    """With the kernel and, where a piece is no row for it, without."""
    source, target = pool_of(piece_bytes, 4), pool_of(piece_bytes, 5)
    wanted = target.copy()
    wanted[LAYER][:, [9, 2]] = source[LAYER][:, [7, 8]]
    data = dataclasses.replace(data_of(chunk_of([7, 8], [1, 0]), ()), source_blocks=(7, 8))
    write = Write(b"", "shm", "block", data, as_blocks([9, 2]))
    sums = ROWS.copy_blocks(write, kv_pool(source), as_blocks([7, 8]), kv_pool(target))
    assert np.array_equal(target, wanted)
    assert sums == pieces.pool_sums(kv_pool(source), LAYER, as_blocks([7, 8]), as_blocks([1, 0]))


def test_a_sum_is_xxh3_seeded_with_its_place() -> None:
    pool = pool_of(32, 6)
    sums = pieces.pool_sums(kv_pool(pool), LAYER, as_blocks([5, 9]), as_blocks([2, 0]))
    wanted = [
        xxh3_64_intdigest(pool[LAYER, kind, block], 1 << 32 | ordinal)
        for kind in (0, 1)
        for block, ordinal in ((5, 2), (9, 0))
    ]
    assert sums == b"".join(one.to_bytes(8, "little") for one in wanted)
    assert pieces.unpacked_sums(sums, 2).tolist() == [wanted[:2], wanted[2:]]


@pytest.mark.parametrize(("kind", "index", "name"), [(0, 1, "keys"), (1, 0, "values")])
def test_corruption_is_named(kind: int, index: int, name: str) -> None:
    pool = pool_of(32, 7)
    chunk = chunk_of([1, 2], [4, 6])
    sums = pieces.pool_sums(kv_pool(pool), LAYER, chunk.source_blocks, chunk.ordinals)
    said = bytearray(sums)
    said[8 * (2 * kind + index)] ^= 1
    data = dataclasses.replace(data_of(chunk, (2,)), sums=bytes(said))
    assert pieces.damaged_ordinals(data, bytes(said)) == set()
    assert pieces.damaged_ordinals(data, sums) == {chunk.ordinals[index]}
    problem = pieces.describe_damage(data, sums)
    assert f"{name} of layer 1, block {chunk.ordinals[index]} of the ticket" in problem


def test_keys_and_values_cannot_change_places_in_a_digest() -> None:
    there, back = (pieces.block_sums(pieces.packed_sums(sums), 1) for sums in ([5, 7], [7, 5]))
    assert there.tolist() != back.tolist()


def test_the_sums_of_a_block_wrap_around() -> None:
    most = (1 << 64) - 1
    sums = pieces.packed_sums([most, 1, most, 2])
    assert pieces.block_sums(sums, 2).tolist() == [(most + 3 * most) % (1 << 64), 7]
