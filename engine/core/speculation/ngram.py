"""Prompt lookup: what followed the last few tokens when they occurred before in this sequence.

The idea is "prompt lookup decoding" (Apoorv Saxena, 2023): answers that summarise, quote or edit
their prompt repeat stretches of it.
"""

from __future__ import annotations

from engine.core.speculation.drafter import NO_PROPOSAL, DraftView, Proposal
from engine.core.speculation.match_confidence import MatchConfidence
from engine.core.speculation.own_text import OwnText
from engine.core.speculation.suffix_index import longest_of


class _State:
    """One sequence: its text, and the best of the places where its end occurred before."""

    __slots__ = ("length", "place", "text")

    def __init__(self, view: DraftView) -> None:
        self.text = OwnText(view)
        self._choose()

    def take(self, token: int, confidence: MatchConfidence) -> None:
        """The next token is known: learn how good the match was, and go on."""
        if self.length:
            guess = self.text.index.tokens[self.place]
            confidence.learn(self.length, was_right=guess == token)
        self.text.take(token)
        self._choose()

    def _choose(self) -> None:
        self.length, places = longest_of(self.text.matches)
        self.place = places[0] if places else 0


class NgramDrafter:
    """Proposes what followed the longest match of the last tokens, the most recent one of them.

    A single token counts as a match; that its successor comes again is unlikely, and such a draft
    is used where rows cost next to nothing. State is kept for sequences that were asked about and
    not forgotten: about a hundred bytes for each of their tokens.
    """

    def __init__(self) -> None:
        self._states: dict[int, _State] = {}
        self._confidence = MatchConfidence()

    def propose(self, view: DraftView, max_drafts: int, lowest_chance: float = 0.0) -> Proposal:
        """What follows the match: at most `max_drafts` tokens, none less likely."""
        state = self._states.get(view.sequence_id)
        if state is None:
            state = self._states[view.sequence_id] = _State(view)
        else:
            for token in state.text.unseen(view):
                state.take(token, self._confidence)
        chances = self._confidence.chances(state.length, max_drafts, lowest_chance)
        if not chances:
            return NO_PROPOSAL
        return Proposal(state.text.index.tokens_from(state.place, len(chances)), chances)

    def forget(self, view: DraftView) -> None:
        """Drop what is known about the sequence."""
        self._states.pop(view.sequence_id, None)
