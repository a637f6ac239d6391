"""Keep back what running sequences will need at the worst moment, by the lengths of past outputs.

The sum of all expected growth is too much: when the longest output ends, the shorter ones have long
given back their blocks. So the expected lengths are followed through the future: at each moment at
which a sequence is expected to end, the others have grown by so many tokens, and the largest use of
blocks is what must fit (the past-future scheduling of LightLLM). The lengths of past outputs are
kept when the node is idle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import NamedTuple, Self

import numpy as np

from engine.core.policies.growth import (
    GrowthColumns,
    GrowthView,
    all_growth_tokens,
    growth_tokens,
)
from engine.core.policies.output_history import Ints, OutputHistory, inserted

_NONE: Ints = np.zeros(0, np.int64)
_FEW = 6
"""The most rows of which the remaining outputs take less time one by one than together."""


@dataclass(frozen=True, slots=True)
class LearnedOutputs:
    """Blocks for the largest expected use.

    `quantile_ppm` of the outputs in the history are at most as long as expected, in millionths. As
    long as there are too few, the share `first_share_ppm` of the remaining output is expected,
    clipped to `clip` tokens. `lookahead` slots are counted for each sequence.
    """

    quantile_ppm: int
    first_share_ppm: int
    clip: int
    lookahead: int
    block_size: int
    history: OutputHistory

    @property
    def ratio(self) -> float:
        """0: this policy keeps back no share."""
        return 0.0

    def expected(self, rows: GrowthColumns) -> Ints:
        """Return the output tokens that are still expected of each row."""
        if not self.history.can_predict:
            return all_growth_tokens(rows, self.first_share_ppm, self.clip, 0)
        if len(rows.num_output) <= _FEW:
            output, most = rows.num_output.tolist(), rows.max_new_tokens.tolist()
            found = map(self.history.remaining_of, output, most, repeat(self.quantile_ppm))
            return np.fromiter(found, np.int64, len(output))
        return self.history.remaining(rows.num_output, rows.max_new_tokens, self.quantile_ppm)

    def expected_of(self, view: GrowthView) -> int:
        """Return `expected` of one sequence, without arrays of one row."""
        if not self.history.can_predict:
            return growth_tokens(view, self.first_share_ppm, self.clip, 0)
        return self.history.remaining_of(view.num_output, view.max_new_tokens, self.quantile_ppm)

    def reserve(self, seated: GrowthColumns) -> PeakReserve:
        """Return the reserve of these sequences."""
        return PeakReserve.of(self, seated)

    def after_decode_step(self) -> Self:
        """Return this policy."""
        return self

    def after_preemption(self, left: Sequence[GrowthView]) -> Self:
        """Return this policy."""
        return self

    def after_output(self, view: GrowthView) -> Self:
        """Return the policy with one more complete output in its history."""
        history = self.history.after_output(view.num_output, view.max_new_tokens)
        return replace(self, history=history)

    def when_idle(self) -> Self:
        """Return this policy: what it has learned holds for the next requests too."""
        return self


class _Future(NamedTuple):
    """What some sequences are expected to use, from now to the end of the last one.

    The columns are sorted by `ends`: in how many tokens each sequence ends. `known` are its tokens
    now. When a sequence ends, those after it in the columns and itself are still there: `num_left`
    sequences with `left_known` tokens now. `most_used` is the largest use of tokens, and
    `most_with_one` up to each of `ends` the largest with one token of a further sequence for each
    that is drawn. A sequence that was taken out stands there a second time, with weight -1, after
    itself.
    """

    ends: Ints
    known: Ints
    weights: Ints
    num_left: Ints
    left_known: Ints
    most_used: int
    most_with_one: Ints

    @classmethod
    def of_sorted(
        cls, ends: Ints, known: Ints, weights: Ints, num_left: Ints, weighted: Ints, rest: int
    ) -> _Future:
        """Return that of sequences by their ends, each of which uses `rest` tokens beside its own;
        `weighted` are its tokens as often as it counts."""
        left_known = weighted[::-1].cumsum()[::-1]
        used = left_known + num_left * (ends + rest)
        most_used = int(used.max(initial=0))
        with_one = np.maximum.accumulate(used + ends)
        return cls(
            ends=ends,
            known=known,
            weights=weights,
            num_left=num_left,
            left_known=left_known,
            most_used=most_used,
            most_with_one=with_one,
        )

    def changed(self, end: int, num_known: int, weight: int, rest: int) -> _Future:
        """Return it with one more sequence, or with `weight` -1 without one."""
        index = int(self.ends.searchsorted(end, side="right"))
        known = inserted(self.known, index, num_known)
        weights = inserted(self.weights, index, weight)
        num_left = weights[::-1].cumsum()[::-1]
        ends = inserted(self.ends, index, end)
        return _Future.of_sorted(ends, known, weights, num_left, known * weights, rest)

    def most_used_with(self, end: int, num_known: int, rest: int) -> int:
        """Return the largest use if one more sequence was there, with `num_known` tokens now."""
        most, own = self.most_used, num_known + rest
        at_end = own + end
        # Those that end together with the candidate are still there at its end.
        num_before = int(self.ends.searchsorted(end))
        if num_before:
            most = max(most, int(self.most_with_one[num_before - 1]) + own)
        if num_before < len(self.ends):
            left = int(self.num_left[num_before]) * (end + rest)
            at_end += int(self.left_known[num_before]) + left
        return max(most, at_end)


_NO_FUTURE = _Future.of_sorted(_NONE, _NONE, _NONE, _NONE, _NONE, 0)


class PeakReserve:
    """The expected future of some sequences: `most_used` tokens, and the slots that they hold.

    With one more sequence only the largest use is known at first. The rest is made when somebody
    asks what a further one would change: most often the last candidate of a plan was added.
    """

    __slots__ = ("_future", "held_tokens", "most_used", "policy")

    def __init__(
        self,
        policy: LearnedOutputs,
        held_tokens: int,
        most_used: int,
        future: _Future | Callable[[], _Future],
    ) -> None:
        """Hold the known values; `future` may make the rest."""
        self.policy, self.held_tokens, self.most_used = policy, held_tokens, most_used
        self._future = future

    @classmethod
    def of(cls, policy: LearnedOutputs, rows: GrowthColumns) -> PeakReserve:
        """Return the reserve of `rows`. A sequence that leaves after its prompt never grows."""
        growing = (rows.max_new_tokens > 0).nonzero()[0]
        if not len(growing):  # as on a node that only prefills
            return cls._known(policy, 0, _NO_FUTURE)
        rows = rows.taken(growing)
        held_tokens = int(rows.num_held_blocks.sum()) * policy.block_size
        ends = policy.expected(rows)
        order = ends.argsort(kind="stable")
        order = order[len(ends) - np.count_nonzero(ends) :]
        ends, known = ends.take(order), rows.num_known.take(order)
        num_left = np.arange(len(ends), 0, -1)
        rest = _rest(policy)
        future = _Future.of_sorted(ends, known, np.ones_like(ends), num_left, known, rest)
        return cls._known(policy, held_tokens, future)

    @classmethod
    def _known(cls, policy: LearnedOutputs, held_tokens: int, future: _Future) -> PeakReserve:
        return cls(policy, held_tokens, future.most_used, future)

    @property
    def blocks(self) -> int:
        """Blocks for the largest use."""
        return self._blocks(self.most_used, self.held_tokens)

    def blocks_with(self, candidate: GrowthView) -> int:
        """Return the blocks for the largest use, if `candidate` was seated too."""
        if candidate.max_new_tokens <= 0:
            return self.blocks
        held_tokens = self.held_tokens + candidate.num_held_blocks * self.policy.block_size
        end, most_used = self.policy.expected_of(candidate), self.most_used
        if end > 0:
            rest = _rest(self.policy)
            most_used = self._columns().most_used_with(end, candidate.num_known, rest)
        return self._blocks(most_used, held_tokens)

    def plus(self, view: GrowthView) -> PeakReserve:
        """Return the reserve with one more sequence."""
        if view.max_new_tokens <= 0:
            return self
        held_tokens = self.held_tokens + view.num_held_blocks * self.policy.block_size
        end, num_known, rest = self.policy.expected_of(view), view.num_known, _rest(self.policy)
        if end <= 0:
            return self._holding(held_tokens)
        future = self._columns()
        return PeakReserve(
            self.policy,
            held_tokens,
            future.most_used_with(end, num_known, rest),
            lambda: future.changed(end, num_known, 1, rest),
        )

    def minus(self, view: GrowthView) -> PeakReserve:
        """Return the reserve without a sequence."""
        if view.max_new_tokens <= 0:
            return self
        held_tokens = self.held_tokens - view.num_held_blocks * self.policy.block_size
        end, rest = self.policy.expected_of(view), _rest(self.policy)
        if end <= 0:
            return self._holding(held_tokens)
        future = self._columns().changed(end, view.num_known, -1, rest)
        return self._known(self.policy, held_tokens, future)

    def grown(self, view: GrowthView, num_blocks: int) -> PeakReserve:
        """Return the reserve when a seated sequence holds so many more blocks."""
        if view.max_new_tokens <= 0:
            return self
        return self._holding(self.held_tokens + num_blocks * self.policy.block_size)

    def _holding(self, held_tokens: int) -> PeakReserve:
        return PeakReserve(self.policy, held_tokens, self.most_used, self._future)

    def _columns(self) -> _Future:
        future = self._future
        if not isinstance(future, _Future):
            future = self._future = future()
        return future

    def _blocks(self, used: int, held_tokens: int) -> int:
        return -(-max(used - held_tokens, 0) // self.policy.block_size)


def _rest(policy: LearnedOutputs) -> int:
    """Return the tokens to count beside those of a sequence: drafts, unused slots of its blocks.

    Half of the last block is unused on average. But the sum over all sequences scatters around
    that, and a pool that is filled to the expected sum preempts whenever it is exceeded. A quarter
    of a block more is enough that it rarely is, also with the true lengths of all outputs.
    """
    return policy.lookahead + 3 * policy.block_size // 4
