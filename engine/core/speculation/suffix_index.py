"""Where the end of a text occurred before: the index that both look-up drafters ask.

Together with the tokens themselves it stands for their suffix tree: the places behind all
occurrences of a context are the leaves below that context's node, and only the nodes that are
asked for are ever worked out. A node costs nothing, a token about a hundred bytes.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

MOST_PLACES = 16
"""Occurrences that are followed, the most recent ones: no text makes a question slow."""
LONGEST = 16
"""Longer matches are not told apart when they are found; followed ones go on counting."""
SEPARATOR = -1
"""Stands between texts: no match reaches across it."""


Match = tuple[int, int]
"""(length, place): the last `length` tokens of a context also end before `place`. A bare tuple:
hundreds are made in a step."""


class SuffixIndex:
    """Tokens, and for each run of `run_length` of them the places behind its occurrences.

    A place is the number of tokens that ever came before it, so dropping the oldest tokens moves
    none. A run gets its place once a token follows it.
    """

    __slots__ = ("_earlier", "_latest", "_most_places", "_run_length", "num_dropped", "tokens")

    def __init__(self, run_length: int, most_places: int = MOST_PLACES) -> None:
        self.tokens: list[int] = []
        self.num_dropped = 0
        self._run_length = run_length
        self._most_places = most_places
        self._latest: dict[tuple[int, ...], int] = {}
        self._earlier = array("q")  # by place: the place behind the run's occurrence before it

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
        """Forget the first `num_tokens` tokens, up to a separator, and every place among them."""
        tokens, length, latest = self.tokens, self._run_length, self._latest
        for end in range(length, num_tokens):
            run = tuple(tokens[end - length : end])
            if latest.get(run, -1) == end + self.num_dropped:
                del latest[run]
        del tokens[:num_tokens]
        del self._earlier[:num_tokens]
        self.num_dropped += num_tokens

    def find(self, context: Sequence[int]) -> list[Match]:
        """The latest places where the end of `context` occurred, at least a run, latest first.

        Lengths are counted up to `LONGEST`.
        """
        tokens, earlier, first = self.tokens, self._earlier, self.num_dropped
        found: list[Match] = []
        run = tuple(context[-self._run_length :])
        place = self._latest.get(run, -1)
        while place >= first and len(found) < self._most_places:
            offset, length = place - first, self._run_length
            limit = min(LONGEST, offset, len(context))
            while length < limit and tokens[offset - 1 - length] == context[-1 - length]:
                length += 1
            found.append((length, place))
            place = earlier[offset]
        return found

    def tokens_from(self, place: int, most: int) -> tuple[int, ...]:
        """The `most` tokens from `place` on; a text that repeats itself up to its end goes on so.

        That is what followed `place` when the end of the text matches there: behind the last token
        it would match again.
        """
        offset = place - self.num_dropped
        found = tuple(self.tokens[offset : offset + most])
        if len(found) == most:
            return found
        return (found * (most // len(found) + 1))[:most]

    def still_there(self, matches: list[Match]) -> list[Match]:
        """Those of `matches` whose place was not dropped."""
        first = self.num_dropped
        if all(place >= first for _, place in matches):
            return matches
        return [match for match in matches if match[1] >= first]

    def follow(self, matches: Sequence[Match], token: int) -> list[Match]:
        """Those of `matches` that went on with `token`, one longer."""
        tokens, first = self.tokens, self.num_dropped
        return [
            (length + 1, place + 1)
            for length, place in matches
            if place >= first and tokens[place - first] == token
        ]


def longest_of(matches: Sequence[Match]) -> tuple[int, list[int]]:
    """The length of the longest ones, 0 without any, and their places in the same order."""
    if len(matches) == 1:
        return matches[0][0], [matches[0][1]]
    longest = max(matches, default=(0, 0))[0]
    return longest, [place for length, place in matches if length == longest]
