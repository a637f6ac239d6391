"""Work on single rows: embedding, norms, rotation, and keys and values into the cache."""

from __future__ import annotations

import triton
import triton.language as tl

from engine.runner.gpu.kernels.ordering import begin
from engine.runner.gpu.kernels.slots import store_slots


@triton.jit
def normalised(row, weight, is_column, N: tl.constexpr, epsilon, kind: tl.constexpr):
    """Return the RMS-normalised float32 row in `kind`.

    It is rounded before the weight is applied too, unless weights are in float32.
    """
    scale = tl.rsqrt(tl.sum(row * row, 0) / N + epsilon)
    factor = tl.load(weight + is_column[1], mask=is_column[0], other=0.0).to(tl.float32)
    result = row * scale
    if weight.dtype.element_ty != tl.float32:
        result = result.to(kind).to(tl.float32)
    return (result * factor).to(kind)


@triton.jit
def _weighted(values, weights, kind: tl.constexpr):
    """Return the values times their weights in float32, rounded to `kind`.

    Values are rounded too, unless weights are in float32.
    """
    if weights.dtype.element_ty != tl.float32:
        values = values.to(kind).to(tl.float32)
    return (values * tl.load(weights).to(tl.float32)).to(kind).to(tl.float32)


@triton.jit
def embed(tokens, sources, drawn, table, scale, weight, hidden, normed, epsilon, N: tl.constexpr,
          COLUMNS: tl.constexpr, HAS_DRAWN: tl.constexpr,
          IS_PROGRAMMATIC: tl.constexpr):  # fmt: skip
    """Set hidden[row] = table[tokens[row]] * scale, and normed[row] to its norm. Program: row.

    The product is in float32, and rounded once; `scale` None: there is none. With HAS_DRAWN the
    token is drawn[sources[row]] where that source is not -1; a token of -1, of a row that was not
    finite, is taken for 0.
    """
    begin(IS_PROGRAMMATIC)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    inside = columns < N
    token = tl.load(tokens + row).to(tl.int64)
    if HAS_DRAWN:
        source = tl.load(sources + row).to(tl.int64)
        found = tl.load(drawn + source, mask=source >= 0, other=0).to(tl.int64)
        token = tl.where(source >= 0, tl.maximum(found, 0), token)
    values = tl.load(table + token * N + columns, mask=inside, other=0.0)
    if scale is not None:
        values = (values.to(tl.float32) * scale).to(hidden.dtype.element_ty)
    tl.store(hidden + row * N + columns, values, mask=inside)
    result = normalised(
        values.to(tl.float32), weight, (inside, columns), N, epsilon, normed.dtype.element_ty
    )
    tl.store(normed + row * N + columns, result, mask=inside)


@triton.jit
def norm(hidden, weight, normed, added_weight, epsilon, N: tl.constexpr, COLUMNS: tl.constexpr,
         IS_PROGRAMMATIC: tl.constexpr):  # fmt: skip
    """Set normed[row] to the RMS norm of hidden[row]. Program: row.

    With `added_weight` (None: nothing is added) the RMS norm of normed[row] with these weights is
    added to hidden[row] before, in float32, and the sum is rounded once.
    """
    begin(IS_PROGRAMMATIC)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    inside = columns < N
    values = tl.load(hidden + row * N + columns, mask=inside, other=0.0).to(tl.float32)
    if added_weight is not None:
        added = tl.load(normed + row * N + columns, mask=inside, other=0.0).to(tl.float32)
        values += normalised(added, added_weight, (inside, columns), N, epsilon, tl.float32)
        total = values.to(hidden.dtype.element_ty)
        tl.store(hidden + row * N + columns, total, mask=inside)
        values = total.to(tl.float32)
    result = normalised(values, weight, (inside, columns), N, epsilon, normed.dtype.element_ty)
    tl.store(normed + row * N + columns, result, mask=inside)


