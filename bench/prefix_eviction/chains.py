"""Traces as the blocks of each prompt, in the order of arrival: equal ids for equal beginnings."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import count

from bench.agents.sessions import Session, Shape, make_sessions
from simulator.trace_file import TOKENS_PER_HASH_ID, TraceRequest

BLOCK_TOKENS = TOKENS_PER_HASH_ID

Chain = tuple[int, ...]
"""The full blocks of a prompt."""

AGENTS = Shape(
    num_sessions=150,
    num_turns=20,
    num_systems=5,
    system_tokens=6000,
    new_tokens=1200,
    new_sigma=1.0,
    answer_tokens=250,
    answer_sigma=0.8,
    think_s=20.0,
)
"""Agents that write code: prompts of 7k to 60k tokens, of which most was seen before."""
ARRIVAL_S = 15.0
"""The mean time between two agents: some 30 work at a time."""
ANSWER_S = 8.0


def of_trace(requests: Sequence[TraceRequest]) -> list[Chain]:
    """Return the prompts of a trace whose requests name their content; others share nothing."""
    return [request.hash_ids[: request.num_prompt // BLOCK_TOKENS] for request in requests]


def of_agents(shape: Shape, seed: int) -> list[Chain]:
    """Return the prompts of sessions that begin one after the other."""
    rng, ids = random.Random(f"{seed} arrivals"), count()
    systems: dict[tuple[int, ...], list[int]] = {}
    asked: list[tuple[float, int, Chain]] = []
    began_s = 0.0
    for number, session in enumerate(make_sessions(shape, seed)):
        began_s += rng.expovariate(1 / ARRIVAL_S)
        system = systems.setdefault(session.system, [])
        system += _new(len(session.system) // BLOCK_TOKENS - len(system), ids)
        at_s = began_s
        for turn, chain in zip(session.turns, _prompts(session, system, ids), strict=True):
            at_s += turn.think_s
            asked.append((at_s, number, chain))
            at_s += ANSWER_S
    return [chain for _, _, chain in sorted(asked)]


def _prompts(session: Session, system: Sequence[int], ids: Iterator[int]) -> Iterator[Chain]:
    """Yield each turn's blocks. A turn shares what its parent was asked and answered."""
    said: list[tuple[int, list[int]]] = []
    for turn in session.turns:
        length, blocks = said[turn.parent] if turn.parent >= 0 else (len(session.system), system)
        num_prompt = length + len(turn.new_tokens)
        prompt = [*blocks, *_new(num_prompt // BLOCK_TOKENS - len(blocks), ids)]
        yield tuple(prompt)
        length = num_prompt + turn.num_answer_tokens
        said.append((length, [*prompt, *_new(length // BLOCK_TOKENS - len(prompt), ids)]))


def _new(number: int, ids: Iterator[int]) -> list[int]:
    return [next(ids) for _ in range(number)]
