"""What the requests of a trace ask of the demo model: as many lone turns, made shorter and rarer.

A prompt of Mooncake's traces is named by 512 tokens, of which `SHORTER`th are asked: equal names
are equal tokens. Answers are as much shorter. Times between arrivals are longer by `SLOWER`, as
this model on a CPU is slower than theirs. Prompts that are too long even so are left out.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from bench.agents.sessions import Session, Turn, tokens_of
from simulator.trace_file import TOKENS_PER_HASH_ID, TraceRequest

SHORTER, SLOWER = 8, 8
MOST_TOKENS = 3000
"""The longest prompt that is asked."""


def make_traced(requests: Sequence[TraceRequest], number: int) -> list[Session]:
    """Return the first `number` requests that are short enough, each at its time."""
    short = [one for one in requests if one.num_prompt // SHORTER <= MOST_TOKENS][:number]
    begins_s = short[0].arrival_s if short else 0.0
    return [
        Session(
            name=f"request-{index}",
            system=(),
            turns=(
                Turn(
                    parent=-1,
                    think_s=(one.arrival_s - begins_s) * SLOWER,
                    new_tokens=_prompt(one, index),
                    num_answer_tokens=max(one.num_output // SHORTER, 1),
                ),
            ),
        )
        for index, one in enumerate(short)
    ]


def _prompt(request: TraceRequest, index: int) -> tuple[int, ...]:
    """Return the prompt's tokens; one that names nothing shares nothing."""
    length = max(request.num_prompt // SHORTER, 1)
    if not request.hash_ids:
        return tokens_of(random.Random(f"request {index}"), length)
    named = (
        tokens_of(random.Random(f"name {one}"), TOKENS_PER_HASH_ID // SHORTER)
        for one in request.hash_ids
    )
    return tuple(token for part in named for token in part)[:length]
