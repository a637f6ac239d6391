"""Blocks kept back for a set of seated sequences, as candidates are tried one after the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, Self

from engine.core.policies.growth import GrowthColumns, GrowthView, SeatedView


class Reserve(Protocol):
    """What a reservation policy keeps back for the sequences that are seated; never changed."""

    @property
    def blocks(self) -> int:
        """Blocks to keep back."""

    def blocks_with(self, candidate: GrowthView) -> int:
        """Return the blocks to keep back if `candidate` was seated too."""

    def plus(self, view: GrowthView) -> Self:
        """Return the reserve with one more sequence."""

    def minus(self, view: GrowthView) -> Self:
        """Return the reserve without a sequence, which must be one of the seated."""

    def grown(self, view: GrowthView, num_blocks: int) -> Self:
        """Return the reserve when `view`, one of the seated, holds `num_blocks` more."""


class Summed:
    """A policy whose sequences' demands are added up, in a unit of its own.

    It learns nothing from complete outputs, unless it says otherwise.
    """

    __slots__ = ()

    def demand(self, view: GrowthView) -> int:
        """Return what one sequence is expected to need beyond what it holds; at least 0."""
        raise NotImplementedError

    def candidate_demand(self, view: GrowthView) -> int:
        """Return what one candidate adds to the demands of the seated sequences."""
        return self.demand(view)

    def total_demand(self, seated: GrowthColumns) -> int:
        """Return the sum of `demand` over all rows of `seated`, in a few array operations."""
        raise NotImplementedError

    def blocks(self, total_demand: int) -> int:
        """Return the blocks for a sum of demands."""
        return total_demand

    def reserve(self, seated: GrowthColumns) -> SummedReserve:
        """Return the reserve of these sequences."""
        return SummedReserve(self, self.total_demand(seated))

    def after_output(self, view: GrowthView) -> Self:
        """Return the policy after a sequence has ended by itself."""
        return self


@dataclass(frozen=True, slots=True)
class SummedReserve:
    """The sum of all demands."""

    demands: Summed
    total: int

    @property
    def blocks(self) -> int:
        """Blocks for the sum."""
        return self.demands.blocks(self.total)

    def blocks_with(self, candidate: GrowthView) -> int:
        """Return the blocks for the sum and the candidate."""
        return self.demands.blocks(self.total + self.demands.candidate_demand(candidate))

    def plus(self, view: GrowthView) -> SummedReserve:
        """Return the reserve with one more sequence."""
        return SummedReserve(self.demands, self.total + self.demands.demand(view))

    def minus(self, view: GrowthView) -> SummedReserve:
        """Return the reserve without a sequence."""
        return SummedReserve(self.demands, self.total - self.demands.demand(view))

    def grown(self, view: GrowthView, num_blocks: int) -> SummedReserve:
        """Return the sum when one sequence holds more blocks."""
        more = SeatedView(
            view.num_known,
            view.num_output,
            view.max_new_tokens,
            view.num_held_blocks + num_blocks,
        )
        return self.minus(view).plus(more)
