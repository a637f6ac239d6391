"""Where the time of a step of one row goes, beside the time that reading its weights takes.

A step of one row reads every weight once, so on a machine whose memory is the limit it takes the
time of that reading. What it takes longer than that is told by parts, microseconds each:

    step_us       the step: one sequence at 128 tokens, greedy
    layers_us     its layers; of them
    products_us   products with the layers' weights, measured by themselves, one after the other
    head_us       final norm and logits
    other_us      the rest: Python between the layers, laying out, the draw
    read_us       reading as many bytes as the step's weights and keys have, at `read_gb_s`
    read_gb_s     streaming reads of memory larger than the caches, all threads, 10^9 bytes/s
    read_share    read_us / step_us: how much of the measured bandwidth the step reaches
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit, prange

from engine.runner.cpu.decoder import NumbaDecoder
from engine.runner.cpu.layer_weights import NONE_1D, NONE_2D
from engine.runner.kernels.products.linear import DEPTH, OUTPUTS, linear
from engine.runner.kernels.products.packed import PackedWeight

CONTEXT = 128
_ROUNDS = 40
_READ_BYTES = 1 << 30
_READS = 5


@njit(nogil=True, cache=True, parallel=True)  # type: ignore[untyped-decorator]
def _read(words: np.ndarray, num_threads: int) -> int:
    """Return the sum of `words`, each thread's part read from its beginning to its end."""
    total = 0
    for thread in prange(num_threads):
        first = words.size * thread // num_threads
        last = words.size * (thread + 1) // num_threads
        part = 0
        for i in range(first, last):
            part += words[i]
        total += part
    return total


def read_gb_s(num_threads: int) -> float:
    """Return the best bandwidth of a few streaming reads, 10^9 bytes per second."""
    words = np.ones(_READ_BYTES // 8, np.int64)
    spans_s = []
    for _ in range(_READS + 1):
        started_s = time.perf_counter()
        if _read(words, num_threads) != words.size:
            raise AssertionError("the sum of what was read is wrong")
        spans_s.append(time.perf_counter() - started_s)
    return words.nbytes / min(spans_s) / 1e9


class _Watch:
    """Adds up the time within calls of functions."""

    def __init__(self) -> None:
        self.spent_s = 0.0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            started_s = time.perf_counter()
            try:
                return function(*args)
            finally:
                self.spent_s += time.perf_counter() - started_s

        return timed

    def take(self) -> float:
        spent_s, self.spent_s = self.spent_s, 0.0
        return spent_s


def measure_parts(
    decoder: NumbaDecoder, step: Callable[[], object], kv_bytes: int
) -> dict[str, float]:
    """Return the figures above. `step` computes one row and reads `kv_bytes` of keys and values."""
    layers, head = _Watch(), _Watch()
    decoder.run_layer = layers.around(decoder.run_layer)  # type: ignore[method-assign]
    decoder.logits = head.around(decoder.logits)  # type: ignore[method-assign]
    try:
        found = [_parts_of(step, layers, head) for _ in range(_ROUNDS)]
    finally:
        del decoder.run_layer, decoder.logits
    step_s, layers_s, head_s = (statistics.median(column) for column in zip(*found, strict=True))
    weights = layer_weights(decoder)
    products_s = statistics.median([_products_s(decoder, weights) for _ in range(_ROUNDS)])
    num_bytes = kv_bytes + sum(weight.data.nbytes for weight in (*weights, decoder.head))
    bandwidth = read_gb_s(decoder.num_threads)
    read_s = num_bytes / bandwidth / 1e9
    spans_s = {
        "step_us": step_s, "layers_us": layers_s, "products_us": products_s, "head_us": head_s,
        "other_us": step_s - layers_s - head_s, "read_us": read_s,
    }  # fmt: skip
    figures = {name: round(span_s * 1e6, 1) for name, span_s in spans_s.items()}
    return {**figures, "read_gb_s": round(bandwidth, 1), "read_share": round(read_s / step_s, 2)}


def _parts_of(
    step: Callable[[], object], layers: _Watch, head: _Watch
) -> tuple[float, float, float]:
    started_s = time.perf_counter()
    step()
    return time.perf_counter() - started_s, layers.take(), head.take()


def layer_weights(decoder: NumbaDecoder) -> list[PackedWeight]:
    """Return the weights of all layers in the order in which a step reads them.

    Of a layer's experts the first ones stand for those that a row is sent to.
    """
    experts = decoder.spec.experts
    share = 1.0 if experts is None else experts.num_chosen / experts.num_experts
    return [
        _first_part(weight, share) if name.startswith("experts") else weight
        for layer in decoder.layers
        for name, weight in layer.packed.items()
    ]


def _first_part(weight: PackedWeight, share: float) -> PackedWeight:
    """Return the first matrices of a packed weight, whose matrices are of equal size."""
    count, num_bytes = (round(size * share) for size in (len(weight.table), len(weight.data)))
    return PackedWeight(weight.data[:num_bytes], weight.table[:count])


def _products_s(decoder: NumbaDecoder, weights: list[PackedWeight]) -> float:
    """Return the seconds of one row's products with `weights`."""
    work = []
    quantised = decoder.quantised_rows(1)
    for weight in weights:
        x = np.ones((1, int(weight.table[0, DEPTH])), np.float32)
        out = np.empty((1, int(weight.table[:, OUTPUTS].sum())), np.float32)
        work.append((x, weight.table, out))
    started_s = time.perf_counter()
    for x, table, out in work:
        linear(x, table, NONE_1D, NONE_2D, quantised, out, decoder.num_threads)
    return time.perf_counter() - started_s
