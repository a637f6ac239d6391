"""Copying pieces and computing their XXH3-64 in one pass, for memory that another process owns.

Each 64 bytes are loaded once, enter the checksum, and are stored: the sum is of what was copied,
whatever happens to the source meanwhile. The stores go past the caches (non-temporal): nobody
reads the target soon, and a cache line that is about to be overwritten need not be loaded first.
Both together make it faster than copying alone with `memcpy`, which does neither below some tens
of megabytes. The same pass without its stores sums what lies in a pool, which nobody has read of
late either.

XXH3 is Yann Collet's (https://github.com/Cyan4973/xxHash, doc/xxhash_spec.md, "XXH3 algorithm
(for inputs above 240 bytes)"): eight 64-bit lanes take stripes of 64 bytes, are scrambled after
each 1024, and are folded at the end. A seed changes the secret that the stripes are mixed with.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import njit, types
from numba.extending import intrinsic

ALIGNMENT = 16
"""Of target addresses: what non-temporal stores want, and what every allocator gives."""
PREFETCH_BYTES = 4096
"""How far ahead the source is asked for: the processor by itself stops at the end of a page."""
STRIPE_BYTES = 64
BLOCK_BYTES = 1024
SHORTEST_BYTES = 4096
"""Below this the one pass gains nothing; XXH3 itself is another function up to 240 bytes."""

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
"""Where in the secret the key is of the scramble, of the last stripe, and of the end."""

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
    """Load a stripe. The same bytes loaded again for another use may have changed in between."""
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
    # To be read, to stay in every cache, data. An address that is not mapped does no harm.
    options = (_INT32(0), _INT32(3), _INT32(1))
    builder.call(function, [builder.inttoptr(address, pointer), *options])


def _store_past_caches(builder: Any, value: Any, address: Any) -> None:
    store = builder.store(value, builder.inttoptr(address, _VECTOR.as_pointer()), align=ALIGNMENT)
    store.set_metadata("nontemporal", builder.module.add_metadata([_INT32(1)]))


def _take_stripe(builder: Any, target: Any | None, source: Any, key: Any, lanes: Any) -> Any:
    """The lanes after the stripe at `source`, which is stored at `target` if there is one."""
    data = _load_once(builder, source)
    _prefetch(builder, _plus(builder, source, PREFETCH_BYTES))
    if target is not None:
        _store_past_caches(builder, data, target)
    mixed = builder.xor(data, _load(builder, key))
    low, high = builder.and_(mixed, _all(0xFFFFFFFF)), builder.lshr(mixed, _all(32))
    swapped = builder.shuffle_vector(data, ir.Constant(_VECTOR, ir.Undefined), _NEIGHBOURS)
    return builder.add(lanes, builder.add(builder.mul(low, high), swapped))


def _emit_block(builder: Any, target: Any | None, source: Any, secret: Any, lanes_at: Any) -> None:
    """The 16 stripes of a block, then the scramble; every argument is an address."""
    lanes = _load(builder, lanes_at)
    for index in range(BLOCK_BYTES // STRIPE_BYTES):
        offset = STRIPE_BYTES * index
        to = None if target is None else _plus(builder, target, offset)
        key = _plus(builder, secret, 8 * index)
        lanes = _take_stripe(builder, to, _plus(builder, source, offset), key, lanes)
    lanes = builder.xor(lanes, builder.lshr(lanes, _all(47)))
    lanes = builder.xor(lanes, _load(builder, _plus(builder, secret, _SCRAMBLE_AT)))
    _store(builder, builder.mul(lanes, _all(_PRIME32_1)), lanes_at)


def _emit_one(builder: Any, target: Any | None, source: Any, key: Any, lanes_at: Any) -> None:
    """One stripe; every argument is an address."""
    _store(builder, _take_stripe(builder, target, source, key, _load(builder, lanes_at)), lanes_at)


@intrinsic  # type: ignore[untyped-decorator]
def _copy_block(typing: Any, target: Any, source: Any, secret: Any, lanes: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _emit_block(builder, *args)
        return context.get_dummy_value()

    return types.void(*[types.uint64] * 4), codegen


@intrinsic  # type: ignore[untyped-decorator]
def _sum_block(typing: Any, source: Any, secret: Any, lanes: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _emit_block(builder, None, *args)
        return context.get_dummy_value()

    return types.void(*[types.uint64] * 3), codegen


@intrinsic  # type: ignore[untyped-decorator]
def _copy_one(typing: Any, target: Any, source: Any, key: Any, lanes: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _emit_one(builder, *args)
        return context.get_dummy_value()

    return types.void(*[types.uint64] * 4), codegen


@intrinsic  # type: ignore[untyped-decorator]
def _sum_one(typing: Any, source: Any, key: Any, lanes: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _emit_one(builder, None, *args)
        return context.get_dummy_value()

    return types.void(*[types.uint64] * 3), codegen


@intrinsic  # type: ignore[untyped-decorator]
def _fold(typing: Any, left: Any, right: Any) -> Any:
    """Low and high half of the 128-bit product, one xor the other."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        left, right = (builder.zext(arg, _INT128) for arg in args)
        product = builder.mul(left, right)
        high = builder.trunc(builder.lshr(product, _INT128(64)), _INT64)
        return builder.xor(builder.trunc(product, _INT64), high)

    return types.uint64(types.uint64, types.uint64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def _wait_for_stores(typing: Any) -> Any:
    """Non-temporal stores are ordered by nothing else."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), codegen


@njit(  # type: ignore[untyped-decorator]
    "void(boolean, uint64, uint64, uint64, uint64[::1], uint64[::1], uint64[::1], uint64[::1])",
    nogil=True,
    cache=True,
    error_model="numpy",
)
def _take_rows(
    is_copied: Any,
    target_at: Any,
    source_at: Any,
    row_bytes: Any,
    targets: Any,
    sources: Any,
    seeds: Any,
    sums: Any,
) -> None:
    secret, lanes = np.empty(24, np.uint64), np.empty(8, np.uint64)
    key = np.uint64(secret.ctypes.data)
    end = secret.view(np.uint8)[_MERGE_AT : _MERGE_AT + 64]
    lanes_at, stripe = np.uint64(lanes.ctypes.data), np.uint64(STRIPE_BYTES)
    # The last stripe is never part of a block: its key is another.
    last_at = row_bytes - stripe
    blocks_end = last_at // np.uint64(BLOCK_BYTES) * np.uint64(BLOCK_BYTES)
    for index in range(targets.size):
        target, source = (
            target_at + targets[index] * row_bytes,
            source_at + sources[index] * row_bytes,
        )
        seed = seeds[index]
        for word in range(0, 24, 2):
            secret[word], secret[word + 1] = _SECRET[word] + seed, _SECRET[word + 1] - seed
        lanes[:] = _LANES
        at = np.uint64(0)
        while at < blocks_end:
            if is_copied:
                _copy_block(target + at, source + at, key, lanes_at)
            else:
                _sum_block(source + at, key, lanes_at)
            at += np.uint64(BLOCK_BYTES)
        stripe_key = key
        while at < last_at:
            if is_copied:
                _copy_one(target + at, source + at, stripe_key, lanes_at)
            else:
                _sum_one(source + at, stripe_key, lanes_at)
            at += stripe
            stripe_key += np.uint64(8)
        if is_copied:
            _copy_one(target + at, source + at, key + np.uint64(_LAST_AT), lanes_at)
        else:
            _sum_one(source + at, key + np.uint64(_LAST_AT), lanes_at)
        merged = end.copy().view(np.uint64)
        total = row_bytes * _START
        for pair in range(0, 8, 2):
            total += _fold(lanes[pair] ^ merged[pair], lanes[pair + 1] ^ merged[pair + 1])
        total ^= total >> np.uint64(37)
        total *= _AVALANCHE
        sums[index] = total ^ (total >> np.uint64(32))
    _wait_for_stores()


Numbers = npt.NDArray[np.uint64]


def can_sum(row_bytes: int) -> bool:
    """Whether rows of this size can be summed."""
    return _HAS_WIDE_REGISTERS and row_bytes >= SHORTEST_BYTES and row_bytes % STRIPE_BYTES == 0


def can_copy(target_at: int, row_bytes: int) -> bool:
    """Whether rows of this size can be copied to a table at this address."""
    return can_sum(row_bytes) and target_at % ALIGNMENT == 0


def sum_rows(source_at: int, row_bytes: int, sources: Numbers, seeds: Numbers) -> Numbers:
    """The XXH3-64 of row `sources[i]` of the table at this address, with `seeds[i]`.

    Nothing checks that the rows are there. Raises `ValueError` for what `can_sum` refuses, and for
    lists that differ in length.
    """
    if not can_sum(row_bytes):
        raise ValueError(f"rows of {row_bytes} bytes: {_WANTED_SIZE}")
    if sources.size != seeds.size:
        raise ValueError("sources and seeds differ in number")
    sums = np.empty(sources.size, np.uint64)
    _take_rows(False, 0, source_at, row_bytes, sources, sources, seeds, sums)
    return sums


def copy_summed(
    target_at: int,
    source_at: int,
    row_bytes: int,
    targets: Numbers,
    sources: Numbers,
    seeds: Numbers,
) -> Numbers:
    """Copy row `sources[i]` of the table at one address to row `targets[i]` of the other's.

    Returns the XXH3-64 of each copy, with its seed. Nothing checks that the rows are there. Raises
    `ValueError` for what `can_copy` refuses, and for lists that differ in length.
    """
    if not can_copy(target_at, row_bytes):
        raise ValueError(
            f"rows of {row_bytes} bytes to {target_at:#x}: {_WANTED_SIZE}, to a multiple of "
            f"{ALIGNMENT}"
        )
    if not targets.size == sources.size == seeds.size:
        raise ValueError("targets, sources and seeds differ in number")
    sums = np.empty(targets.size, np.uint64)
    _take_rows(True, target_at, source_at, row_bytes, targets, sources, seeds, sums)
    return sums
