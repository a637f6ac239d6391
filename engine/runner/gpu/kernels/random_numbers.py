"""Random numbers for weights that are made on the card, from a seed."""

from __future__ import annotations

import triton
import triton.language as tl

from engine.runner.gpu.kernels.draw import philox_words


@triton.jit
def fill_normal(out, seed, scale, count, SIZE: tl.constexpr):
    """Set out[i] to `scale` times a normal number of (seed, i) alone (Box and Muller, 1958)."""
    block = (tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)).to(tl.uint32)
    a, b, c, d = philox_words(block, tl.program_id(1).to(tl.uint32), seed)
    unit = 2.3283064365386963e-10
    radius = tl.sqrt(-2.0 * tl.log((a.to(tl.float32) + 0.5) * unit))
    other = tl.sqrt(-2.0 * tl.log((c.to(tl.float32) + 0.5) * unit))
    turn = 6.283185307179586 * unit
    place = block.to(tl.int64) * 4
    kind = out.dtype.element_ty
    x = scale * radius * tl.cos(b.to(tl.float32) * turn)
    y = scale * radius * tl.sin(b.to(tl.float32) * turn)
    z = scale * other * tl.cos(d.to(tl.float32) * turn)
    w = scale * other * tl.sin(d.to(tl.float32) * turn)
    tl.store(out + place, x.to(kind), mask=place < count)
    tl.store(out + place + 1, y.to(kind), mask=place + 1 < count)
    tl.store(out + place + 2, z.to(kind), mask=place + 2 < count)
    tl.store(out + place + 3, w.to(kind), mask=place + 3 < count)


@triton.jit
def fill_bytes(out, seed, count, mask, SIZE: tl.constexpr):
    """Set out[i] to a random word of 32 bits of (seed, i), of which those in `mask` are kept."""
    block = (tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)).to(tl.uint32)
    a, b, c, d = philox_words(block, tl.program_id(1).to(tl.uint32), seed)
    place = block.to(tl.int64) * 4
    kept = mask.to(tl.uint32)
    tl.store(out + place, a & kept, mask=place < count)
    tl.store(out + place + 1, b & kept, mask=place + 1 < count)
    tl.store(out + place + 2, c & kept, mask=place + 2 < count)
    tl.store(out + place + 3, d & kept, mask=place + 3 < count)
