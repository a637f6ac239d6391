"""Demands on nodes, drawn from random numbers of their own: the rest of a history stays."""

from __future__ import annotations

import random
from dataclasses import replace

from simulator.faults.demand.shares import Shares
from simulator.faults.history import AskedRequest, History
from simulator.faults.kinds import GRAMMARS
from simulator.faults.shape import Shape, node_names

_QUEUES = (1, 1, 2, 3, 6)
_SLOW_STEPS_S = (0.03, 0.1, 0.3, 1.0)
"""Durations of steps with which a queue lasts for seconds, so that a node measures its speed."""
_SOON_S = (1.0, 2.0, 4.0, 8.0, 60.0)
_WAVES_S = (0.0, 0.0, 2.0, 4.0)
"""How much later requests come to these: when nodes know how fast they are."""
_POOLS = (3, 5, 8, 10, 13, 16, 24, 40)
CUT = 0.4
"""The share of the requests in these whose answer ends where the longest node ends it."""
_CUT_TOKENS = (9, 24, 40, 80)
_SALTS = ("", "s", "s", "t")
_HURRIED_S = (0.05, 0.2, 0.5, 1.0, 2.0, 2.0, 4.0, 60.0)
"""Deadlines at which requests are at any point of their lives."""
_GRAMMARS = (*[""] * 5, *GRAMMARS)


def with_demands(history: History, shares: Shares) -> History:
    """Return the history with short queues, other pools and so on, each in a share of histories."""
    seed, shape, requests = history.seed, history.shape, list(history.requests)

    def drawn(name: str, share: float) -> random.Random | None:
        """Return random numbers for what this history has in a share of the seeds, or None."""
        rng = random.Random(f"{name} of {seed}")
        return rng if rng.random() < share else None

    if rng := drawn("load", shares.loaded):
        shape, requests = _under_load(rng, shape, requests)
    if rng := drawn("pools", shares.uneven):
        shape, requests = _on_uneven_pools(rng, shape, requests)
    if rng := drawn("salts", shares.salted):
        requests = [replace(one, salt=rng.choice(_SALTS)) for one in requests]
    if rng := drawn("grammars", shares.under_grammars):
        shape, requests = _under_grammars(rng, shape, requests)
    if rng := drawn("scheduling", shares.scheduled_otherwise):
        shape = _scheduled_otherwise(rng, shape)
    if drawn("width", shares.wide):
        shape = replace(shape, is_wide=True)
    if rng := drawn("scores", shares.scored):
        requests = [_scored(rng, one) for one in requests]
    if rng := drawn("hurry", shares.hurried):
        requests = [replace(one, deadline_s=rng.choice(_HURRIED_S)) for one in requests]
    requests.sort(key=lambda one: one.at_s)
    return replace(history, shape=shape, requests=tuple(requests))


def _under_load(
    rng: random.Random, shape: Shape, requests: list[AskedRequest]
) -> tuple[Shape, list[AskedRequest]]:
    """Return the cluster with short queues, and its requests.

    Some of these refuse what would end too late: there steps are slow, and answers wanted soon.
    """
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
    """Return the cluster, each of whose nodes has a pool of its own size, and its requests.

    Some fit only a few nodes, or none, and of some the answer goes on as far as a node holds it.
    """
    shape = replace(shape, pools=tuple(rng.choice(_POOLS) for _ in node_names(shape)))
    return shape, [_cut_to_fit(rng, one) for one in requests]


def _cut_to_fit(rng: random.Random, asked: AskedRequest) -> AskedRequest:
    if rng.random() >= CUT:
        return asked
    return replace(asked, is_cut=True, max_tokens=rng.choice(_CUT_TOKENS))


def _under_grammars(
    rng: random.Random, shape: Shape, requests: list[AskedRequest]
) -> tuple[Shape, list[AskedRequest]]:
    """Return the cluster and its requests, half of which have grammars; it may draft these."""
    shape = replace(shape, speculative_method=rng.choice((shape.speculative_method, "grammar")))
    return shape, [replace(one, grammar=rng.choice(_GRAMMARS)) for one in requests]


def _scored(rng: random.Random, asked: AskedRequest) -> AskedRequest:
    """Return the request, which may want log probabilities."""
    return replace(asked, has_logprobs=rng.random() < 0.5, has_prompt_logprobs=rng.random() < 0.3)


def _scheduled_otherwise(rng: random.Random, shape: Shape) -> Shape:
    """Return the cluster, which reserves, passes, preempts and cuts chunks by other settings."""
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
