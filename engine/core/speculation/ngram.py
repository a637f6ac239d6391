"""Prompt lookup: propose what followed the last few tokens earlier in the same sequence.

The idea is "prompt lookup decoding" (Apoorv Saxena, 2023): answers that summarise, quote or edit
their prompt repeat stretches of it.
"""

from __future__ import annotations

from engine.core.speculation.drafter import NO_PROPOSAL, DraftView, Proposal
from engine.core.speculation.match_confidence import MatchConfidence
from engine.core.speculation.own_text import OwnText
from engine.core.speculation.suffix_index import longest_of


class _State:
    """One sequence: its text, and the best of the positions where its end occurred before."""

    __slots__ = ("length", "position", "text")

    def __init__(self, view: DraftView) -> None:
        self.text = OwnText(view)
        self._choose()

    def take(self, token: int, confidence: MatchConfidence) -> None:
        """Add the next token, and record whether the match predicted it."""
        if self.length:
            guess = self.text.index.tokens[self.position]
            confidence.learn(self.length, was_right=guess == token)
        self.text.take(token)
        self._choose()

    def _choose(self) -> None:
        self.length, positions = longest_of(self.text.matches)
        self.position = positions[0] if positions else 0


class NgramDrafter:
    """Proposes what followed the longest, most recent earlier occurrence of the last tokens.

    A single token counts as a match; its successor is unlikely to be the same, and such a draft is
    used only where rows cost next to nothing. State is kept for each sequence from `propose` to
    `forget`: about a hundred bytes for each of its tokens.
    """

    def __init__(self) -> None:
        self._states: dict[int, _State] = {}
        self._confidence = MatchConfidence()

    def propose(self, view: DraftView, max_drafts: int, lowest_chance: float = 0.0) -> Proposal:
        """Return up to `max_drafts` tokens after the match, none below `lowest_chance`."""
        state = self._states.get(view.sequence_id)
        if state is None:
            state = self._states[view.sequence_id] = _State(view)
        else:
            for token in state.text.unseen(view):
                state.take(token, self._confidence)
        chances = self._confidence.chances(state.length, max_drafts, lowest_chance)
        if not chances:
            return NO_PROPOSAL
        return Proposal(state.text.index.tokens_from(state.position, len(chances)), chances)

    @property
    def num_sequences(self) -> int:
        """Sequences that were proposed for and are not forgotten."""
        return len(self._states)

    def forget(self, view: DraftView) -> None:
        """Drop the state of the sequence."""
        self._states.pop(view.sequence_id, None)
