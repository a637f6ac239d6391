"""Sequences as policies see them, and policies in a given state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, cast

from common.settings.config import SchedulingConfig
from engine.core.policies.growth import GrowthColumns, GrowthView
from engine.core.policies.reservation import Reservation, make_reservation
from engine.core.policies.reserve import Summed

BLOCK_SIZE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A sequence that holds nothing yet, unless said."""

    num_known: int = 0
    num_output: int = 0
    max_new_tokens: int = 32768
    num_held_blocks: int = 0


class SummedReservation(Reservation, Protocol):
    """A reservation whose demands are added up: all but one policy are."""

    def demand(self, view: GrowthView) -> int: ...
    def candidate_demand(self, view: GrowthView) -> int: ...
    def total_demand(self, seated: GrowthColumns) -> int: ...
    def blocks(self, total_demand: int) -> int: ...


def summed(config: SchedulingConfig, *, block_size: int, lookahead: int) -> SummedReservation:
    """The policy of a configuration that names none but summed ones."""
    reservation = make_reservation(config, block_size=block_size, lookahead=lookahead)
    assert isinstance(reservation, Summed)
    return cast(SummedReservation, reservation)


def policy(
    name: str, *, lookahead: int = 0, num_steps: int = 0, **settings: Any
) -> SummedReservation:
    """A policy after `num_steps` decode steps; the default ratio falls by 0.001 in each."""
    config = SchedulingConfig(reservation_policy=name, **settings)
    assert config.problems() == []
    reservation = cast(
        SummedReservation, make_reservation(config, block_size=BLOCK_SIZE, lookahead=lookahead)
    )
    for _ in range(num_steps):
        reservation = reservation.after_decode_step()
    return reservation


@dataclass(frozen=True, slots=True, kw_only=True)
class Decode:
    name: str
    num_output: int
    num_prompt: int
    priority: int
    arrival: int
    sequence_id: int = 0
    num_output_since_resume: int | None = None
