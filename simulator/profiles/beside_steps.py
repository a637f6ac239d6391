"""What a node and its router take beside the steps of the model, by what clients saw of a cluster.

    turn_s           of each step: planning it, applying its results, sending the tokens
    row_s            of each further answer in a step
    request_s        of each request: HTTP, placement, calls of nodes, the way of the first token
    push_s           of each step whose KV goes to another node: its layers are handed over
    handoff_s        of each handoff, beside the time of its bytes: until the answer is in a step;
                     below 0 where bytes between pools of one process took longer
    prompt_factor    how many times as long steps of prompts take in a cluster as in a process that
                     does nothing else: their KV goes to other memory and to another node
    decode_slowdown, prompt_slowdown
                     how many times as long a step of answers alone, and one with a prompt, takes
                     while another node of the machine computes

All of them are differences or ratios of measured times. First tokens of a short and a long prompt
of another node tell what a prompt takes and what each of its tokens does. So what follows is right
for the machine as it was when it served, even if it was slower or faster when steps were measured.
The first token of a prompt that the decode node computes itself tells a request and its pushes
apart. Noise may make another difference negative: then it is 0, and a slowdown 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from common.measured_profile import FirstTokenTime, MeasuredProfile, StreamedTime

Seconds = Callable[[float, float], float]
"""Seconds of a step by rows or tokens, and context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BesideSteps:
    """Seconds, and ratios. The defaults are those of a profile without a cluster."""

    turn_s: float = 0.0
    row_s: float = 0.0
    request_s: float = 0.0
    push_s: float = 0.0
    handoff_s: float = 0.0
    prompt_factor: float = 1.0
    decode_slowdown: float = 1.0
    prompt_slowdown: float = 1.0

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
    alone = [one for one in profile.streamed if not one.others]
    if not alone:
        return NOTHING_BESIDE

    def over_s(one: StreamedTime) -> float:
        return one.step_s - decode_s(one.rows, one.context)

    rows = [one.rows for one in alone]
    few, many = min(rows), max(rows)
    turn_s, row_s = max(0.0, _mean_over(over_s, alone, few)), 0.0
    if many > few:
        row_s = max(0.0, (_mean_over(over_s, alone, many) - turn_s) / (many - few))
    handoffs_s = [
        second.seconds - decode_s(1, second.tokens) - turn_s - moved_s(second.tokens)
        for second in profile.second_tokens
    ]
    first = sorted(
        (one for one in profile.first_tokens if not one.others), key=lambda one: one.tokens
    )
    handed_over = [one for one in first if one.nodes > 1]
    both_s, prompt_factor = _request(handed_over, prompt_s, turn_s)
    request_s = min(
        (
            max(0.0, one.seconds - turn_s - prompt_factor * prompt_s(one.tokens))
            for one in first
            if one.nodes == 1
        ),
        default=both_s,
    )
    request_s = min(request_s, both_s)
    first_s = {one.tokens: one.seconds for one in first}
    return BesideSteps(
        turn_s=turn_s,
        row_s=row_s,
        request_s=request_s,
        push_s=both_s - request_s,
        handoff_s=fmean(handoffs_s) if handoffs_s else 0.0,
        prompt_factor=prompt_factor,
        decode_slowdown=_slowdown(
            one.step_s / (decode_s(one.rows, one.context) + turn_s)
            for one in profile.streamed
            if one.others and one.rows == few
        ),
        prompt_slowdown=_slowdown(
            one.seconds / first_s[one.tokens]
            for one in profile.first_tokens
            if one.others and one.tokens in first_s
        ),
    )


def _mean_over(
    over_s: Callable[[StreamedTime], float], times: Iterable[StreamedTime], rows: int
) -> float:
    return fmean(over_s(one) for one in times if one.rows == rows)


def _request(
    first: Sequence[FirstTokenTime], prompt_s: Callable[[int], float], turn_s: float
) -> tuple[float, float]:
    """Return what a request and its pushes take, and how many times as long as `prompt_s` its
    prompt takes.

    `first` are the first tokens of prompts, the shortest first. A single length does not tell both
    apart: then a prompt takes what its steps take.
    """
    if not first:
        return 0.0, 1.0
    small, large = first[0], first[-1]
    factor, more_s = 1.0, prompt_s(large.tokens) - prompt_s(small.tokens)
    if large.seconds > small.seconds and more_s > 0:
        factor = (large.seconds - small.seconds) / more_s
    request_s = small.seconds - turn_s - factor * prompt_s(small.tokens)
    return max(0.0, request_s), factor


def _slowdown(ratios: Iterable[float]) -> float:
    found = list(ratios)
    return max(1.0, fmean(found)) if found else 1.0
