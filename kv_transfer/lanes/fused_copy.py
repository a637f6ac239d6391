"""Copy rows of bytes and compute their XXH3-64 in one pass over memory.

Each 64 bytes are loaded once, enter the checksum, and are stored: the sum is of the copied bytes,
even if another process changes the source meanwhile. The stores bypass the caches (non-temporal):
the target is not read soon, and a cache line that is about to be overwritten need not be loaded
first. The same pass without its stores sums a pool's own rows, which are rarely in a cache either.
Two rows are processed at a time, alternating by stripe, so that more memory reads are in flight:
that makes the pass a third faster, and about as fast as `memcpy`.

XXH3 is Yann Collet's (https://github.com/Cyan4973/xxHash, doc/xxhash_spec.md, "XXH3 algorithm (for
inputs above 240 bytes)"): eight 64-bit lanes take stripes of 64 bytes, are scrambled after each
1024, and are folded at the end. A seed changes the secret that the stripes are mixed with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import njit, types
from numba.core import caching, cgutils
from numba.extending import intrinsic

from kv_transfer.own_cache import keep_kernels

ALIGNMENT = 16
"""Alignment of target addresses in bytes: non-temporal stores require it.

Every allocator provides it. Targets at multiples of 64, as in pools, are written a sixth faster."""
STRIPE_BYTES = 64
BLOCK_BYTES = 1024
"""Also the prefetch distance in the source; the processor's own prefetching stops at page ends."""
SHORTEST_BYTES = 256
"""The smallest row: up to 240 bytes XXH3 differs."""

_SECRET = np.frombuffer(
    bytes.fromhex(
        "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578"
        "825ad07dccff7221b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea3"
        "71644897a20df94e3819ef46a9deacd8a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931"
        "c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
        "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
    ),
    np.uint64,
)
_SCRAMBLE_AT, _LAST_AT, _MERGE_AT = 128, 121, 11
"""Offsets in the secret of the keys for the scramble, the last stripe and the final merge."""
_LANES_AT = _SECRET.size
"""Index of the lanes in a row's state: the secret comes first."""

_PRIME32_1, _PRIME32_2, _PRIME32_3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
_PRIME64_1, _PRIME64_2, _PRIME64_3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
_PRIME64_4, _PRIME64_5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
_LANES = np.array(
    [
        _PRIME32_3, _PRIME64_1, _PRIME64_2, _PRIME64_3,
        _PRIME64_4, _PRIME32_2, _PRIME64_5, _PRIME32_1,
    ],
    np.uint64,
)  # fmt: skip
_START = np.uint64(_PRIME64_1)
_AVALANCHE = np.uint64(0x165667919E3779F9)

_INT32, _INT64, _INT128 = ir.IntType(32), ir.IntType(64), ir.IntType(128)
_VECTOR = ir.VectorType(_INT64, 8)
_NEIGHBOURS = ir.Constant(ir.VectorType(_INT32, 8), [1, 0, 3, 2, 5, 4, 7, 6])

_WANTED_SIZE = f"wanted a multiple of {STRIPE_BYTES} from {SHORTEST_BYTES} on"
_HAS_WIDE_REGISTERS = bool(get_host_cpu_features().get("avx2"))


def _all(value: int) -> ir.Constant:
    return ir.Constant(_VECTOR, [value] * 8)


def _plus(builder: Any, address: Any, offset: int) -> Any:
    return builder.add(address, _INT64(offset))


def _load(builder: Any, address: Any) -> Any:
    return builder.load(builder.inttoptr(address, _VECTOR.as_pointer()), align=1)


class _VolatileLoad(ir.LoadInstr):  # type: ignore[misc]
    """A load that the compiler neither repeats nor folds into several uses."""

    def descr(self, buf: list[str]) -> None:
        super().descr(buf)
        buf[-1] = buf[-1].replace("load ", "load volatile ", 1)


def _load_once(builder: Any, address: Any) -> Any:
    """Load a stripe exactly once: a second load could return bytes changed in between."""
    pointer = builder.inttoptr(address, _VECTOR.as_pointer())
    load = _VolatileLoad(builder.block, pointer)
    load.align = 1
    builder._insert(load)
    return load


