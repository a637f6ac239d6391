"""A mixture of experts: each row's experts are chosen, and multiplied expert by expert.

Rows are numbered with the experts that they are sent to: *slot* `row * num_chosen + n` is a row's
n-th expert, in ascending order of their numbers. `order` has all slots sorted by expert, and those
of an expert by row. So the rows of an expert are multiplied together, its weights are read once for
them, and weights of experts without rows are not read.

An element of a product is one chain whatever rows are multiplied beside it, and a row's experts are
added in ascending order of their numbers, each times its weight. So a row's result does not depend
on the rows that are sent to the same experts.

What a product with an expert needs beside its weights is small: the inputs of up to `BAND_ROWS`
rows, which each member gathers into a `scratch` of its own, and then their outputs there. Only what
is between gate and down is kept for all slots.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from engine.runner.kernels.norms import ROWS_PER_SHARE
from engine.runner.kernels.products.byte_rows import BYTES_PER_VALUE
from engine.runner.kernels.products.linear import (
    BYTES,
    GATED_TILES,
    OUTPUTS,
    gated_share,
    linear_share,
    widening_scratch,
)
from engine.runner.kernels.products.panel_product import TILE_ROWS
from engine.runner.kernels.team import SHARES_PER_THREAD, claim, finish, wait_for_all
from engine.runner.kernels.vector_ir import LANES
from engine.runner.kernels.vector_math import exponential

BAND_ROWS = 64
"""Rows of an expert that are multiplied with its weights at a time."""
_VALUES_PER_FLOAT = 4 // BYTES_PER_VALUE
"""Values of a row in int8 that take as much of a buffer as a float."""


class ExpertTables(NamedTuple):
    """A layer's experts and their gate.

    `gate_up` has gate and up of each expert, in turn, and `down` one matrix of each. Their biases
    are `[experts, 2 · inner size]`, those of gate and up alternating, sixteen at a time, and
    `[experts, hidden size]`; empty: there are none. `activation` is as in
    `products.linear.gated_linear`. Scores are softmax values or, if it `is_sigmoid`, sigmoids, of
    products with `expert_gate` plus `gate_bias` (empty: none). Those of the chosen experts are
    divided by their sum, at least `least_sum`, where it `is_normalised`, and multiplied by
    `weight_scale`. `choice_bias`, empty or a number for each expert, is added to the scores to
    choose by.
    """

    expert_gate: np.ndarray
    gate_bias: np.ndarray
    choice_bias: np.ndarray
    gate_up: np.ndarray
    gate_up_bias: np.ndarray
    down: np.ndarray
    down_bias: np.ndarray
    activation: int
    is_sigmoid: bool
    is_normalised: bool
    least_sum: np.float32
    weight_scale: np.float32


class ExpertBuffers(NamedTuple):
    """Memory of a step. `chosen` (int32) and `weights` are `[rows, chosen experts]`.

    `scores` is `[rows, experts]`, `order` int32 `[slots]`, `ends` int32 `[experts]`: where the
    slots of each expert end in `order`. `gated` is `[slots, inner size]`, in this order,
    `shared_gated` `[rows, inner size]` of the shared MLP, and `scratch` `[members, floats]`.
    """

    scores: np.ndarray
    chosen: np.ndarray
    weights: np.ndarray
    order: np.ndarray
    ends: np.ndarray
    gated: np.ndarray
    shared_gated: np.ndarray
    scratch: np.ndarray


def scratch_floats(hidden_size: int, num_rows: int) -> int:
    """Return the floats of a member's scratch in steps of at most so many rows."""
    return min(num_rows, BAND_ROWS) * hidden_size


@njit(nogil=True, cache=True, error_model="numpy")
def _softmax(values) -> None:  # type: ignore[no-untyped-def]
    """Replace a few values by their softmax, computed in float32 and in their order."""
    largest = values[0]
    for i in range(values.shape[0]):
        largest = max(largest, values[i])
    total = np.float32(0)
    for i in range(values.shape[0]):
        values[i] = exponential(values[i] - largest)
        total += values[i]
    for i in range(values.shape[0]):
        values[i] /= total


@njit(nogil=True, cache=True, error_model="numpy")
def _sigmoids(values) -> None:  # type: ignore[no-untyped-def]
    """Replace a few values by their sigmoids, computed in float32."""
    one = np.float32(1)
    for i in range(values.shape[0]):
        values[i] = one / (one + exponential(-values[i]))


@njit(nogil=True, cache=True, error_model="numpy")
def _wanted(scores, bias, expert):  # type: ignore[no-untyped-def]
    return scores[expert] + bias[expert] if bias.size else scores[expert]


