"""The launches of draws under top-k, top-p and min-p, between `draw_slices` and `choose`.

They are always four, and their grids follow from the number of rows. A row without filters has a
filter temperature of 0, with which a program returns at once; a row under filters has a temperature
of 0 in `draw_slices`, which then finds its largest logits.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from common.request import GREEDY_BELOW
from engine.runner.gpu.kernels import filters
from engine.runner.gpu.launches import DRAW_SLICE, Bound, Launches
from engine.runner.gpu.steps.staging import Staging
from engine.runner.gpu.steps.step_memory import StepMemory

LEFT_TO_HOST: int = filters.LEFT_TO_HOST.value
"""The token of a row that the filters leave to the host."""

_TYPES = {
    "logits": "*fp32", "temperatures": "*fp32", "seeds": "*i64", "indices": "*i32",
    "top_ks": "*i32", "top_ps": "*fp64", "deepests": "*fp64", "best_scores": "*fp64",
    "best_tokens": "*i32", "slices": "i32", "counts": "*i32", "weights": "*fp64", "cuts": "*i32",
    "totals": "*fp64", "listed": "*i32", "keys": "*i64",
}  # fmt: skip


class FilteredDraw(NamedTuple):
    """Addresses of the inputs and outputs of a draw under filters, apart from its own memory.

    Arrays by row: logits, temperatures (0: no filters), seeds, indices of draws, `top_ks` (0: all),
    `top_ps`, and the largest depths that min-p keeps. Arrays by slice of a row: the best scores and
    tokens.
    """

    logits: int
    temperatures: int
    seeds: int
    indices: int
    top_ks: int
    top_ps: int
    deepests: int
    best_scores: int
    best_tokens: int


def filtered_draw(
    staging: Staging, logits: int, *, seeds: int, indices: int, best: tuple[int, int]
) -> FilteredDraw:
    """Return the draw of rows whose filters `put_filters` writes; `best` are scores and tokens."""
    return FilteredDraw(
        logits=logits,
        temperatures=staging["filter_temperatures"],
        seeds=seeds,
        indices=indices,
        top_ks=staging["top_ks"],
        top_ps=staging["top_ps"],
        deepests=staging["deepests"],
        best_scores=best[0],
        best_tokens=best[1],
    )


def staged_filters(num_rows: int) -> dict[str, tuple[int, ...]]:
    """Return the arrays of `Staging` that `put_filters` writes."""
    return {
        "filter_temperatures": (num_rows,), "top_ks": (num_rows,), "top_ps": (num_rows, 2),
        "deepests": (num_rows, 2),
    }  # fmt: skip


def buffer_sizes(num_rows: int, num_slices: int) -> dict[str, int]:
    """Return the bytes of the filters' own memory, for `bind_filters`."""
    slices = num_rows * num_slices
    return {
        "counts": 4 * slices * filters.BINS.value, "weights": 8 * slices, "cuts": 4 * num_rows,
        "totals": 8 * num_rows, "listed": 4 * num_rows, "keys": 8 * num_rows * filters.LIST.value,
    }  # fmt: skip


def has_filters(ways: np.ndarray, vocab_size: int) -> np.ndarray:
    """Return which rows of `SAMPLING_COLUMNS` are drawn under a filter, bool `[rows]`."""
    found: np.ndarray = (ways["temperature"] >= GREEDY_BELOW) & (
        ((ways["top_k"] > 0) & (ways["top_k"] < vocab_size))
        | (ways["top_p"] < 1.0)
        | (ways["min_p"] > 0.0)
    )
    return found


def put_filters(
    staging: Staging, ways: np.ndarray, is_filtered: np.ndarray, vocab_size: int
) -> None:
    """Stage the filters of rows of `SAMPLING_COLUMNS`; a row without filters gets none."""
    temperatures = np.where(is_filtered, ways["temperature"], 0.0).astype(np.float32)
    top_ks = np.where(ways["top_k"] < vocab_size, ways["top_k"], 0)
    # The logarithm of the host's filters, to the bit.
    deepests = np.array([-math.log(one) if one > 0 else math.inf for one in ways["min_p"].tolist()])
    staging.put("filter_temperatures", temperatures.view(np.int32))
    staging.put("top_ks", top_ks)
    for name, values in (("top_ps", ways["top_p"]), ("deepests", deepests)):
        staging.put(name, np.ascontiguousarray(values).view(np.int32).reshape(-1, 2))


def _sliced(make: Launches) -> dict[str, int]:
    return {"VOCABULARY": make.spec.vocab_size, "SLICE": DRAW_SLICE}


def bind_weigh(
    make: Launches, logits: int, temperatures: int, best_scores: int, memory: StepMemory,
    num_rows: int,
) -> Bound:  # fmt: skip
    """Return the launch that counts and weighs the tokens of each slice of each row."""
    slices = make.num_slices
    constants = {**_sliced(make), "PARTS": 1 << (slices - 1).bit_length()}
    return make.kernel(filters.weigh, _TYPES, constants, 4, 1).bind(
        (num_rows, slices), logits, temperatures, best_scores, memory["counts"], memory["weights"],
        slices,
    )  # fmt: skip


def bind_filters(
    make: Launches, draw: FilteredDraw, memory: StepMemory, num_rows: int
) -> tuple[Bound, ...]:
    """Return the launches; `memory` has the buffers of `buffer_sizes`.

    Afterwards the first slice of a row under filters has the best score, with the drawn token or
    `LEFT_TO_HOST`; slices of a row with NaN or infinity are unchanged.
    """
    slices = make.num_slices
    sliced, parts = _sliced(make), {"PARTS": 1 << (slices - 1).bit_length()}
    cut = make.kernel(filters.cut, _TYPES, parts, 8, 1)
    list_kept = make.kernel(filters.list_kept, _TYPES, sliced | parts, 4, 1)
    draw_kept = make.kernel(filters.draw_kept, _TYPES, {}, 8, 1)
    whole, each = (num_rows, slices), (num_rows,)
    counted = (memory["counts"], memory["weights"])
    bounds = (draw.top_ks, draw.top_ps, draw.deepests)
    listed = (memory["listed"], memory["keys"])
    return (
        bind_weigh(make, draw.logits, draw.temperatures, draw.best_scores, memory, num_rows),
        cut.bind(
            each, draw.temperatures, *bounds, draw.best_scores, *counted, slices, memory["cuts"],
            memory["totals"], memory["listed"],
        ),
        list_kept.bind(
            whole, draw.logits, draw.temperatures, draw.best_scores, slices, memory["cuts"],
            *listed,
        ),
        draw_kept.bind(
            each, draw.temperatures, draw.seeds, draw.indices, *bounds, memory["cuts"],
            memory["totals"], *listed, draw.best_scores, draw.best_tokens, slices,
        ),
    )  # fmt: skip
