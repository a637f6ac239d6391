"""Scattered rows and KV blocks, copied to and from contiguous memory."""

from __future__ import annotations

import triton
import triton.language as tl

from engine.runner.gpu.kernels.ordering import begin


@triton.jit
def gather_rows(
    source, rows, out, N: tl.constexpr, COLUMNS: tl.constexpr, IS_PROGRAMMATIC: tl.constexpr
):
    """Set out[i] = source[rows[i]], rows of N numbers. Program: i."""
    begin(IS_PROGRAMMATIC)
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + index).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    inside = columns < N
    values = tl.load(source + row * N + columns, mask=inside)
    tl.store(out + index * N + columns, values, mask=inside)


@triton.jit
def copy_blocks(pool, block_ids, host, host_ids, num_blocks, num_host_blocks, WORDS: tl.constexpr,
                SIZE: tl.constexpr, IS_OUT: tl.constexpr,
                IS_PROGRAMMATIC: tl.constexpr):  # fmt: skip
    """Copy blocks of one layer between its pool and pinned host memory, pairwise.

    `pool` is [2, num_blocks, WORDS] and `host` [2, num_host_blocks, WORDS], in words of 8 bytes; 2
    is key, value. With IS_OUT the pool is read. Program: (index of a block, part of SIZE words,
    kind).
    """
    begin(IS_PROGRAMMATIC)
    index = tl.program_id(0).to(tl.int64)
    kind = tl.program_id(2).to(tl.int64)
    block = tl.load(block_ids + index).to(tl.int64)
    word = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = word < WORDS
    there = pool + (kind * num_blocks + block) * WORDS + word
    host_block = tl.load(host_ids + index).to(tl.int64)
    here = host + (kind * num_host_blocks + host_block) * WORDS + word
    if IS_OUT:
        tl.store(here, tl.load(there, mask=inside), mask=inside)
    else:
        tl.store(there, tl.load(here, mask=inside), mask=inside)


@triton.jit
def copy_and_sum(source, source_ids, target, target_ids, sums, num_source_blocks, num_blocks,
                 WORDS: tl.constexpr, SIZE: tl.constexpr, IS_COPIED: tl.constexpr,
                 IS_SUMMED: tl.constexpr, IS_PROGRAMMATIC: tl.constexpr):  # fmt: skip
    """Copy blocks of one layer between two pools, pairwise, and sum their bytes; or only sum them.

    The pools are [2, blocks, WORDS] in words of 8 bytes; 2 is key, value. `sums` [2, number of ids,
    parts] of what was read: each word and its place in the block through the finaliser of
    SplitMix64, added modulo 2^64. Program: (index of a block, part of SIZE words, kind).
    """
    begin(IS_PROGRAMMATIC)
    index = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    kind = tl.program_id(2).to(tl.int64)
    word = part * SIZE + tl.arange(0, SIZE)
    inside = word < WORDS
    block = tl.load(source_ids + index).to(tl.int64)
    from_there = source + (kind * num_source_blocks + block) * WORDS + word
    values = tl.load(from_there, mask=inside, other=0)
    if IS_COPIED:
        target_block = tl.load(target_ids + index).to(tl.int64)
        tl.store(target + (kind * num_blocks + target_block) * WORDS + word, values, mask=inside)
    if IS_SUMMED:
        place = (word + 1).to(tl.uint64)
        mixed = values.to(tl.uint64, bitcast=True) + place * 0x9E3779B97F4A7C15
        mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9
        mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB
        mixed = mixed ^ (mixed >> 31)
        terms = tl.where(inside, mixed.to(tl.int64, bitcast=True), 0)
        at = (kind * tl.num_programs(0) + index) * tl.num_programs(1) + part
        tl.store(sums + at, tl.sum(terms, axis=0))
