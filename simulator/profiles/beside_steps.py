"""What a node and its router take beside the steps of the model, by what clients saw of a cluster.

    turn_s      of each step: planning it, applying its results, sending the tokens
    row_s       of each further answer in a step
    request_s   of each request: HTTP, placement, calls of nodes, the way of the first token
    handoff_s   of each handoff, beside the time of its bytes: until the answer is in a step
    slowdown    how many times as long a step takes while another node of the machine computes

All of them are differences or ratios of measured times. Noise may make a difference negative: then
it is 0, and the ratio 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

from common.measured_profile import MeasuredProfile, StreamedTime

Seconds = Callable[[float, float], float]
"""Seconds of a step by rows or tokens, and context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BesideSteps:
    """Seconds, and a ratio. The defaults are those of a profile without a cluster."""

    turn_s: float = 0.0
    row_s: float = 0.0
    request_s: float = 0.0
    handoff_s: float = 0.0
    slowdown: float = 1.0

    def of_step(self, rows: int) -> float:
        """Return the seconds of a step that decodes so many rows; none: it computes prompts."""
        return self.turn_s + self.row_s * max(0, rows - 1)


NOTHING_BESIDE = BesideSteps()


def beside_steps(
    profile: MeasuredProfile,
    decode_s: Seconds,
    prompt_s: Callable[[int], float],
    moved_s: Callable[[int], float],
) -> BesideSteps:
    """Return what is beside steps of `decode_s`, the steps of prompts that take `prompt_s`, and the
    KV of a prompt that moves in `moved_s` after its last step."""
    alone = sorted((one for one in profile.streamed if not one.others), key=lambda one: one.rows)
    if not alone:
        return NOTHING_BESIDE

    def over_s(one: StreamedTime) -> float:
        return one.step_s - decode_s(one.rows, one.context)

    few, many = alone[0], alone[-1]
    turn_s, row_s = max(0.0, over_s(few)), 0.0
    if many.rows > few.rows:
        row_s = max(0.0, (over_s(many) - turn_s) / (many.rows - few.rows))
    first = {one.others > 0: one for one in profile.first_tokens}
    ratios = [
        one.step_s / (decode_s(one.rows, one.context) + turn_s)
        for one in profile.streamed
        if one.others and one.rows == few.rows
    ]
    handoffs_s = [
        max(0.0, second.seconds - decode_s(1, second.tokens) - turn_s - moved_s(second.tokens))
        for second in profile.second_tokens
    ]
    request_s = 0.0
    if False in first:
        request_s = max(0.0, first[False].seconds - prompt_s(first[False].tokens) - turn_s)
        if True in first and first[True].tokens == first[False].tokens:
            ratios.append(first[True].seconds / first[False].seconds)
    return BesideSteps(
        turn_s=turn_s,
        row_s=row_s,
        request_s=request_s,
        handoff_s=fmean(handoffs_s) if handoffs_s else 0.0,
        slowdown=max(1.0, fmean(ratios)) if ratios else 1.0,
    )
