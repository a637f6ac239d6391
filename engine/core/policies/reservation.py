"""Blocks kept back for the outputs of running sequences, so that admissions cause no preemptions.

A policy is a frozen value. The demands of all sequences that run, or whose KV is arriving, are
added up in the policy's own unit; `blocks` converts the sum to blocks. Each step returns a new
value of the policy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from common.config import SchedulingConfig
from engine.core.policies.fixed_blocks import FixedBlocks
from engine.core.policies.growth import GrowthColumns, GrowthView, growth_blocks, to_millionths
from engine.core.policies.new_token_ratio import NewTokenRatio
from engine.core.policies.ratio_reservations import GlobalRatio, TokenRatio

__all__ = [
    "RESERVATION_POLICIES",
    "FixedBlocks",
    "GlobalRatio",
    "GrowthView",
    "NoReservation",
    "Reservation",
    "TokenRatio",
    "growth_blocks",
    "make_reservation",
]


class Reservation(Protocol):
    """A reservation policy in its present state."""

    @property
    def ratio(self) -> float:
        """The share of remaining outputs that is kept back; 0 for policies without one."""

    def demand(self, view: GrowthView) -> int:
        """Return what one sequence is expected to need beyond what it holds; at least 0."""

    def candidate_demand(self, view: GrowthView) -> int:
        """Return what one candidate adds to the demands of the seated sequences."""

    def total_demand(self, seated: GrowthColumns) -> int:
        """Return the sum of `demand` over all rows of `seated`, in a few array operations."""

    def blocks(self, total_demand: int) -> int:
        """Return the blocks for a sum of demands."""

    def after_decode_step(self) -> Self:
        """Return the policy after a step with decodes and no preemption."""

    def after_preemption(self, left: Sequence[GrowthView]) -> Self:
        """Return the policy after a preemption; `left` are the remaining decoding sequences."""

    def when_idle(self) -> Self:
        """Return the policy when nothing runs, waits, was preempted or receives KV."""


@dataclass(frozen=True, slots=True)
class NoReservation:
    """Keep back no blocks."""

    @property
    def ratio(self) -> float:
        """0: this policy keeps back no share."""
        return 0.0

    def demand(self, view: GrowthView) -> int:
        """Return 0."""
        return 0

    candidate_demand = demand

    def total_demand(self, seated: GrowthColumns) -> int:
        """Return 0."""
        return 0

    def blocks(self, total_demand: int) -> int:
        """Return the sum, which is 0."""
        return total_demand

    def after_decode_step(self) -> NoReservation:
        """Return this policy."""
        return self

    def after_preemption(self, left: Sequence[GrowthView]) -> NoReservation:
        """Return this policy."""
        return self

    def when_idle(self) -> NoReservation:
        """Return this policy."""
        return self


def make_reservation(config: SchedulingConfig, *, block_size: int, lookahead: int) -> Reservation:
    """Return the policy that `config` names, in its first state.

    `lookahead` is the most drafts a sequence may have in one step.
    """
    return RESERVATION_POLICIES[config.reservation_policy](config, block_size, lookahead)


def _no_reservation(config: SchedulingConfig, block_size: int, lookahead: int) -> Reservation:
    return NoReservation()


def _fixed_blocks(config: SchedulingConfig, block_size: int, lookahead: int) -> Reservation:
    initial = config.reserve_output_block_num_for_decode_when_schedule_new_prefill
    lowest = config.reserve_min_output_block_num_for_decode_when_schedule_new_prefill
    decay = config.reserve_decay_output_block_num_for_decode_when_schedule_new_prefill
    return FixedBlocks(
        initial_ppm=to_millionths(initial),
        lowest_ppm=to_millionths(lowest),
        decay_ppm=to_millionths(decay),
        ppm=to_millionths(initial),
        block_size=block_size,
    )


def _token_ratio(config: SchedulingConfig, block_size: int, lookahead: int) -> Reservation:
    return TokenRatio(
        NewTokenRatio.at_start(
            to_millionths(config.init_new_token_ratio),
            to_millionths(config.min_new_token_ratio),
            config.new_token_ratio_decay_steps,
        ),
        clip=config.clip_max_new_tokens,
        extra_tokens=config.retract_extra_tokens,
        lookahead=lookahead,
        block_size=block_size,
    )


def _global_ratio(config: SchedulingConfig, block_size: int, lookahead: int) -> Reservation:
    """Free some decode steps at a preemption, each of up to one token and its drafts."""
    initial = min(config.init_new_token_ratio * config.schedule_conservativeness, 1.0)
    return GlobalRatio(
        NewTokenRatio.at_start(
            to_millionths(initial),
            to_millionths(initial * config.min_new_token_ratio_factor),
            config.new_token_ratio_decay_steps,
        ),
        clip=config.clip_max_new_tokens,
        extra_tokens=config.retract_decode_steps * (1 + lookahead),
        lookahead=lookahead,
        block_size=block_size,
    )


RESERVATION_POLICIES: dict[str, Callable[[SchedulingConfig, int, int], Reservation]] = {
    "none": _no_reservation,
    "fixed_blocks": _fixed_blocks,
    "token_ratio": _token_ratio,
    "global_ratio": _global_ratio,
}
