"""The share of the remaining output that is expected to be produced; it adapts.

It falls with every decode step without a preemption, rises after a preemption, and starts anew when
nothing runs or waits (the `new_token_ratio` of SGLang and FastDeploy).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine.core.policies.growth import MILLION, GrowthView


@dataclass(frozen=True, slots=True)
class NewTokenRatio:
    """A share in millionths, always within `lowest_ppm` and `initial_ppm`.

    It falls linearly by `(initial - lowest) / decay_steps` a step, not at all when `decay_steps` is
    0. `num_steps` counts steps since `base_ppm`, so that rounding errors do not add up.
    """

    initial_ppm: int
    lowest_ppm: int
    decay_steps: int
    ppm: int
    base_ppm: int
    num_steps: int = 0

    @classmethod
    def at_start(cls, initial_ppm: int, lowest_ppm: int, decay_steps: int) -> NewTokenRatio:
        """Return the first share, `initial_ppm`."""
        return cls(initial_ppm, lowest_ppm, decay_steps, ppm=initial_ppm, base_ppm=initial_ppm)

    def after_decode_step(self) -> NewTokenRatio:
        """Return the share after a step with decodes and no preemption."""
        if self.decay_steps == 0 or self.ppm == self.lowest_ppm:
            return self
        num_steps = self.num_steps + 1
        fallen = (self.initial_ppm - self.lowest_ppm) * num_steps // self.decay_steps
        ppm = max(self.base_ppm - fallen, self.lowest_ppm)
        return replace(self, ppm=ppm, num_steps=num_steps)

    def after_preemption(self, estimate_ppm: int) -> NewTokenRatio:
        """Return the share after a preemption: raised to the estimate, never lowered."""
        if estimate_ppm <= self.ppm:
            return self
        ppm = min(estimate_ppm, self.initial_ppm)
        return replace(self, ppm=ppm, base_ppm=ppm, num_steps=0)

    def when_idle(self) -> NewTokenRatio:
        """Return the first share again."""
        if self.ppm == self.initial_ppm and self.num_steps == 0:
            return self
        return self.at_start(self.initial_ppm, self.lowest_ppm, self.decay_steps)


def estimated_ratio_ppm(left: Sequence[GrowthView], clip: int, extra_tokens: int) -> int:
    """Return the share of their outputs that the decoding sequences `left` will soon have produced.

    Each is expected to produce `extra_tokens` more. Both sums are clipped as the reservation is, so
    that requests for very long outputs do not make the share vanish. The share is 1 (in millionths)
    when `left` is empty.
    """
    if not left:
        return MILLION
    produced = sum(min(view.num_output, clip) for view in left) + extra_tokens * len(left)
    allowed = sum(min(view.max_new_tokens, clip) for view in left) + 1
    return -(-produced * MILLION // allowed)
