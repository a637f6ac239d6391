"""The load of a trace: pool sizes and arrival rates that put policies under pressure."""

from __future__ import annotations

from collections.abc import Sequence

from common.kv.blocks import blocks_for
from simulator.step_cost import StepCost
from simulator.trace_file import TraceRequest

REQUESTS_PER_POOL = (8, 24, 72)
"""The number of mean requests, prompt and output, that the default pools hold."""
LOADS = (0.7, 1.0, 1.5, 3.0)
"""The shares of time in which the modelled GPU would compute, if blocks never ran out."""
_MEAN_BATCH = 32
"""The number of decoding sequences that share one pass over the weights, in the estimate."""


def default_pools(requests: Sequence[TraceRequest], block_size: int) -> tuple[int, ...]:
    """Return three pool sizes in blocks; the smallest one holds the longest request."""
    sizes = [blocks_for(r.num_prompt + r.num_output, block_size) for r in requests]
    mean = sum(sizes) / len(sizes)
    least = max(sizes) + 1
    return tuple(max(round(count * mean), least) for count in REQUESTS_PER_POOL)


def speed_up_for(load: float, requests: Sequence[TraceRequest], cost: StepCost) -> float:
    """Return the factor of arrival speed that keeps the GPU busy for `load` of the time.

    Prompts are computed once and whole, outputs in batches of `_MEAN_BATCH`. Rounded to
    three digits.
    """
    per_token_s = (cost.overhead_s + cost.weights_s) / _MEAN_BATCH
    work_s = 0.0
    for request in requests:
        prompt, output = request.num_prompt, request.num_output
        work_s += cost.token_s * prompt + cost.pair_s * prompt * prompt / 2
        work_s += output * (per_token_s + cost.context_s * (prompt + output / 2))
    span_s = requests[-1].arrival_s
    return float(f"{load * span_s / work_s:.3g}") if span_s > 0 else 1.0
