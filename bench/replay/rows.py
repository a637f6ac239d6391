"""The rows of the comparison: the policies of this project, those of other engines, and an oracle.

Each policy has the settings with which it did best on the traces. The rows of other engines have
what is known of those: vLLM admits whatever fits, in strict order; SGLang charges a candidate its
whole output, preempts the shortest output, and queues it behind all others. The oracle knows how
long each output will be, and uses it as the default policy uses its expectation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from common.settings.config import SchedulingConfig
from engine.core.policies.growth import MILLION, GrowthView, growth_tokens, to_millionths
from engine.core.policies.learned_outputs import LearnedOutputs
from engine.core.policies.new_token_ratio import NewTokenRatio
from engine.core.policies.output_history import OutputHistory
from engine.core.policies.ratio_reservations import GlobalRatio
from engine.core.policies.reservation import Reservation, make_reservation


@dataclass(frozen=True, slots=True)
class Row:
    """Settings that replace those of all replays, and what no setting can say."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    charges_full_candidate: bool = False
    knows_lengths: bool = False
    counts_attention: bool = True
    """Whether chunks beside decodes are cut where their context is long."""

    def config(self, base: SchedulingConfig) -> SchedulingConfig:
        """Return `base` with the row's settings."""
        return replace(base, **self.settings)

    def reservation(self, config: SchedulingConfig, block_size: int) -> Reservation:
        """Return the row's reservation policy in its first state."""
        if self.charges_full_candidate:
            return _full_candidate(config, block_size)
        if self.knows_lengths:
            # Each sequence's limit is its true length here, so all of what remains is expected.
            return TrueLengths(MILLION, MILLION, 1 << 24, 0, block_size, OutputHistory())
        return make_reservation(config, block_size=block_size, lookahead=0)


class TrueLengths(LearnedOutputs):
    """Learns nothing, because the limits of the sequences are their true lengths."""

    __slots__ = ()

    def after_output(self, view: GrowthView) -> Self:
        """Return this policy."""
        return self


class FullCandidate(GlobalRatio):
    """Charges a candidate all of its remaining output, up to the clip (SGLang)."""

    __slots__ = ()

    def candidate_demand(self, view: GrowthView) -> int:
        """Return the tokens of the whole remaining output beyond the free slots."""
        expected = growth_tokens(view, MILLION, self.clip, self.lookahead)
        return max(view.num_known + expected - view.num_held_blocks * self.block_size, 0)


def _full_candidate(config: SchedulingConfig, block_size: int) -> Reservation:
    initial = config.init_new_token_ratio
    return FullCandidate(
        NewTokenRatio.at_start(
            to_millionths(initial),
            to_millionths(initial * config.min_new_token_ratio_factor),
            config.new_token_ratio_decay_steps,
        ),
        clip=config.clip_max_new_tokens,
        extra_tokens=config.retract_decode_steps,
        lookahead=0,
        block_size=block_size,
    )


_WHOLE_STEPS = {"skip_ahead_window": 0, "min_progress_tokens": 0, "long_prefill_token_threshold": 0}
_FIRST = "reserve_output_block_num_for_decode_when_schedule_new_prefill"
_DECAY = "reserve_decay_output_block_num_for_decode_when_schedule_new_prefill"

ROWS = (
    Row("learned", {"reservation_policy": "learned"}),
    Row(
        "learned, shortest_output",
        {"reservation_policy": "learned", "preemption_policy": "shortest_output"},
    ),
    Row("global_ratio", {"reservation_policy": "global_ratio", "init_new_token_ratio": 0.3}),
    Row(
        "token_ratio",
        {
            "reservation_policy": "token_ratio",
            "init_new_token_ratio": 0.1,
            "min_new_token_ratio": 0.05,
        },
    ),
    Row("fixed_blocks", {"reservation_policy": "fixed_blocks", _FIRST: 1, _DECAY: 0.0}),
    Row("none", {"reservation_policy": "none"}),
    Row(
        "vLLM-like",
        {"reservation_policy": "none", "retract_decode_steps": 0, **_WHOLE_STEPS},
        counts_attention=False,
    ),
    Row(
        "SGLang-like",
        {"preemption_policy": "shortest_output", "requeue": "tail", **_WHOLE_STEPS},
        charges_full_candidate=True,
        counts_attention=False,
    ),
    Row("oracle", knows_lengths=True),
)
BY_NAME = {row.name: row for row in ROWS}
