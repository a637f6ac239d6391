"""The time of a node and its router beside the steps of the model, as clients measured it.

    turn_s           of each step: planning it, applying its results, sending the tokens
    row_s            of each further answer in a step
    request_s        of each request: HTTP, placement, calls of nodes, drawing the first token and
                     its way
    push_s           of each step whose KV goes to another node: its layers are handed over
    handoff_s        of each handoff, beside the time of its bytes: until the answer is in a step;
                     below 0 where bytes between pools of one process took longer
    answer_factor    how many times as long steps of answers take in a cluster, where clients had
                     tokens sooner than the steps of a process alone end: its machine was slower
    prompt_factor    how many times as long steps of prompts take in a cluster as in a process that
                     does nothing else: their KV goes to other memory and to another node
    slowdowns        how many times as long a step of answers alone, and one with a prompt, takes
                     while another node of the machine computes answers, or prompts

All of them are differences or ratios of measured times. A short and a long prompt of another node
separate the time of a prompt from that of each of its tokens. So the results hold for the machine
as it was when it served, even if it was slower or faster when steps were measured. A prompt whose
node decodes its answer too has no pushes; beside others it is compared with one that as many nodes
served. Noise may make another difference negative: then it is 0, and a slowdown 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean

from common.measured_profile import Beside, MeasuredProfile, StreamedTime
from simulator.profiles.shared_cores import NO_SLOWDOWN, Slowdowns

Seconds = Callable[[float, float], float]
"""Seconds of a step by rows or tokens, and context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BesideSteps:
    """Seconds, a ratio, and `Slowdowns`. The defaults are those of a profile without a cluster."""

    turn_s: float = 0.0
    row_s: float = 0.0
    request_s: float = 0.0
    push_s: float = 0.0
    handoff_s: float = 0.0
    answer_factor: float = 1.0
    prompt_factor: float = 1.0
    slowdowns: Slowdowns = NO_SLOWDOWN

    def of_step(self, rows: int) -> float:
        """Return the seconds beside a step that decodes `rows` rows; 0: it computes prompts."""
        return self.turn_s + self.row_s * max(0, rows - 1)


NOTHING_BESIDE = BesideSteps()


def beside_steps(
    profile: MeasuredProfile,
    measured_s: Seconds,
    prompt_s: Callable[[int], float],
    moved_s: Callable[[int], float],
) -> BesideSteps:
    """Return the times beside the steps of a measured cluster.

    Decodes take `measured_s` in a process alone, the steps of prompts `prompt_s`, and the KV of a
    prompt moves within `moved_s` after its last step.
    """
    streamed = [one for one in profile.streamed if not one.beside]
    if not streamed:
        return NOTHING_BESIDE
    rows = [one.rows for one in streamed]
    few, many = min(rows), max(rows)
    answer_factor = min(1.0, *(_ratio(streamed, count, measured_s) for count in (few, many)))

    def decode_s(count: float, context: float) -> float:
        return answer_factor * measured_s(count, context)

    def over_s(one: StreamedTime) -> float:
        return one.step_s - decode_s(one.rows, one.context)

    turn_s, row_s = max(0.0, _mean_over(over_s, streamed, few)), 0.0
    if many > few:
        row_s = max(0.0, (_mean_over(over_s, streamed, many) - turn_s) / (many - few))
    handoffs_s = [
        second.seconds - decode_s(1, second.tokens) - turn_s - moved_s(second.tokens)
        for second in profile.second_tokens
    ]
    alone = [one for one in profile.first_tokens if not one.beside]
    compute_s = {(one.nodes, one.tokens): one.compute_s for one in alone}
    push_s, draw_s, prompt_factor = _prompts(compute_s, prompt_s, turn_s)

    def answers(beside: Beside) -> float:
        return _slowdown(
            one.step_s / (decode_s(one.rows, one.context) + turn_s)
            for one in profile.streamed
            if one.beside == beside and one.rows == few
        )

    def prompts(beside: Beside) -> float:
        return _slowdown(
            one.compute_s / compute_s[one.nodes, one.tokens]
            for one in profile.first_tokens
            if one.beside == beside and (one.nodes, one.tokens) in compute_s
        )

    return BesideSteps(
        turn_s=turn_s,
        row_s=row_s,
        request_s=draw_s + (fmean(one.seconds - one.compute_s for one in alone) if alone else 0.0),
        push_s=push_s,
        handoff_s=fmean(handoffs_s) if handoffs_s else 0.0,
        answer_factor=answer_factor,
        prompt_factor=prompt_factor,
        slowdowns=Slowdowns(
            answers("answers"), answers("prompts"), prompts("answers"), prompts("prompts")
        ),
    )


def _mean_over(
    over_s: Callable[[StreamedTime], float], times: Iterable[StreamedTime], rows: int
) -> float:
    return fmean(over_s(one) for one in times if one.rows == rows)


def _ratio(times: Iterable[StreamedTime], rows: int, measured_s: Seconds) -> float:
    """Return the ratio of the time between tokens of `rows` answers to that of their steps."""
    return fmean(
        one.step_s / measured_s(one.rows, one.context) for one in times if one.rows == rows
    )


def _prompts(
    compute_s: Mapping[tuple[int, int], float], prompt_s: Callable[[int], float], turn_s: float
) -> tuple[float, float, float]:
    """Return the seconds of pushes and of drawing a first token, and the factor of `prompt_s`.

    `compute_s` is by the nodes of a request and the tokens of its prompt. The shortest prompt that
    one node serves shows best the time of drawing. A single length does not separate the time of a
    prompt from that of its tokens: then the factor is 1.
    """
    handed_over, local = (
        sorted(tokens for nodes, tokens in compute_s if (nodes > 1) is is_handed_over)
        for is_handed_over in (True, False)
    )
    if not handed_over:
        return 0.0, 0.0, 1.0
    small, large = handed_over[0], handed_over[-1]
    factor, small_s, large_s = 1.0, compute_s[2, small], compute_s[2, large]
    if large_s > small_s and prompt_s(large) > prompt_s(small):
        factor = (large_s - small_s) / (prompt_s(large) - prompt_s(small))
    both_s = max(0.0, small_s - turn_s - factor * prompt_s(small))
    draw_s = 0.0
    if local:
        least_s = compute_s[1, local[0]] - turn_s - factor * prompt_s(local[0])
        draw_s = min(both_s, max(0.0, least_s))
    return both_s - draw_s, draw_s, factor


def _slowdown(ratios: Iterable[float]) -> float:
    found = list(ratios)
    return max(1.0, fmean(found)) if found else 1.0
