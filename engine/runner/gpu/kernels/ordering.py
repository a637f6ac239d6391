"""Programmatic launches: the next kernel's programs start while this kernel still runs.

A kernel that is launched so calls `begin`: programs of its successor may start from there on, and
its own wait until the predecessor has ended and its results are visible. Work that does not depend
on the predecessor, such as prefetching weights, comes before. Every kernel waits, so when a kernel
has ended, all earlier ones have ended too.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def begin(IS_PROGRAMMATIC: tl.constexpr):
    if IS_PROGRAMMATIC:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def prefetch_rows(weights, rows, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Ask for the first COLUMNS elements of each row [WIDTH] to come into the L2 cache."""
    LINE: tl.constexpr = 1024 // weights.dtype.element_ty.primitive_bitwidth
    columns = tl.arange(0, COLUMNS // LINE) * LINE
    addresses = weights + rows[:, None].to(tl.int64) * WIDTH + columns[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [addresses],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
