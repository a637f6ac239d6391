"""Suffix decoding: the likeliest continuation of the last tokens, in this request and recent ones.

After "SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications" (Oliaro et al.,
2024): a suffix tree over the request's own tokens and one over the outputs of earlier requests. The
longest suffix of the known tokens that occurs in one of them is looked up, and from its node the
most frequent children are followed while the estimated probability stays high enough.

Drafts from another request's output never change an answer, because the model draws each token
itself. But they are private to another client: they stay in the memory of this node, no message
contains them, and the oldest outputs are dropped as a whole.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from operator import mul, neg

from engine.core.speculation.drafter import NO_PROPOSAL, DraftView, Proposal
from engine.core.speculation.match_confidence import MatchConfidence
from engine.core.speculation.own_text import OwnText
from engine.core.speculation.suffix_index import SEPARATOR, SuffixIndex, longest_of

MOST_RECENT_TOKENS = 1 << 16
"""The number of tokens of ended outputs that are kept."""
RECENT_RUN = 3
"""The shortest match in recent outputs; matches in the own text may be shorter."""


class _State:
    """One sequence: its text, its matches in recent outputs, and the longest ones of both.

    `length` tokens agree before each of `positions`, which are positions in `source`.
    """

    __slots__ = ("length", "others", "positions", "source", "text")

    def __init__(self, view: DraftView, recent: SuffixIndex) -> None:
        self.text = OwnText(view)
        self.others = recent.find(self.text.index.tokens)
        self.choose(recent)

    def choose(self, recent: SuffixIndex) -> None:
        """Find the longest matches; if both are equally long, those in the own text."""
        self.source = self.text.index
        self.length, self.positions = longest_of(self.text.matches)
        length, positions = longest_of(self.others)
        if length > self.length:
            self.source, self.length, self.positions = recent, length, positions

    def take(self, token: int, recent: SuffixIndex, confidence: MatchConfidence) -> None:
        """Add the next token, and record whether the match predicted it."""
        if self.length:
            guess = self.source.tokens[self.positions[0] - self.source.num_dropped]
            confidence.learn(self.length, was_right=guess == token)
        others = recent.follow(self.others, token)
        self.text.take(token)
        self.others = others or recent.find(self.text.index.tokens)
        self.choose(recent)


class SuffixDrafter:
    """Proposes the most frequent continuation of the longest match.

    State: about a hundred bytes for each token of a sequence that is not forgotten, and for each of
    `most_recent_tokens` of outputs that ended.
    """

    def __init__(self, most_recent_tokens: int = MOST_RECENT_TOKENS) -> None:
        self._states: dict[int, _State] = {}
        self._recent = SuffixIndex(RECENT_RUN)
        self._recent_sizes: deque[int] = deque()
        self._most_recent_tokens = most_recent_tokens
        self._confidence = MatchConfidence()

    def propose(self, view: DraftView, max_drafts: int, lowest_chance: float = 0.0) -> Proposal:
        """Return the path down from the longest match.

        At most `max_drafts` tokens, none with a chance below `lowest_chance`.
        """
        state = self._states.get(view.sequence_id)
        if state is None:
            state = self._states[view.sequence_id] = _State(view, self._recent)
        for token in state.text.unseen(view):
            self._keep_current(state)
            state.take(token, self._recent, self._confidence)
        self._keep_current(state)
        return self._walk(state, max_drafts, lowest_chance)

    @property
    def num_recent_tokens(self) -> int:
        """Tokens of ended outputs that are kept, with a separator behind each output."""
        return len(self._recent.tokens)

    @property
    def num_sequences(self) -> int:
        """Sequences that were proposed for and are not forgotten."""
        return len(self._states)

    def forget(self, view: DraftView) -> None:
        """Drop the sequence; add its output to the recent ones, and drop the oldest of them."""
        if self._states.pop(view.sequence_id, None) is None:
            return
        output = view.output_token_ids
        size = len(output) + 1
        if not RECENT_RUN < size <= self._most_recent_tokens:
            return
        self._recent.extend(output)
        self._recent.extend((SEPARATOR,))
        self._recent_sizes.append(size)
        while len(self._recent.tokens) > self._most_recent_tokens:
            self._recent.drop_oldest(self._recent_sizes.popleft())

    def _keep_current(self, state: _State) -> None:
        """Drop matches in outputs that were dropped since."""
        if state.source is self._recent and state.positions[-1] < self._recent.num_dropped:
            state.others = self._recent.still_there(state.others)
            state.choose(self._recent)

    def _walk(self, state: _State, most: int, lowest_chance: float) -> Proposal:
        chances = self._confidence.chances(state.length, most, lowest_chance)
        if not chances:
            return NO_PROPOSAL
        most = len(chances)
        path, shares = most_frequent_path(
            [state.source.tokens_from(position, most) for position in state.positions]
        )
        if shares[-1:] != (1.0,):
            chances = tuple(map(mul, chances, shares))
            path = path[: bisect_right(chances, -lowest_chance, key=neg)]
        return Proposal(path, chances[: len(path)])


def most_frequent_path(
    branches: list[tuple[int, ...]],
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Return the path down the tree below one node, each time to the child with the most leaves.

    `branches` are the tokens that lead to each leaf, all equally many, the most recent leaf first:
    among children with equally many leaves the one with the most recent leaf is taken. Returns the
    tokens of the path, up to a separator, and the share of all leaves that is left below each of
    them.
    """
    if not branches:
        return (), ()
    num_leaves = len(branches)
    shares: list[float] = []
    depth = 0
    while branches.count(branches[0]) < len(branches):
        children = [branch[depth] for branch in branches]
        token = max(dict.fromkeys(children), key=children.count)
        branches = [branch for branch in branches if branch[depth] == token]
        shares.append(len(branches) / num_leaves)
        depth += 1
    path = branches[0]
    if SEPARATOR in path:
        path = path[: path.index(SEPARATOR)]
    shares += [len(branches) / num_leaves] * (len(path) - depth)
    return path, tuple(shares[: len(path)])
