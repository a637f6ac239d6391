"""Keep back what running sequences will need at the worst moment, by the lengths of past outputs.

The sum of all expected growth is too much: when the longest output ends, the shorter ones have long
given back their blocks. So the expected lengths are followed through the future: at each moment at
which a sequence is expected to end, the others have grown by so many tokens, and the largest use of
blocks is what must fit (the past-future scheduling of LightLLM). The lengths of past outputs are
kept when the node is idle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from engine.core.policies.growth import GrowthColumns, GrowthView, all_growth_tokens
from engine.core.policies.output_history import Ints, OutputHistory


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
        return self.history.remaining(rows.num_output, rows.max_new_tokens, self.quantile_ppm)

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


@dataclass(frozen=True, slots=True, eq=False)
class PeakReserve:
    """The expected future of some sequences.

    The columns are sorted by `ends`: in how many tokens each sequence ends. `known` are its tokens
    now, `held_tokens` the slots of all. When a sequence ends, those behind it in the columns and
    itself are still there: `num_left` sequences with `left_known` tokens now, which use `used`
    tokens then. A sequence that was taken out stands there a second time, with weight -1.
    """

    policy: LearnedOutputs
    ends: Ints
    known: Ints
    weights: Ints
    num_left: Ints
    left_known: Ints
    used: Ints
    held_tokens: int

    @classmethod
    def of(cls, policy: LearnedOutputs, rows: GrowthColumns) -> PeakReserve:
        """Return the reserve of `rows`. A sequence that leaves after its prompt never grows."""
        grows = rows.max_new_tokens > 0
        held_tokens = int(rows.num_held_blocks[grows].sum()) * policy.block_size
        ends = policy.expected(rows)
        lasts = grows & (ends > 0)
        weights = np.ones(int(lasts.sum()), np.int64)
        return cls._sorted(policy, ends[lasts], rows.num_known[lasts], weights, held_tokens)

    @classmethod
    def _sorted(
        cls, policy: LearnedOutputs, ends: Ints, known: Ints, weights: Ints, held_tokens: int
    ) -> PeakReserve:
        order = np.argsort(ends, kind="stable")
        ends, known, weights = ends[order], known[order], weights[order]
        num_left = np.cumsum(weights[::-1])[::-1]
        left_known = np.cumsum((known * weights)[::-1])[::-1]
        used = left_known + num_left * (ends + _rest(policy))
        return cls(policy, ends, known, weights, num_left, left_known, used, held_tokens)

    @property
    def blocks(self) -> int:
        """Blocks for the largest use."""
        return self._blocks(int(self.used.max(initial=0)), self.held_tokens)

    def blocks_with(self, candidate: GrowthView) -> int:
        """Return the blocks for the largest use, if `candidate` was seated too."""
        if candidate.max_new_tokens <= 0:
            return self.blocks
        held_tokens = self.held_tokens + candidate.num_held_blocks * self.policy.block_size
        end, rest = self._end_of(candidate), _rest(self.policy)
        if end <= 0:
            return self._blocks(int(self.used.max(initial=0)), held_tokens)
        own = np.where(self.ends <= end, candidate.num_known + self.ends + rest, 0)
        most = int((self.used + own).max(initial=0))
        at_end = candidate.num_known + end + rest
        later = int(np.searchsorted(self.ends, end))
        if later < len(self.ends):
            at_end += int(self.left_known[later] + self.num_left[later] * (end + rest))
        return self._blocks(max(most, at_end), held_tokens)

    def plus(self, view: GrowthView) -> PeakReserve:
        """Return the reserve with one more sequence."""
        return self._with(view, 1)

    def minus(self, view: GrowthView) -> PeakReserve:
        """Return the reserve without a sequence."""
        return self._with(view, -1)

    def _with(self, view: GrowthView, weight: int) -> PeakReserve:
        if view.max_new_tokens <= 0:
            return self
        held_tokens = self.held_tokens + weight * view.num_held_blocks * self.policy.block_size
        end = self._end_of(view)
        if end <= 0:
            return replace(self, held_tokens=held_tokens)
        return self._sorted(
            self.policy,
            np.append(self.ends, end),
            np.append(self.known, view.num_known),
            np.append(self.weights, weight),
            held_tokens,
        )

    def _end_of(self, view: GrowthView) -> int:
        row = GrowthColumns(
            num_known=np.array([view.num_known]),
            num_output=np.array([view.num_output]),
            max_new_tokens=np.array([view.max_new_tokens]),
            num_held_blocks=np.array([view.num_held_blocks]),
        )
        return int(self.policy.expected(row)[0])

    def _blocks(self, used: int, held_tokens: int) -> int:
        return -(-max(used - held_tokens, 0) // self.policy.block_size)


def _rest(policy: LearnedOutputs) -> int:
    """Return the tokens to count beside those of a sequence: drafts, unused slots of its blocks.

    Half of the last block is unused on average. But the sum over all sequences scatters around
    that, and a pool that is filled to the expected sum preempts whenever it is exceeded. A quarter
    of a block more is enough that it rarely is, also with the true lengths of all outputs.
    """
    return policy.lookahead + 3 * policy.block_size // 4