def _store(builder: Any, value: Any, address: Any) -> None:
    builder.store(value, builder.inttoptr(address, _VECTOR.as_pointer()), align=8)


def _prefetch(builder: Any, address: Any) -> None:
    pointer = ir.IntType(8).as_pointer()
    name = "llvm.prefetch.p0i8"
    function = builder.module.globals.get(name) or ir.Function(
        builder.module, ir.FunctionType(ir.VoidType(), [pointer, *[_INT32] * 3]), name=name
    )
    # Arguments: read, keep in all caches, data. An unmapped address does no harm.
    options = (_INT32(0), _INT32(3), _INT32(1))
    builder.call(function, [builder.inttoptr(address, pointer), *options])


def _store_past_caches(builder: Any, value: Any, address: Any) -> None:
    store = builder.store(value, builder.inttoptr(address, _VECTOR.as_pointer()), align=ALIGNMENT)
    store.set_metadata("nontemporal", builder.module.add_metadata([_INT32(1)]))


@dataclass(frozen=True, slots=True)
class _Row:
    """Addresses of a row's next stripes and of its state.

    `target` None: the row is only summed. `ahead` is what to prefetch meanwhile. `key` is the part
    of the secret for the first stripe.
    """

    target: Any | None
    source: Any
    ahead: Any
    key: Any
    lanes: Any

    def at(self, builder: Any, index: int) -> _Row:
        """Return the row at its stripe `index`."""
        offset = STRIPE_BYTES * index
        target = None if self.target is None else _plus(builder, self.target, offset)
        source, ahead = _plus(builder, self.source, offset), _plus(builder, self.ahead, offset)
        return _Row(target, source, ahead, _plus(builder, self.key, 8 * index), self.lanes)


def _rows_of(builder: Any, rows: Any) -> list[_Row]:
    """Unpack `rows`: a tuple of (target, source, ahead, key, lanes), or without targets."""
    fields = [cgutils.unpack_tuple(builder, row) for row in cgutils.unpack_tuple(builder, rows)]
    return [_Row(*row) if len(row) == 5 else _Row(None, *row) for row in fields]


def _mixed_stripe(builder: Any, row: _Row) -> Any:
    """Return what the row's next stripe adds to its lanes; copy the stripe if there is a target."""
    data = _load_once(builder, row.source)
    _prefetch(builder, row.ahead)
    if row.target is not None:
        _store_past_caches(builder, data, row.target)
    mixed = builder.xor(data, _load(builder, row.key))
    low, high = builder.and_(mixed, _all(0xFFFFFFFF)), builder.lshr(mixed, _all(32))
    swapped = builder.shuffle_vector(data, ir.Constant(_VECTOR, ir.Undefined), _NEIGHBOURS)
    return builder.add(builder.mul(low, high), swapped)


def _take_stripes(builder: Any, rows: list[_Row], count: int) -> list[Any]:
    """Return the lanes of each row after its next `count` stripes."""
    lanes = [_load(builder, row.lanes) for row in rows]
    for index in range(count):
        for number, row in enumerate(rows):
            mixed = _mixed_stripe(builder, row.at(builder, index))
            lanes[number] = builder.add(lanes[number], mixed)
    return lanes


@intrinsic  # type: ignore[untyped-decorator]
def _take_block(typing: Any, rows: Any) -> Any:
    """Process the 16 stripes of a block of each row, then the scramble."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        taken = _rows_of(builder, args[0])
        all_lanes = _take_stripes(builder, taken, BLOCK_BYTES // STRIPE_BYTES)
        for row, lanes in zip(taken, all_lanes, strict=True):
            lanes = builder.xor(lanes, builder.lshr(lanes, _all(47)))
            key = _load(builder, _plus(builder, row.key, _SCRAMBLE_AT))
            scrambled = builder.mul(builder.xor(lanes, key), _all(_PRIME32_1))
            _store(builder, scrambled, row.lanes)
        return context.get_dummy_value()

    return types.void(rows), codegen


@intrinsic  # type: ignore[untyped-decorator]
def _take_stripe(typing: Any, rows: Any) -> Any:
    """Process one stripe of each row."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        taken = _rows_of(builder, args[0])
        for row, lanes in zip(taken, _take_stripes(builder, taken, 1), strict=True):
            _store(builder, lanes, row.lanes)
        return context.get_dummy_value()

    return types.void(rows), codegen


