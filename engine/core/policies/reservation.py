"""Blocks kept back for the outputs of running sequences, so that admissions cause no preemptions.

A policy is a frozen value. Of all sequences that run, or whose KV is arriving, it makes the reserve
of one step (`reserve.Reserve`), to which the step's admissions are added. Each step, and each
complete output, returns a new value of the policy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from common.settings.config import SchedulingConfig
from engine.core.policies.fixed_blocks import FixedBlocks
from engine.core.policies.growth import GrowthColumns, GrowthView, growth_blocks, to_millionths
from engine.core.policies.learned_outputs import LearnedOutputs
from engine.core.policies.new_token_ratio import NewTokenRatio
from engine.core.policies.output_history import OutputHistory
from engine.core.policies.ratio_reservations import GlobalRatio, TokenRatio
from engine.core.policies.reserve import Reserve, Summed

__all__ = [
    "RESERVATION_POLICIES",
    "FixedBlocks",
    "GlobalRatio",
    "GrowthView",
    "LearnedOutputs",
    "NoReservation",
    "Reservation",
    "TokenRatio",
    "growth_blocks",
    "make_reservation",
]


_EXTRA_BLOCKS = 16
"""Blocks that a sequence is expected to fill after a preemption, unless a number is set."""


class Reservation(Protocol):
    """A reservation policy in its present state."""

    @property
    def ratio(self) -> float:
        """The share of remaining outputs that is kept back; 0 for policies without one."""

    def reserve(self, seated: GrowthColumns) -> Reserve:
        """Return what is kept back for `seated`, in a few array operations."""

    def after_decode_step(self) -> Self:
        """Return the policy after a step with decodes and no preemption."""

    def after_preemption(self, left: Sequence[GrowthView]) -> Self:
        """Return the policy after a preemption; `left` are the remaining decoding sequences."""

    def after_output(self, view: GrowthView) -> Self:
        """Return the policy after a sequence has ended by itself, with the output of `view`."""

    def when_idle(self) -> Self:
        """Return the policy when nothing runs, waits, was preempted or receives KV."""


@dataclass(frozen=True, slots=True)
class NoReservation(Summed):
    """Keep back no blocks."""

    @property
    def ratio(self) -> float:
        """0: this policy keeps back no share."""
        return 0.0

    def demand(self, view: GrowthView) -> int:
        """Return 0."""
        return 0

    def total_demand(self, seated: GrowthColumns) -> int:
        """Return 0."""
        return 0

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
    extra_tokens = config.retract_extra_tokens
    if extra_tokens < 0:
        extra_tokens = _EXTRA_BLOCKS * block_size
    return TokenRatio(
        NewTokenRatio.at_start(
            to_millionths(config.init_new_token_ratio),
            to_millionths(config.min_new_token_ratio),
            config.new_token_ratio_decay_steps,
        ),
        clip=config.clip_max_new_tokens,
        extra_tokens=extra_tokens,
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


def _learned(config: SchedulingConfig, block_size: int, lookahead: int) -> Reservation:
    return LearnedOutputs(
        quantile_ppm=to_millionths(config.learned_output_quantile),
        first_share_ppm=to_millionths(config.init_new_token_ratio),
        clip=config.clip_max_new_tokens,
        lookahead=lookahead,
        block_size=block_size,
        history=OutputHistory(),
    )


RESERVATION_POLICIES: dict[str, Callable[[SchedulingConfig, int, int], Reservation]] = {
    "none": _no_reservation,
    "fixed_blocks": _fixed_blocks,
    "token_ratio": _token_ratio,
    "global_ratio": _global_ratio,
    "learned": _learned,
}
