"""Sequences as a drafter sees them, texts with repetition, and drafts without a drafter."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from hypothesis import strategies as st

from engine.core.runner_contract import StepCosts
from engine.core.sequences.sequence import Sequence as SeatedSequence
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


class GuessedDrafts:
    """In place of a node's speculation: at most `most` drafts in a `share` of all steps.

    The first ones are those of the sequence's output, which `answer` returns, the others are not.
    """

    method = "ngram"
    has_proposals = False

    def __init__(
        self,
        answer: Callable[[SeatedSequence], Sequence[int]],
        *,
        most: int,
        share: float,
        seed: int,
        vocab_size: int,
    ) -> None:
        self.num_speculative_tokens = most
        self._answer, self._share, self._seed = answer, share, seed
        self._vocab_size = vocab_size

    def drafts(self, decoding: Sequence[SeatedSequence]) -> list[tuple[int, ...]]:
        """Return what each sequence verifies; a second call for the same step returns the same."""
        return [self._drafts(sequence) for sequence in decoding]

    def _drafts(self, sequence: SeatedSequence) -> tuple[int, ...]:
        rng = random.Random(f"{self._seed} {sequence.sequence_id} {sequence.num_output}")
        if rng.random() >= self._share:
            return ()
        most = self.num_speculative_tokens
        following = self._answer(sequence)[sequence.num_output :][: rng.randint(0, most)]
        wrong = [rng.randrange(self._vocab_size) for _ in range(rng.randint(1, most))]
        return (*following, *wrong)[:most]

    def learn(self, view: SeatedSequence, num_drafted: int, num_accepted: int) -> None:
        """Check the numbers."""
        assert 0 <= num_accepted <= num_drafted <= self.num_speculative_tokens

    def observe(self, rows: int, step_s: float, num_proposals: int) -> None:
        """Learn nothing from what a step took."""

    def forget(self, sequence: SeatedSequence) -> None:
        """Do nothing: there is no state."""