@triton.jit
def rotate_and_store(qkv, bias, query_weight, key_weight, divisors, angles, positions, slots,
                     queries, keys, values, key_scales, value_scales, epsilon, num_rows,
                     HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
                     BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_NORMS: tl.constexpr,
                     HAS_SCALES: tl.constexpr, HAS_DIVISORS: tl.constexpr, TILE: tl.constexpr,
                     IS_PROGRAMMATIC: tl.constexpr):  # fmt: skip
    """Norm and rotate query and key heads, and write keys and values into their slots.

    One program is one head of TILE rows of qkv [rows, (HEADS + 2 KV_HEADS) DIM], to which the bias
    [(HEADS + 2 KV_HEADS) DIM] is added first, in float32. `angles` holds cosines, then sines,
    [positions, DIM] in float32. `kernels/slots.py` has the stored form; a slot is block * BLOCK +
    offset, and -1 writes nothing (padding). Keys are divided by powers of two [KV_HEADS, DIM / 2],
    one for each rotary pair, and queries multiplied by them.
    """
    begin(IS_PROGRAMMATIC)
    row = (tl.program_id(0) * TILE + tl.arange(0, TILE)).to(tl.int64)
    head = tl.program_id(1)
    is_row = row < num_rows
    HALF: tl.constexpr = DIM // 2
    lane = tl.arange(0, HALF)
    kind = queries.dtype.element_ty
    source = qkv + (row * (HEADS + 2 * KV_HEADS) + head)[:, None] * DIM + lane[None, :]
    low = tl.load(source, mask=is_row[:, None], other=0.0).to(tl.float32)
    high = tl.load(source + HALF, mask=is_row[:, None], other=0.0).to(tl.float32)
    if HAS_BIAS:
        added = bias + head * DIM + lane
        low = low + tl.load(added).to(tl.float32)[None, :]
        high = high + tl.load(added + HALF).to(tl.float32)[None, :]
    slot = tl.load(slots + row, mask=is_row, other=-1).to(tl.int64)
    own = slot // BLOCK * KV_HEADS
    if head < HEADS + KV_HEADS:
        if HAS_NORMS:
            weight = query_weight if head < HEADS else key_weight
            square = tl.sum(low * low, 1) + tl.sum(high * high, 1)
            scale = tl.rsqrt(square / DIM + epsilon)[:, None]
            low = _weighted(low * scale, (weight + lane)[None, :], kind)
            high = _weighted(high * scale, (weight + HALF + lane)[None, :], kind)
        position = tl.load(positions + row, mask=is_row, other=0).to(tl.int64)
        angle = angles + tl.maximum(position, 0)[:, None] * DIM + lane[None, :]
        cosine = tl.load(angle)
        sine = tl.load(angle + HALF)
        first = low * cosine - high * sine
        second = high * cosine + low * sine
        if head < HEADS:
            if HAS_DIVISORS:
                divisor = tl.load(divisors + head // (HEADS // KV_HEADS) * HALF + lane)[None, :]
                first = first * divisor
                second = second * divisor
            target = queries + (row * HEADS + head)[:, None] * DIM + lane[None, :]
            tl.store(target, first.to(kind), mask=is_row[:, None])
            tl.store(target + HALF, second.to(kind), mask=is_row[:, None])
        else:
            if HAS_DIVISORS:
                divisor = tl.load(divisors + (head - HEADS) * HALF + lane)[None, :]
                first = tl.math.div_rn(first, tl.zeros_like(first) + divisor)
                second = tl.math.div_rn(second, tl.zeros_like(second) + divisor)
            store_slots(
                keys, key_scales, own + head - HEADS, slot % BLOCK, slot >= 0, first, second,
                BLOCK, DIM, HAS_SCALES,
            )  # fmt: skip
    else:
        store_slots(
            values, value_scales, own + head - HEADS - KV_HEADS, slot % BLOCK, slot >= 0, low, high,
            BLOCK, DIM, HAS_SCALES,
        )  # fmt: skip
