"""One sequence's known tokens, and the earlier occurrences of their end."""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.speculation.drafter import DraftView
from engine.core.speculation.suffix_index import Match, SuffixIndex

RUN = 2
"""The shortest matches of which all are followed, in tokens."""


class OwnText:
    """The tokens of one sequence. `matches`: where their end occurred before, latest first.

    When not even the last two tokens occurred together before, the only match is the latest
    position of the last token alone, of length 1.
    """

    __slots__ = ("_singles", "index", "matches")

    def __init__(self, view: DraftView) -> None:
        known = view.tokens(0, view.num_known)
        self.index = SuffixIndex(RUN)
        self.index.extend(known)
        self._singles = {token: position for position, token in enumerate(known[:-1], 1)}
        self.matches = self._find()

    def unseen(self, view: DraftView) -> Sequence[int]:
        """Return the known tokens of `view` that were not taken yet."""
        return view.tokens(len(self.index.tokens), view.num_known)

    def take(self, token: int) -> None:
        """Append one known token."""
        index, matches = self.index, self.matches
        followed: list[Match] = []
        if matches and matches[0][0] >= RUN:
            followed = index.follow(matches, token)
        if index.tokens:
            self._singles[index.tokens[-1]] = len(index.tokens)
        index.extend((token,))
        self.matches = followed or self._find()

    def _find(self) -> list[Match]:
        tokens = self.index.tokens
        found = self.index.find(tokens)
        if not found and tokens and tokens[-1] in self._singles:
            return [(1, self._singles[tokens[-1]])]
        return found
