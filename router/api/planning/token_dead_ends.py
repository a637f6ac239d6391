"""Whether the rules about single tokens leave every answer of a request without a token to draw."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Set as AbstractSet

from common.errors import InvalidRequest
from common.request import SamplingParams

MAX_TRIES = 2000
"""Tokens that are looked at, some ten milliseconds. Behind that a request is taken as it is: where
it comes to an end without a token to draw, the node ends it."""

_State = tuple[int, ...]


def check_drawable(
    sampling: SamplingParams, max_tokens: int, eos_token_ids: AbstractSet[int]
) -> None:
    """Raise `InvalidRequest` where no output of `max_tokens` tokens, nor one that ends before, can
    be drawn. Beside a grammar there are no allowed tokens.
    """
    rules = sampling.rules
    if not rules.allowed_token_ids:
        return  # bad words and ends are few, and a vocabulary is large
    never_free = {word[-1] for word in rules.bad_words}.union(sampling.stop_token_ids)
    never_free |= eos_token_ids
    if any(one not in never_free for one in rules.allowed_token_ids):
        return  # this token can follow everything
    if not _Search(sampling, max_tokens, eos_token_ids).finds_output():
        raise InvalidRequest(
            "allowed_token_ids leaves no token to draw beside bad_words and min_tokens: wanted an "
            "allowed token that ends no word of bad_words, or an end that min_tokens allows",
            param="allowed_token_ids",
        )


class _Search:
    """A search for one output, depth first.

    What can follow an output depends on its longest suffix that begins a bad word (Aho and Corasick
    1975), and on whether `min_tokens` are there. An output that comes back to the same can go on
    for ever. One that has no end has none nearer to the beginning either: the fewer tokens are left
    up to `max_tokens`, and the more of `min_tokens` are there, the more answers there are.
    """

    def __init__(
        self, sampling: SamplingParams, max_tokens: int, eos_token_ids: AbstractSet[int]
    ) -> None:
        stops = frozenset(sampling.stop_token_ids)
        all_ends = stops | eos_token_ids
        self._ends = stops if sampling.ignore_eos else all_ends
        self._num_early = sampling.min_tokens
        self._max_tokens = max_tokens
        self._late = tuple(dict.fromkeys(sampling.rules.allowed_token_ids))
        self._early = tuple(one for one in self._late if one not in all_ends)
        words = sampling.rules.bad_words
        self._bad: dict[_State, set[int]] = {}
        """The tokens that no word of `bad_words` allows behind its other ones."""
        for word in words:
            self._bad.setdefault(word[:-1], set()).add(word[-1])
        self._starts = {word[:size] for word in words for size in range(len(word))} | {()}

    def finds_output(self) -> bool:
        """Return whether there is an output, and True where the search takes too long."""
        failed: dict[_State, int] = {}
        """The most tokens that were there when nothing could follow."""
        path: list[tuple[_State, bool]] = [((), self._is_early(0))]
        is_on_path = set(path)
        left = [self._tokens((), 0)]
        num_tries = 0
        while left:
            token_id = next(left[-1], None)
            num_output = len(path)
            if token_id is None:
                is_on_path.remove(path[-1])
                state, _ = path.pop()
                failed[state] = num_output - 1
                left.pop()
                continue
            num_tries += 1
            is_end = token_id in self._ends and not self._is_early(num_output - 1)
            if is_end or num_output == self._max_tokens or num_tries > MAX_TRIES:
                return True
            state = self._behind(path[-1][0], token_id)
            step = (state, self._is_early(num_output))
            if step in is_on_path:
                return True
            if num_output > failed.get(state, -1):
                path.append(step)
                is_on_path.add(step)
                left.append(self._tokens(state, num_output))
        return False

    def _is_early(self, num_output: int) -> bool:
        return num_output < self._num_early

    def _tokens(self, state: _State, num_output: int) -> Iterator[int]:
        """Return the tokens that may follow."""
        bad: set[int] = set()
        for first in range(len(state) + 1):
            bad |= self._bad.get(state[first:], set())
        allowed = self._early if self._is_early(num_output) else self._late
        return (one for one in allowed if one not in bad)

    def _behind(self, state: _State, token_id: int) -> _State:
        state = (*state, token_id)
        while state not in self._starts:
            state = state[1:]
        return state