@njit(nogil=True, cache=True, error_model="numpy")
def _choose(scores, bias, chosen) -> None:  # type: ignore[no-untyped-def]
    """Write the experts with the highest scores, of equal ones the first, in ascending order.

    Scores that are not numbers choose experts, too: all different ones.
    """
    for expert in range(scores.shape[0]):
        wanted = _wanted(scores, bias, expert)
        index = min(expert, chosen.shape[0])
        while index > 0 and wanted > _wanted(scores, bias, chosen[index - 1]):
            if index < chosen.shape[0]:
                chosen[index] = chosen[index - 1]
            index -= 1
        if index < chosen.shape[0]:
            chosen[index] = expert
    for end in range(1, chosen.shape[0]):
        for index in range(end, 0, -1):
            before, number = chosen[index - 1], chosen[index]
            chosen[index - 1], chosen[index] = min(before, number), max(before, number)


@njit(nogil=True, cache=True, error_model="numpy")
def _weigh(scores, chosen, tables, weights) -> None:  # type: ignore[no-untyped-def]
    total = np.float32(0)
    for n in range(chosen.shape[0]):
        weights[n] = scores[chosen[n]]
        total += weights[n]
    if tables.is_normalised:
        divisor = tables.least_sum if total < tables.least_sum else total
        for n in range(chosen.shape[0]):
            weights[n] /= divisor
    for n in range(chosen.shape[0]):
        weights[n] *= tables.weight_scale


