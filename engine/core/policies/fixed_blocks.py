"""Keep back the same number of blocks for every sequence (FastDeploy's older policy)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine.core.policies.growth import MILLION, GrowthView, growth_blocks


@dataclass(frozen=True, slots=True)
class FixedBlocks:
    """Blocks for each sequence, fewer after each decode step; never more than it can still use.

    Amounts are in millionths of a block, because a step takes off a fraction of one; what is kept
    back is rounded down. It starts at `initial_ppm`, and is back there after a preemption.
    """

    initial_ppm: int
    lowest_ppm: int
    decay_ppm: int
    ppm: int
    block_size: int

    @property
    def ratio(self) -> float:
        """This policy has no share."""
        return 0.0

    def demand(self, view: GrowthView) -> int:
        """Blocks for one sequence."""
        reserve = self.ppm // MILLION
        if reserve == 0:
            return 0
        most = growth_blocks(view, MILLION, view.max_new_tokens, 0, self.block_size)
        return reserve if reserve < most else most

    def candidate_demand(self, view: GrowthView) -> int:
        """Nothing: the reserve is for those who run."""
        return 0

    def blocks(self, total_demand: int) -> int:
        """Demands are blocks already."""
        return total_demand

    def after_decode_step(self) -> FixedBlocks:
        """A little less, down to the lowest amount."""
        ppm = max(self.ppm - self.decay_ppm, self.lowest_ppm)
        return self if ppm == self.ppm else replace(self, ppm=ppm)

    def after_preemption(self, left: Sequence[GrowthView]) -> FixedBlocks:
        """Back to the first amount, whoever is left."""
        return self.when_idle()

    def when_idle(self) -> FixedBlocks:
        """Back to the first amount."""
        return self if self.ppm == self.initial_ppm else replace(self, ppm=self.initial_ppm)
