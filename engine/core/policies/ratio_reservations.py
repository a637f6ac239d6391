"""Keep back blocks for a share of the remaining outputs, per sequence or for all together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from engine.core.policies.growth import (
    MILLION,
    GrowthColumns,
    GrowthView,
    all_growth_blocks,
    all_growth_tokens,
    growth_blocks,
    growth_tokens,
)
from engine.core.policies.new_token_ratio import NewTokenRatio, estimated_ratio_ppm
from engine.core.policies.reserve import Summed


@dataclass(frozen=True, slots=True)
class _LearntRatio(Summed):
    """The ratio that both policies share, and how it changes.

    `clip` bounds the remaining output that counts. After a preemption each remaining sequence is
    expected to produce `extra_tokens` more.
    """

    new_token_ratio: NewTokenRatio
    clip: int
    extra_tokens: int
    lookahead: int
    block_size: int

    @property
    def ratio(self) -> float:
        """The share of remaining outputs that is kept back."""
        return self.new_token_ratio.ppm / MILLION

    def after_decode_step(self) -> Self:
        """Return the policy with a lower share."""
        return self._with(self.new_token_ratio.after_decode_step())

    def after_preemption(self, left: Sequence[GrowthView]) -> Self:
        """Return the policy with the share raised to what `left` are expected to produce."""
        estimate_ppm = estimated_ratio_ppm(left, self.clip, self.extra_tokens)
        return self._with(self.new_token_ratio.after_preemption(estimate_ppm))

    def when_idle(self) -> Self:
        """Return the policy with the first share again."""
        return self._with(self.new_token_ratio.when_idle())

    def _with(self, ratio: NewTokenRatio) -> Self:
        return self if ratio is self.new_token_ratio else replace(self, new_token_ratio=ratio)


@dataclass(frozen=True, slots=True)
class TokenRatio(_LearntRatio):
    """Blocks for a share of each sequence's own remaining output (FastDeploy)."""

    def demand(self, view: GrowthView) -> int:
        """Return the blocks to keep back for one sequence."""
        ppm = self.new_token_ratio.ppm
        return growth_blocks(view, ppm, self.clip, self.lookahead, self.block_size)

    def total_demand(self, seated: GrowthColumns) -> int:
        """Return the sum of `demand` over all rows."""
        ppm = self.new_token_ratio.ppm
        blocks = all_growth_blocks(seated, ppm, self.clip, self.lookahead, self.block_size)
        return int(blocks.sum())


@dataclass(frozen=True, slots=True)
class GlobalRatio(_LearntRatio):
    """Tokens for a share of all remaining outputs, rounded up to blocks once (SGLang)."""

    def demand(self, view: GrowthView) -> int:
        """Return the tokens of one sequence beyond the free slots of the blocks it holds."""
        expected = growth_tokens(view, self.new_token_ratio.ppm, self.clip, self.lookahead)
        missing = view.num_known + expected - view.num_held_blocks * self.block_size
        return missing if missing > 0 else 0

    def total_demand(self, seated: GrowthColumns) -> int:
        """Return the sum of `demand` over all rows."""
        ppm = self.new_token_ratio.ppm
        expected = all_growth_tokens(seated, ppm, self.clip, self.lookahead)
        missing = seated.num_known + expected - seated.num_held_blocks * self.block_size
        return int(np.maximum(missing, 0).sum())

    def blocks(self, total_demand: int) -> int:
        """Return the blocks of the sum, rounded up once."""
        return -(-total_demand // self.block_size)