@njit(nogil=True, cache=True, error_model="numpy")
def choice_phase(counters, tables, buffers) -> None:  # type: ignore[no-untyped-def]
    """Choose and weigh each row's experts by a team; `scores` has its products with their gate."""
    scores, chosen, weights = buffers.scores, buffers.chosen, buffers.weights
    num_rows = scores.shape[0]
    num_shares = -(-num_rows // ROWS_PER_SHARE)
    share = claim(counters)
    while share < num_shares:
        for row in range(share * ROWS_PER_SHARE, min(num_rows, (share + 1) * ROWS_PER_SHARE)):
            if tables.is_sigmoid:
                _sigmoids(scores[row])
            else:
                _softmax(scores[row])
            _choose(scores[row], tables.choice_bias, chosen[row])
            _weigh(scores[row], chosen[row], tables, weights[row])
        finish(counters)
        share = claim(counters)
    wait_for_all(counters, num_shares)


@njit(nogil=True, cache=True, error_model="numpy")
def order_phase(counters, buffers) -> None:  # type: ignore[no-untyped-def]
    """Write `order` and `ends`: one member counts."""
    if claim(counters) == 0:
        experts, order, ends = buffers.chosen.reshape(-1), buffers.order, buffers.ends
        ends[:] = 0
        for slot in range(experts.shape[0]):
            ends[experts[slot]] += 1
        begin = 0
        for expert in range(ends.shape[0]):
            count = ends[expert]
            ends[expert] = begin
            begin += count
        for slot in range(experts.shape[0]):
            expert = experts[slot]
            order[ends[expert]] = slot
            ends[expert] += 1
        finish(counters)
    wait_for_all(counters, 1)


@njit(nogil=True, cache=True, error_model="numpy")
def _first_slot(ends, expert):  # type: ignore[no-untyped-def]
    return ends[expert - 1] if expert > 0 else 0


@njit(nogil=True, cache=True, error_model="numpy")
def _parts(ends, expert, num_panels, num_wanted):  # type: ignore[no-untyped-def]
    """Return in how many shares an expert's panels are divided: in proportion to its slots."""
    count = ends[expert] - _first_slot(ends, expert)
    return min(num_panels, -(-num_wanted * count // ends[-1]))


@njit(nogil=True, cache=True, error_model="numpy")
def _bias_of(biases, expert):  # type: ignore[no-untyped-def]
    """Return an expert's biases, none of an empty array."""
    return biases[expert] if biases.size else biases.reshape(-1)


@njit(nogil=True, cache=True, error_model="numpy")
def _gather(source, slots, num_chosen, target) -> None:  # type: ignore[no-untyped-def]
    for n in range(slots.shape[0]):
        target[n] = source[slots[n] // num_chosen]


@njit(nogil=True, cache=True, error_model="numpy")
def _in_int8(quantised, num_rows, depth):  # type: ignore[no-untyped-def]
    """Return rows in int8 as the buffer has them, `[rows, …]` floats; none of an empty buffer."""
    if quantised.size == 0:
        return quantised
    width = depth // _VALUES_PER_FLOAT
    return quantised.reshape(-1)[: num_rows * width].reshape((num_rows, width))


@njit(nogil=True, cache=True, error_model="numpy")
def _gated_of_expert(  # type: ignore[no-untyped-def]
    normed, rows_in_int8, gate, up, bias, activation, slots, num_chosen, gated, scratch, first,
    last, tiles, widened,
) -> None:  # fmt: skip
    """Compute the columns of panels `first` to `last` for an expert's slots."""
    has_bytes = gate[BYTES] != 0 and up[BYTES] != 0
    source = rows_in_int8 if has_bytes else normed
    width = source.shape[1]
    for begin in range(0, slots.shape[0], BAND_ROWS):
        end = min(slots.shape[0], begin + BAND_ROWS)
        x = scratch[: (end - begin) * width].reshape((end - begin, width))
        _gather(source, slots[begin:end], num_chosen, x)
        out = gated[begin:end]
        gated_share(x, x, gate, up, bias, activation, out, first, last, tiles, widened)


# A share is a range of an expert's panels, so that its rows are gathered few times. Experts with
# many rows are divided into more shares than others.
@njit(nogil=True, cache=True, error_model="numpy")
def expert_gated_phase(  # type: ignore[no-untyped-def]
    counters, normed, quantised, tables, buffers, member, num_threads
) -> None:
    """Compute a team's `activation` of gate and up of all slots."""
    gate_up, order, ends, scratch = tables.gate_up, buffers.order, buffers.ends, buffers.scratch
    num_rows, depth = normed.shape
    num_chosen = buffers.chosen.shape[1]
    rows_in_int8 = _in_int8(quantised, num_rows, depth)
    num_panels, num_wanted = gate_up[0, OUTPUTS] // LANES, SHARES_PER_THREAD * num_threads
    tiles = np.empty((GATED_TILES, TILE_ROWS, LANES), np.float32)
    widened = widening_scratch(gate_up, num_rows)
    share, first_share = claim(counters), 0
    for expert in range(ends.shape[0]):
        begin, end = _first_slot(ends, expert), ends[expert]
        parts = _parts(ends, expert, num_panels, num_wanted)
        while share < first_share + parts:
            part = share - first_share
            _gated_of_expert(
                normed, rows_in_int8, gate_up[2 * expert], gate_up[2 * expert + 1],
                _bias_of(tables.gate_up_bias, expert), tables.activation, order[begin:end],
                num_chosen, buffers.gated[begin:end], scratch[member],
                num_panels * part // parts, num_panels * (part + 1) // parts, tiles, widened,
            )  # fmt: skip
            finish(counters)
            share = claim(counters)
        first_share += parts
    wait_for_all(counters, first_share)


@njit(nogil=True, cache=True, error_model="numpy")
def _add_weighted(outputs, slots, weights, hidden, first, last) -> None:  # type: ignore[no-untyped-def]
    """Add columns `first` to `last` of an expert's outputs to its rows."""
    num_chosen = weights.shape[1]
    for n in range(slots.shape[0]):
        row = slots[n] // num_chosen
        weight = weights[row, slots[n] % num_chosen]
        source, target = outputs[n, first:last], hidden[row, first:last]
        for i in range(last - first):
            target[i] += weight * source[i]


# A share is a range of columns of all experts, which one member adds in the order of their numbers.
@njit(nogil=True, cache=True, error_model="numpy")
def expert_down_phase(  # type: ignore[no-untyped-def]
    counters, hidden, quantised, tables, buffers, member, num_threads
) -> None:
    """Add a team's `down(gated)` of all slots to their rows of `hidden`, each times its weight."""
    down, order, ends, gated = tables.down, buffers.order, buffers.ends, buffers.gated
    width = hidden.shape[1]
    num_pairs = (width // LANES + 1) // 2
    num_shares = min(num_pairs, SHARES_PER_THREAD * num_threads)
    slots_in_int8 = _in_int8(quantised, gated.shape[0], gated.shape[1])
    tiles = np.empty((2, TILE_ROWS, LANES), np.float32)
    widened = widening_scratch(down, hidden.shape[0])
    scratch = buffers.scratch[member]
    none = hidden[:0]
    share = claim(counters)
    while share < num_shares:
        first, last = num_pairs * share // num_shares, num_pairs * (share + 1) // num_shares
        for expert in range(ends.shape[0]):
            for begin in range(_first_slot(ends, expert), ends[expert], BAND_ROWS):
                end = min(ends[expert], begin + BAND_ROWS)
                out = scratch[: (end - begin) * width].reshape((end - begin, width))
                linear_share(
                    gated[begin:end], slots_in_int8[begin:end], down[expert : expert + 1],
                    _bias_of(tables.down_bias, expert), none, out, first, last, tiles, widened,
                )  # fmt: skip
                _add_weighted(
                    out, order[begin:end], buffers.weights, hidden, 2 * LANES * first,
                    min(width, 2 * LANES * last),
                )  # fmt: skip
        finish(counters)
        share = claim(counters)
    wait_for_all(counters, num_shares)
