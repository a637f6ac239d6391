"""An index of where the end of a text occurred before, used by both look-up drafters.

Together with the tokens themselves it represents their suffix tree: the positions after all
occurrences of a context are the leaves below that context's node, and only nodes that are looked up
are computed. A node costs no memory, a token about a hundred bytes.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

MOST_POSITIONS = 16
"""The most occurrences that are followed, latest first: it bounds the time of a look-up."""
LONGEST = 16
"""The longest match that `find` tells apart; `follow` goes on counting beyond it."""
SEPARATOR = -1
"""Separates texts: no match crosses it."""


Match = tuple[int, int]
"""(length, position): the last `length` tokens of a context also end before `position`.

A bare tuple, because hundreds are made in a step.
"""


class SuffixIndex:
    """Tokens, and for each run of `run_length` of them the positions after its occurrences.

    A position is the number of all tokens ever added before it, so dropping the oldest tokens
    changes no position. A run gets its position once a token follows it.
    """

    __slots__ = ("_earlier", "_latest", "_most_positions", "_run_length", "num_dropped", "tokens")

    def __init__(self, run_length: int, most_positions: int = MOST_POSITIONS) -> None:
        self.tokens: list[int] = []
        self.num_dropped = 0
        self._run_length = run_length
        self._most_positions = most_positions
        self._latest: dict[tuple[int, ...], int] = {}
        self._earlier = array("q")  # by position: the position after the run's previous occurrence

    @property
    def num_runs(self) -> int:
        """Different runs of `run_length` tokens that `find` can find."""
        return len(self._latest)

    def extend(self, new: Sequence[int]) -> None:
        """Append tokens; amortised constant time for each."""
        tokens, latest, earlier, length = self.tokens, self._latest, self._earlier, self._run_length
        begin = len(tokens)
        tokens.extend(new)
        for end in range(begin, len(tokens)):
            run = tuple(tokens[end - length : end]) if end >= length else ()
            if not run or SEPARATOR in run:
                earlier.append(-1)
            else:
                earlier.append(latest.get(run, -1))
                latest[run] = end + self.num_dropped

    def drop_oldest(self, num_tokens: int) -> None:
        """Drop the first `num_tokens` tokens, up to a separator, and their positions."""
        tokens, length, latest = self.tokens, self._run_length, self._latest
        for end in range(length, num_tokens):
            run = tuple(tokens[end - length : end])
            if latest.get(run, -1) == end + self.num_dropped:
                del latest[run]
        del tokens[:num_tokens]
        del self._earlier[:num_tokens]
        self.num_dropped += num_tokens

    def find(self, context: Sequence[int]) -> list[Match]:
        """Return the latest positions where the end of `context` occurred, latest first.

        Matches have at least `run_length` tokens. Lengths are counted up to `LONGEST`.
        """
        tokens, earlier, first = self.tokens, self._earlier, self.num_dropped
        found: list[Match] = []
        run = tuple(context[-self._run_length :])
        position = self._latest.get(run, -1)
        while position >= first and len(found) < self._most_positions:
            offset, length = position - first, self._run_length
            limit = min(LONGEST, offset, len(context))
            while length < limit and tokens[offset - 1 - length] == context[-1 - length]:
                length += 1
            found.append((length, position))
            position = earlier[offset]
        return found

    def tokens_from(self, position: int, most: int) -> tuple[int, ...]:
        """Return `most` tokens from `position` on; at the end of the text they repeat.

        The end of the text matches at `position`, so after its last token the same tokens are
        expected again.
        """
        offset = position - self.num_dropped
        found = tuple(self.tokens[offset : offset + most])
        if len(found) == most:
            return found
        return (found * (most // len(found) + 1))[:most]

    def still_there(self, matches: list[Match]) -> list[Match]:
        """Return those of `matches` whose position was not dropped."""
        first = self.num_dropped
        if all(position >= first for _, position in matches):
            return matches
        return [match for match in matches if match[1] >= first]

    def follow(self, matches: Sequence[Match], token: int) -> list[Match]:
        """Return those of `matches` that continued with `token`, each one token longer."""
        tokens, first = self.tokens, self.num_dropped
        return [
            (length + 1, position + 1)
            for length, position in matches
            if position >= first and tokens[position - first] == token
        ]


def longest_of(matches: Sequence[Match]) -> tuple[int, list[int]]:
    """Return the length of the longest matches, 0 without any, and their positions in order."""
    if len(matches) == 1:
        return matches[0][0], [matches[0][1]]
    longest = max(matches, default=(0, 0))[0]
    return longest, [position for length, position in matches if length == longest]
