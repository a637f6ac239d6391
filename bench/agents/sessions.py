"""What agents ask, turn by turn: made from a seed, with these distributions.

- The first prompt of a session is a *system prompt*, which sessions of a kind share, and a task.
- Each further prompt is all that was said before, with the answer, and what comes new: what a tool
  returned or what a person wrote. Lengths of the new part are log-normal, as in published traces
  of coding agents: many are short, a few are files.
- Lengths of answers are log-normal as well: most are a call of a tool.
- Before a turn the agent *thinks*: an exponential time in which its tool runs.
- A share of the turns are *branches*: they do not go on from the last turn but from one before, as
  an agent does that tries again.

Lone prompts repeat nothing. Their lengths are those of the Azure trace of code completions of
November 2023, a quarter as long: log-normal, cut at five medians.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

FIRST_TOKEN_ID, LAST_TOKEN_ID = 3, 30_002
"""Ordinary tokens of the demo model's vocabulary."""
_MOST_OF_MEDIAN = 4
"""No length is more than so many medians: the longest prompt stays known."""


_LONE_PROMPT, _LONE_SIGMA, _MOST_OF_LONE = 1469 // 4, 1.36, 5
_LONE_ANSWER, _LONE_ANSWER_SIGMA = 13, 0.85


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Medians and spreads of a load; lengths in tokens, `sigma` those of log-normal lengths."""

    num_sessions: int = 10
    num_turns: int = 7
    num_systems: int = 1
    system_tokens: int = 400
    new_tokens: int = 220
    new_sigma: float = 0.6
    answer_tokens: int = 24
    answer_sigma: float = 0.5
    think_s: float = 1.0
    branch_share: float = 0.1

    @property
    def longest_prompt(self) -> int:
        """No prompt and its answer are longer than this."""
        turn = _MOST_OF_MEDIAN * (self.new_tokens + self.answer_tokens)
        return self.system_tokens + self.num_turns * turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One request. `parent` is the index of the turn that it goes on from, -1 for the system."""

    parent: int
    think_s: float
    new_tokens: tuple[int, ...]
    num_answer_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """The turns of one agent, in the order in which they are asked."""

    name: str
    system: tuple[int, ...]
    turns: tuple[Turn, ...]


def make_sessions(shape: Shape, seed: int) -> list[Session]:
    """Return the sessions of this shape: the same ones for the same seed."""
    systems = [
        tokens_of(random.Random(f"{seed} system {n}"), shape.system_tokens)
        for n in range(shape.num_systems)
    ]
    return [
        Session(
            name=f"agent-{seed}-{n}",
            system=systems[n % len(systems)],
            turns=tuple(_turns(shape, random.Random(f"{seed} session {n}"))),
        )
        for n in range(shape.num_sessions)
    ]


def make_lone_prompts(num_clients: int, num_prompts: int, seed: int) -> list[Session]:
    """Return so many clients, each of which asks so many prompts that share nothing."""
    return [
        Session(
            name=f"client-{seed}-{n}",
            system=(),
            turns=tuple(_lone_turns(num_prompts, random.Random(f"{seed} client {n}"))),
        )
        for n in range(num_clients)
    ]


def _lone_turns(number: int, rng: random.Random) -> Iterator[Turn]:
    for _ in range(number):
        length = _length(rng, _LONE_PROMPT, _LONE_SIGMA, most=_MOST_OF_LONE)
        yield Turn(
            parent=-1,
            think_s=0.0,
            new_tokens=tokens_of(rng, length),
            num_answer_tokens=_length(rng, _LONE_ANSWER, _LONE_ANSWER_SIGMA, most=_MOST_OF_LONE),
        )


def _turns(shape: Shape, rng: random.Random) -> Iterator[Turn]:
    for index in range(shape.num_turns):
        is_branch = index > 1 and rng.random() < shape.branch_share
        yield Turn(
            parent=rng.randrange(index - 1) if is_branch else index - 1,
            think_s=rng.expovariate(1 / shape.think_s),
            new_tokens=tokens_of(rng, _length(rng, shape.new_tokens, shape.new_sigma)),
            num_answer_tokens=_length(rng, shape.answer_tokens, shape.answer_sigma),
        )


def _length(rng: random.Random, median: int, sigma: float, *, most: int = _MOST_OF_MEDIAN) -> int:
    drawn = rng.lognormvariate(math.log(median), sigma)
    return min(max(1, round(drawn)), most * median)


def tokens_of(rng: random.Random, count: int) -> tuple[int, ...]:
    """Draw so many ordinary tokens."""
    return tuple(rng.randint(FIRST_TOKEN_ID, LAST_TOKEN_ID) for _ in range(count))
