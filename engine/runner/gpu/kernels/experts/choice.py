"""Which experts a row is sent to, and the sum of what they return."""

from __future__ import annotations

import triton
import triton.language as tl

from engine.runner.gpu.kernels.ordering import begin
from engine.runner.gpu.kernels.rows import normalised

_LEAST: tl.constexpr = tl.constexpr(-3.0e38)
"""What stands for a score that is NaN: a row that is not finite has experts all the same."""


@triton.jit
def _chosen(wanted, is_expert, lane, CHOSEN: tl.constexpr, LANES: tl.constexpr):
    """Return 1 for each of the CHOSEN experts that are wanted most, of equal ones the first."""
    taken = tl.zeros((LANES,), tl.int32)
    for _ in range(CHOSEN):
        is_free = is_expert & (taken == 0)
        most = tl.max(tl.where(is_free, wanted, float("-inf")), 0)
        first = tl.min(tl.where(is_free & (wanted == most), lane, LANES), 0)
        taken = tl.where(lane == first, 1, taken)
    return taken


@triton.jit
def choose_experts(products, gate_bias, bias, positions, experts, weights, least_sum, weight_scale,
                   EXPERTS: tl.constexpr, LANES: tl.constexpr, PARTS: tl.constexpr,
                   CHOSEN: tl.constexpr, HAS_BIAS: tl.constexpr, IS_NORMALISED: tl.constexpr,
                   IS_SIGMOID: tl.constexpr, IS_PROGRAMMATIC: tl.constexpr):  # fmt: skip
    """Set experts[row] [CHOSEN], in ascending order, and their weights. Program: row.

    `products` [rows, PARTS * EXPERTS] are those with the gate of the experts, in float32; of a gate
    in float32 they are sums of three parts. `gate_bias` is added to them, and `bias` to the scores
    by which experts are chosen. A row of padding, at position -1, is sent to no expert: its experts
    are EXPERTS, which no expert's number is. `gate_bias` and `weight_scale` may be None.
    """
    begin(IS_PROGRAMMATIC)
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    is_expert = lane < EXPERTS
    places = products + row * (PARTS * EXPERTS) + lane
    product = tl.load(places, mask=is_expert, other=float("-inf"))
    if PARTS == 3:
        middle = tl.load(places + EXPERTS, mask=is_expert, other=0.0)
        product += middle + tl.load(places + 2 * EXPERTS, mask=is_expert, other=0.0)
    if gate_bias is not None:
        product += tl.load(gate_bias + lane, mask=is_expert, other=0.0)
    if IS_SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-product))
    else:
        shares = tl.exp(product - tl.max(product, 0))
        scores = shares / tl.sum(shares, 0)
    wanted = scores
    if HAS_BIAS:
        wanted += tl.load(bias + lane, mask=is_expert, other=0.0)
    wanted = tl.where(wanted == wanted, wanted, _LEAST)
    taken = _chosen(wanted, is_expert, lane, CHOSEN, LANES)
    kept = tl.where(taken != 0, scores, 0.0)
    if IS_NORMALISED:
        kept = kept / tl.maximum(tl.sum(kept, 0), least_sum)
    if weight_scale is not None:
        kept = kept * weight_scale
    slot = tl.cumsum(taken, 0) - 1
    numbers = tl.where(tl.load(positions + row) >= 0, lane, EXPERTS)
    tl.store(experts + row * CHOSEN + slot, numbers, mask=taken != 0)
    tl.store(weights + row * CHOSEN + slot, kept, mask=taken != 0)


@triton.jit
def add_experts(hidden, results, experts, weights, shared, norm_weight, normed, epsilon,
                N: tl.constexpr, COLUMNS: tl.constexpr, EXPERTS: tl.constexpr,
                CHOSEN: tl.constexpr, HAS_SHARED: tl.constexpr,
                IS_PROGRAMMATIC: tl.constexpr):  # fmt: skip
    """Add to hidden[row] its experts' results, and set normed[row] to its norm. Program: row.

    `results` [rows * CHOSEN, N] are added in ascending order of the experts, each times its weight,
    and then the `shared` MLP's [rows, N], all in float32: the sum and the row are rounded once.
    """
    begin(IS_PROGRAMMATIC)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    inside = columns < N
    kind = hidden.dtype.element_ty
    total = tl.zeros((COLUMNS,), tl.float32)
    for slot in range(CHOSEN):
        pair = row * CHOSEN + slot
        is_sent = inside & (tl.load(experts + pair) < EXPERTS)
        result = tl.load(results + pair * N + columns, mask=is_sent, other=0.0)
        total += tl.load(weights + pair) * result.to(tl.float32)
    if HAS_SHARED:
        result = tl.load(shared + row * N + columns, mask=inside, other=0.0)
        total += result.to(tl.float32)
    before = tl.load(hidden + row * N + columns, mask=inside, other=0.0).to(tl.float32)
    values = (before + total).to(kind)
    tl.store(hidden + row * N + columns, values, mask=inside)
    result = normalised(values.to(tl.float32), norm_weight, (inside, columns), N, epsilon, kind)
    tl.store(normed + row * N + columns, result, mask=inside)
