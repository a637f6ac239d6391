"""Demands on nodes, drawn from random numbers of their own: the rest of a history stays."""

from __future__ import annotations

import random
from dataclasses import replace

from simulator.faults.history import AskedRequest, History
from simulator.faults.kinds import GRAMMARS
from simulator.faults.shape import Shape, node_names

LOADED = 0.35
"""The share of the clusters whose queues are short."""
_QUEUES = (1, 1, 2, 3, 6)
_SLOW_STEPS_S = (0.03, 0.1, 0.3, 1.0)
"""Durations of steps with which a queue lasts for seconds, so that a node measures its speed."""
_SOON_S = (1.0, 2.0, 4.0, 8.0, 60.0)
_WAVES_S = (0.0, 0.0, 2.0, 4.0)
"""How much later requests come to these: when nodes know how fast they are."""
UNEVEN = 0.3
"""The share of the clusters whose nodes have pools of different sizes."""
_POOLS = (3, 5, 8, 10, 13, 16, 24, 40)
CUT = 0.4
"""The share of the requests in these whose answer ends where the longest node ends it."""
_CUT_TOKENS = (9, 24, 40, 80)
SALTED = 0.4
"""The share of the histories whose requests have salts."""
_SALTS = ("", "s", "s", "t")
UNDER_GRAMMARS = 0.3
"""The share of the histories in which half of the requests have grammars."""
WIDE = 0.2
"""The share of the clusters whose routers know their nodes as those of a wide cluster."""
SCORED = 0.25
"""The share of the histories in which requests want log probabilities."""
OTHERWISE = 0.4
"""The share of the clusters that schedule by other settings than most do."""
_GRAMMARS = (*[""] * 5, *GRAMMARS)


def with_demands(history: History) -> History:
    """Return the history with short queues, other pools and so on, each in some histories."""
    seed, shape, requests = history.seed, history.shape, list(history.requests)
    shape, requests = _under_load(random.Random(f"load of {seed}"), shape, requests)
    shape, requests = _on_uneven_pools(random.Random(f"pools of {seed}"), shape, requests)
    requests = _with_salts(random.Random(f"salts of {seed}"), requests)
    grammars = random.Random(f"grammars of {seed}")
    shape, requests = _under_grammars(grammars, shape, requests)
    shape = _scheduled_otherwise(random.Random(f"scheduling of {seed}"), shape)
    is_wide = random.Random(f"width of {seed}").random() < WIDE
    shape = replace(shape, is_wide=is_wide)
    requests = _scored(random.Random(f"scores of {seed}"), requests)
    requests.sort(key=lambda one: one.at_s)
    return replace(history, shape=shape, requests=tuple(requests))


def _under_load(
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
    shape = replace(
        shape, step_s=slow_s, max_num_seqs=2, max_queued=rng.choice((shape.max_queued, 2, 6))
    )
    return shape, [
        replace(one.later(rng.choice(_WAVES_S)), deadline_s=rng.choice(_SOON_S)) for one in requests
    ]


def _on_uneven_pools(
    rng: random.Random, shape: Shape, requests: list[AskedRequest]
) -> tuple[Shape, list[AskedRequest]]:
    """Return a cluster whose nodes may have pools of different sizes, and its requests.

    Some fit only a few nodes, or none, and of some the answer goes on as far as a node holds it.
    """
    if rng.random() >= UNEVEN:
        return shape, requests
    shape = replace(shape, pools=tuple(rng.choice(_POOLS) for _ in node_names(shape)))
    return shape, [_cut_to_fit(rng, one) for one in requests]


def _cut_to_fit(rng: random.Random, asked: AskedRequest) -> AskedRequest:
    if rng.random() >= CUT:
        return asked
    return replace(asked, is_cut=True, max_tokens=rng.choice(_CUT_TOKENS))


def _with_salts(rng: random.Random, requests: list[AskedRequest]) -> list[AskedRequest]:
    """Return the requests, of which those with different salts share no KV, in some histories."""
    if rng.random() >= SALTED:
        return requests
    return [replace(one, salt=rng.choice(_SALTS)) for one in requests]


def _under_grammars(
    rng: random.Random, shape: Shape, requests: list[AskedRequest]
) -> tuple[Shape, list[AskedRequest]]:
    """Return the cluster and its requests, half of which may have grammars; it may draft these."""
    if rng.random() >= UNDER_GRAMMARS:
        return shape, requests
    shape = replace(shape, speculative_method=rng.choice((shape.speculative_method, "grammar")))
    return shape, [replace(one, grammar=rng.choice(_GRAMMARS)) for one in requests]


def _scored(rng: random.Random, requests: list[AskedRequest]) -> list[AskedRequest]:
    """Return the requests, of which some may want log probabilities."""
    if rng.random() >= SCORED:
        return requests
    return [
        replace(one, has_logprobs=rng.random() < 0.5, has_prompt_logprobs=rng.random() < 0.3)
        for one in requests
    ]


def _scheduled_otherwise(rng: random.Random, shape: Shape) -> Shape:
    """Return the cluster, which may reserve, pass, preempt and cut chunks otherwise."""
    if rng.random() >= OTHERWISE:
        return shape
    policies = ("none", "fixed_blocks", "fixed_blocks", "token_ratio", "global_ratio", "learned")
    return replace(
        shape,
        reservation_policy=rng.choice(policies),
        reserved_blocks=rng.choice((0, 1, 3, 16)),
        requeues_at_tail=rng.random() < 0.5,
        retract_decode_steps=rng.choice((0, 1, 20)),
        min_progress_tokens=rng.choice((0, 1, 4, 16)),
        priority_pass_limit=rng.choice((1, 16)),
        skip_ahead_window=rng.choice((0, 1, 8)),
        skip_ahead_limit=rng.choice((0, 1, 16)),
        long_prefill_tokens=rng.choice((0, 4, 128)),
        chunk_granularity=rng.choice((1, 2, 4)),
        speculative_method=rng.choice((shape.speculative_method, "suffix")),
    )
