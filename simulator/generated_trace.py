"""A generated trace of conversations: every request repeats the conversation before it.

Conversations begin at random, in a Poisson process, and go on with a probability of `CONTINUES`
after each answer, as soon as the client has read and typed (`THINK_S` in the mean, exponential).
All begin with the same 512 tokens, the system prompt. The lengths of the rest of the first prompt,
of each further turn and of answers are lognormal. The defaults come near the lengths, the load and
the reuse of Mooncake's published hour of conversations, without its requests.
"""

from __future__ import annotations

import math
import random
from heapq import heappop, heappush
from itertools import count

from common.kv.blocks import blocks_for
from simulator.trace_file import TOKENS_PER_HASH_ID, TraceRequest

CONTINUES = 0.4
THINK_S = 60.0
FIRST_MEDIAN, FIRST_SIGMA = 6100, 1.0
ADDED_MEDIAN, ADDED_SIGMA = 1200, 1.2
ANSWER_MEDIAN, ANSWER_SIGMA = 250, 0.8
LONGEST_FIRST, LONGEST_PROMPT, LONGEST_ANSWER = 100_000, 120_000, 2000


def generated_trace(num_requests: int, rate: float, seed: int) -> list[TraceRequest]:
    """Return `num_requests` requests, ordered by arrival from 0 s, `rate` per second on average."""
    rng = random.Random(seed)
    hash_ids = count(1)
    requests: list[TraceRequest] = []
    coming: list[tuple[float, int, TraceRequest]] = []
    numbers, begins_s = count(), 0.0
    while len(requests) < num_requests:
        for turn in _conversation(rng, begins_s, hash_ids):
            heappush(coming, (turn.arrival_s, next(numbers), turn))
        begins_s += rng.expovariate(rate * (1 - CONTINUES))
        while coming and coming[0][0] <= begins_s:
            requests.append(heappop(coming)[2])
    return requests[:num_requests]


def _conversation(rng: random.Random, begins_s: float, new_ids: count[int]) -> list[TraceRequest]:
    first = _lognormal(rng, FIRST_MEDIAN, FIRST_SIGMA)
    at_s, num_prompt = begins_s, TOKENS_PER_HASH_ID + min(first, LONGEST_FIRST)
    ids, turns = [0], list[TraceRequest]()
    while num_prompt <= LONGEST_PROMPT:
        ids += [next(new_ids) for _ in range(blocks_for(num_prompt, TOKENS_PER_HASH_ID) - len(ids))]
        num_output = min(_lognormal(rng, ANSWER_MEDIAN, ANSWER_SIGMA), LONGEST_ANSWER)
        turns.append(TraceRequest(at_s, num_prompt, num_output, tuple(ids)))
        if rng.random() >= CONTINUES:
            break
        ids = ids[: num_prompt // TOKENS_PER_HASH_ID]  # a block that grows has another content
        num_prompt += num_output + _lognormal(rng, ADDED_MEDIAN, ADDED_SIGMA)
        at_s += rng.expovariate(1 / THINK_S)
    return turns


def _lognormal(rng: random.Random, median: float, sigma: float) -> int:
    return max(1, round(rng.lognormvariate(math.log(median), sigma)))
