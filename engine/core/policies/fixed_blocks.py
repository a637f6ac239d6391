"""Keep back the same number of blocks for every sequence (an older policy of FastDeploy)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from engine.core.policies.growth import (
    MILLION,
    GrowthColumns,
    GrowthView,
    all_growth_blocks,
    growth_blocks,
)
from engine.core.policies.reserve import Summed


@dataclass(frozen=True, slots=True)
class FixedBlocks(Summed):
    """A number of blocks per sequence that falls after each decode step.

    A sequence counts at most with the blocks that it can still use. Amounts are in millionths of a
    block, because a step takes off a fraction of one; the reserve is rounded down. It starts at
    `initial_ppm`, and returns to it after a preemption.
    """

    initial_ppm: int
    lowest_ppm: int
    decay_ppm: int
    ppm: int
    block_size: int

    @property
    def ratio(self) -> float:
        """0: this policy keeps back no share."""
        return 0.0

    def demand(self, view: GrowthView) -> int:
        """Return the blocks to keep back for one sequence."""
        reserve = self.ppm // MILLION
        if reserve == 0:
            return 0
        most = growth_blocks(view, MILLION, view.max_new_tokens, 0, self.block_size)
        return reserve if reserve < most else most

    def total_demand(self, seated: GrowthColumns) -> int:
        """Return the sum of `demand` over all rows."""
        reserve = self.ppm // MILLION
        if reserve == 0:
            return 0
        most = all_growth_blocks(seated, MILLION, seated.max_new_tokens, 0, self.block_size)
        return int(np.minimum(most, reserve).sum())

    def candidate_demand(self, view: GrowthView) -> int:
        """Return 0: the reserve is for running sequences."""
        return 0

    def after_decode_step(self) -> FixedBlocks:
        """Return the policy with `decay_ppm` less, but at least `lowest_ppm`."""
        ppm = max(self.ppm - self.decay_ppm, self.lowest_ppm)
        return self if ppm == self.ppm else replace(self, ppm=ppm)

    def after_preemption(self, left: Sequence[GrowthView]) -> FixedBlocks:
        """Return the policy with the first amount again."""
        return self.when_idle()

    def when_idle(self) -> FixedBlocks:
        """Return the policy with the first amount again."""
        return self if self.ppm == self.initial_ppm else replace(self, ppm=self.initial_ppm)