@intrinsic  # type: ignore[untyped-decorator]
def _fold(typing: Any, left: Any, right: Any) -> Any:
    """Return the xor of the low and the high half of the 128-bit product."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        left, right = (builder.zext(arg, _INT128) for arg in args)
        product = builder.mul(left, right)
        high = builder.trunc(builder.lshr(product, _INT128(64)), _INT64)
        return builder.xor(builder.trunc(product, _INT64), high)

    return types.uint64(types.uint64, types.uint64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def _wait_for_stores(typing: Any) -> Any:
    """Wait for non-temporal stores, which nothing else orders."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), codegen


keep_kernels(caching)
_kernel: Callable[[str], Callable[[Any], Any]] = partial(
    njit, nogil=True, cache=True, error_model="numpy"
)


@_kernel("void(uint64[:,::1], int64, uint64)")
def _begin_row(states: Any, number: Any, seed: Any) -> None:
    for word in range(0, _SECRET.size, 2):
        states[number, word] = _SECRET[word] + seed
        states[number, word + 1] = _SECRET[word + 1] - seed
    for lane in range(8):
        states[number, _LANES_AT + lane] = _LANES[lane]


@_kernel("void(boolean, uint64, uint64, uint64, uint64, uint64)")
def take_blocks(
    is_copied: Any, target: Any, source: Any, num_bytes: Any, key: Any, lanes: Any
) -> None:
    at, block = np.uint64(0), np.uint64(BLOCK_BYTES)
    while at < num_bytes:
        if is_copied:
            _take_block(((target + at, source + at, source + at + block, key, lanes),))
        else:
            _take_block(((source + at, source + at + block, key, lanes),))
        at += block


@_kernel("void(boolean, uint64, uint64, uint64, uint64, uint64, uint64, uint64)")
def take_blocks_of_two(
    is_copied: Any,
    target: Any,
    target_2: Any,
    source: Any,
    source_2: Any,
    num_bytes: Any,
    state: Any,
    other: Any,
) -> None:
    at, lanes_at, block = np.uint64(0), np.uint64(8 * _LANES_AT), np.uint64(BLOCK_BYTES)
    while at < num_bytes:
        next_at = at + block
        if is_copied:
            first = (target + at, source + at, source + next_at, state, state + lanes_at)
            second = (target_2 + at, source_2 + at, source_2 + next_at, other, other + lanes_at)
            _take_block((first, second))
        else:
            summed = (source + at, source + next_at, state, state + lanes_at)
            _take_block((summed, (source_2 + at, source_2 + next_at, other, other + lanes_at)))
        at = next_at


@_kernel("void(boolean, uint64, uint64, uint64, uint64, uint64, uint64)")
def take_rest(
    is_copied: Any, target: Any, source: Any, ahead: Any, num_bytes: Any, key: Any, lanes: Any
) -> None:
    """Process the stripes after the last whole block; the very last one has its own key.

    `ahead` is the start of a row that is processed soon.
    """
    at, stripe_key = np.uint64(0), key
    while at < num_bytes:
        if at + np.uint64(STRIPE_BYTES) == num_bytes:
            stripe_key = key + np.uint64(_LAST_AT)
        if is_copied:
            _take_stripe(((target + at, source + at, ahead + at, stripe_key, lanes),))
        else:
            _take_stripe(((source + at, ahead + at, stripe_key, lanes),))
        at += np.uint64(STRIPE_BYTES)
        stripe_key += np.uint64(8)


@_kernel("uint64(uint64[:,::1], int64, int64)")
def _merge_key(states: Any, number: Any, lane: Any) -> Any:
    """Return a lane's key for the final merge: 8 bytes of the secret, which are not aligned."""
    word, shift = _MERGE_AT // 8 + lane, np.uint64(8 * (_MERGE_AT % 8))
    low, high = states[number, word], states[number, word + 1]
    return (low >> shift) | (high << (np.uint64(64) - shift))


