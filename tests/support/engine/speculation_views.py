"""Sequences as a drafter sees them, and texts with repetition."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hypothesis import strategies as st

from engine.core.runner_contract import StepCosts
from engine.core.speculation.draft_length import (
    Acceptance,
)


@dataclass
class View:
    """A sequence: its prompt and what was drawn so far."""

    prompt_token_ids: Sequence[int]
    output_token_ids: list[int] = field(default_factory=list)
    sequence_id: int = 1
    proposed_token_ids: tuple[int, ...] = ()
    forced_token_ids: tuple[int, ...] = ()
    acceptance: Acceptance | None = None

    @property
    def known(self) -> list[int]:
        return [*self.prompt_token_ids, *self.output_token_ids]

    @property
    def num_known(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    def tokens(self, start: int, end: int) -> list[int]:
        return self.known[start:end]


def view_of(text: str, output: str = "", *, sequence_id: int = 1) -> View:
    """Letters as tokens."""
    return View(tokens_of(text), list(tokens_of(output)), sequence_id)


def tokens_of(text: str) -> tuple[int, ...]:
    return tuple(ord(letter) for letter in text)


def text_of(tokens: Iterable[int]) -> str:
    return "".join(chr(token) for token in tokens)


texts = st.lists(st.integers(0, 3), max_size=60)
"""Few letters: every short run occurs again and again."""


COSTS = StepCosts(
    (1, 2, 3, 4, 6, 8, 16, 32, 64, 128),
    (0.0188, 0.0194, 0.0201, 0.0227, 0.0228, 0.0338, 0.0488, 0.0876, 0.161, 0.328),
)
MTP_COSTS = StepCosts(COSTS.rows, COSTS.step_s, draft_s=0.0014)


def powers(probability: float, num: int) -> list[float]:
    """Chances of `num` drafts that are accepted with `probability` each."""
    return [probability**j for j in range(1, num + 1)]
