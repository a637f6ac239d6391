"""What hypothesis draws for the scheduler: engines, policies, workloads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st

from tests.property.engine.workload import Arrival
from tests.support.engine.build import Engine
from tests.support.engine.choices import METHODS, MODES, ORDERS, REQUEUES, RESERVATIONS

fixed = settings(derandomize=True, deadline=None, database=None)


@st.composite
def engines(draw: st.DrawFn, *, least_blocks: int = 2) -> Engine:
    """Small engines, so that seats, blocks and tokens run out all the time."""
    seats = draw(st.integers(1, 5))
    method = draw(st.sampled_from(METHODS))
    num_drafts = 0 if method == "none" else draw(st.integers(1, 4))
    least_budget = seats * (1 + num_drafts)
    return Engine(
        num_blocks=draw(st.integers(least_blocks, 24)),
        seats=seats,
        budget=draw(st.integers(least_budget, least_budget + 24)),
        block_size=draw(st.sampled_from([1, 2, 4, 8])),
        caching=draw(st.booleans()),
        method=method,
        num_drafts=num_drafts,
        pairs_per_token=draw(st.sampled_from([0, 1, 8])),
        is_ahead=draw(st.booleans()),
        **draw(policies()),
    )


@st.composite
def policies(draw: st.DrawFn) -> dict[str, Any]:
    """Every choice that a configuration offers."""
    return {
        "reservation_policy": draw(st.sampled_from(RESERVATIONS)),
        "preemption_policy": draw(st.sampled_from(ORDERS)),
        "preemption_mode": draw(st.sampled_from(MODES)),
        "num_host_blocks": draw(st.sampled_from([2, 6, 64])),
        "keeps_prefixes": draw(st.booleans()),
        "num_copy_polls": draw(st.sampled_from([None, 0, 1, 3])),
        "requeue": draw(st.sampled_from(REQUEUES)),
        "enable_priority_scheduling": draw(st.booleans()),
        "skip_ahead_window": draw(st.integers(0, 3)),
        "skip_ahead_limit": draw(st.integers(1, 4)),
        "priority_pass_limit": draw(st.integers(1, 4)),
        "long_prefill_token_threshold": draw(st.sampled_from([0, 1, 5])),
        "retract_decode_steps": draw(st.sampled_from([0, 1, 20])),
        "min_progress_tokens": draw(st.sampled_from([0, 2, 16])),
        "retract_extra_tokens": draw(st.sampled_from([-1, 0, 8])),
        "new_token_ratio_decay_steps": draw(st.sampled_from([0, 3, 600])),
    }


@st.composite
def workloads(draw: st.DrawFn, engine: Engine, kinds: tuple[str, ...]) -> list[Arrival]:
    longest = min(engine.runner.max_model_len - 1, 30)
    arrival = st.builds(
        Arrival,
        at_step=st.integers(0, 12),
        family=st.integers(0, 2),
        length=st.integers(1, longest),
        max_tokens=st.integers(1, 10),
        seed=st.integers(0, 3),
        kind=st.sampled_from(kinds),
        delay=st.integers(0, 6),
        abort_after=st.none() | st.integers(0, 12),
        priority=st.integers(-1, 1),
        prompt_logprobs=st.sampled_from([None, None, 0, 2]),
    )
    found = draw(st.lists(arrival, min_size=1, max_size=9))
    least = draw(st.sampled_from([0, 2, 7]))
    found = [replace(one, min_tokens=min(least, one.max_tokens)) for one in found]
    room = engine.runner.max_model_len
    fitting = [a for a in found if a.length + a.max_tokens <= room]
    return sorted(fitting, key=lambda a: a.at_step)
