"""What requests want of nodes, drawn from numbers of its own: what else is drawn stays the same."""

from __future__ import annotations

import random
from dataclasses import replace

from simulator.faults.history import AskedRequest
from simulator.faults.shape import Shape

LOADED = 0.35
"""The share of the clusters whose queues are short."""
_QUEUES = (1, 1, 2, 3, 6)
_SLOW_STEPS_S = (0.03, 0.1, 0.3)
"""With these a queue lasts for seconds, after which a node knows how fast it is."""
_SOON_S = (1.0, 2.0, 4.0, 8.0, 60.0)


def under_load(
    rng: random.Random, shape: Shape, requests: list[AskedRequest]
) -> tuple[Shape, list[AskedRequest]]:
    """Return a cluster that may have short queues, and its requests.

    Some of these refuse what would end too late: there steps are slow, and answers wanted soon.
    """
    if rng.random() >= LOADED:
        return shape, requests
    shape = replace(
        shape,
        max_queued=rng.choice(_QUEUES),
        sheds=rng.random() < 0.6,
        max_num_seqs=rng.choice((2, shape.max_num_seqs)),
    )
    if not shape.sheds:
        return shape, requests
    slow_s = max(shape.step_s, rng.choice(_SLOW_STEPS_S))
    shape = replace(shape, step_s=slow_s, max_queued=rng.choice((shape.max_queued, 6, 12)))
    return shape, [replace(one, deadline_s=rng.choice(_SOON_S)) for one in requests]
