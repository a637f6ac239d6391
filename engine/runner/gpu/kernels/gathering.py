"""Rows and KV blocks that do not lie together, moved to and from memory where they do."""

from __future__ import annotations

import triton
import triton.language as tl

from engine.runner.gpu.kernels.ordering import begin


@triton.jit
def gather_rows(source, rows, out, N: tl.constexpr, COLUMNS: tl.constexpr,
                IS_PROGRAMMATIC: tl.constexpr):  # fmt: skip
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