@_kernel("uint64(uint64[:,::1], int64, uint64)")
def _end_row(states: Any, number: Any, row_bytes: Any) -> Any:
    """Return the row's sum."""
    total = row_bytes * _START
    for lane in range(0, 8, 2):
        left = states[number, _LANES_AT + lane] ^ _merge_key(states, number, lane)
        right = states[number, _LANES_AT + lane + 1] ^ _merge_key(states, number, lane + 1)
        total += _fold(left, right)
    total ^= total >> np.uint64(37)
    total *= _AVALANCHE
    return total ^ (total >> np.uint64(32))


@_kernel("void(boolean, uint64[::1], uint64[::1], uint64, uint64[::1], uint64[::1])")
def _take_rows(
    is_copied: Any, targets: Any, sources: Any, row_bytes: Any, seeds: Any, sums: Any
) -> None:
    # No array is made or sliced for a row: counting its references takes a locked instruction,
    # which waits until all stores past the caches are done.
    states = np.empty((2, _LANES_AT + 8), np.uint64)
    key, lanes_at = np.uint64(states.ctypes.data), np.uint64(8 * _LANES_AT)
    state_bytes = lanes_at + np.uint64(64)
    # The last stripe is never part of a block, because it has its own key.
    blocks_end = (row_bytes - np.uint64(1)) // np.uint64(BLOCK_BYTES) * np.uint64(BLOCK_BYTES)
    for first in range(0, sources.size, 2):
        count = min(2, sources.size - first)
        for number in range(count):
            _begin_row(states, number, seeds[first + number])
        if count == 2:
            take_blocks_of_two(
                is_copied,
                targets[first],
                targets[first + 1],
                sources[first],
                sources[first + 1],
                blocks_end,
                key,
                key + state_bytes,
            )
        else:
            take_blocks(is_copied, targets[first], sources[first], blocks_end, key, key + lanes_at)
        for number in range(count):
            row, state = first + number, key + np.uint64(number) * state_bytes
            target, source = targets[row] + blocks_end, sources[row] + blocks_end
            ahead = sources[min(row + count, sources.size - 1)]
            rest, lanes = row_bytes - blocks_end, state + lanes_at
            take_rest(is_copied, target, source, ahead, rest, state, lanes)
            sums[row] = _end_row(states, number, row_bytes)
    _wait_for_stores()


Numbers = npt.NDArray[np.uint64]


def can_sum(row_bytes: int) -> bool:
    """Return whether rows of this size can be summed."""
    return _HAS_WIDE_REGISTERS and row_bytes >= SHORTEST_BYTES and row_bytes % STRIPE_BYTES == 0


def can_copy(row_bytes: int, targets: Numbers) -> bool:
    """Return whether rows of this size can be copied to these addresses."""
    return can_sum(row_bytes) and int(np.bitwise_or.reduce(targets)) % ALIGNMENT == 0


def sum_rows(sources: Numbers, row_bytes: int, seeds: Numbers) -> Numbers:
    """Return the XXH3-64 of the rows at these addresses, each with its seed.

    The addresses are not checked. Raises `ValueError` for sizes that `can_sum` refuses, and for
    lists that differ in length.
    """
    if not can_sum(row_bytes):
        raise ValueError(f"rows of {row_bytes} bytes: {_WANTED_SIZE}")
    if sources.size != seeds.size:
        raise ValueError("sources and seeds differ in number")
    sums = np.empty(sources.size, np.uint64)
    _take_rows(False, sources, sources, row_bytes, seeds, sums)
    return sums


def copy_rows(targets: Numbers, sources: Numbers, row_bytes: int, seeds: Numbers) -> Numbers:
    """Copy the row at `sources[i]` to `targets[i]`; return the XXH3-64 of each copy.

    Targets must not overlap. The addresses are not checked. Raises `ValueError` for sizes and
    addresses that `can_copy` refuses, and for lists that differ in length.
    """
    if not can_sum(row_bytes):
        raise ValueError(f"rows of {row_bytes} bytes: {_WANTED_SIZE}")
    if not targets.size == sources.size == seeds.size:
        raise ValueError("targets, sources and seeds differ in number")
    if not can_copy(row_bytes, targets):
        raise ValueError(f"rows are copied to multiples of {ALIGNMENT} only")
    sums = np.empty(sources.size, np.uint64)
    _take_rows(True, targets, sources, row_bytes, seeds, sums)
    return sums
