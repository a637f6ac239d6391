"""What a played load comes to, and how two of them compare."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from bench.agents.playing import Asked
from common.observing.latency import percentile


def figures(asked: Sequence[Asked], num_turns: int) -> dict[str, object]:
    """Return tokens, and times to the first token in milliseconds, over all turns and by turn."""
    by_turn = [[one.ttft_s for one in asked if one.turn == turn] for turn in range(num_turns)]
    times_s = [one.ttft_s for one in asked]
    return {
        "num_answered": len(asked),
        "prompt_tokens": sum(one.num_prompt_tokens for one in asked),
        "computed_tokens": sum(one.num_computed for one in asked),
        "ttft_ms_p50": _ms(statistics.median(times_s)),
        "ttft_ms_p99": _ms(percentile(times_s, 99)),
        "ttft_ms_p50_by_turn": [_ms(statistics.median(times)) for times in by_turn if times],
    }


def ratio(numerator: Sequence[Asked], denominator: Sequence[Asked]) -> float:
    """Return the ratio of the median times to the first token."""
    return round(_median_s(numerator) / _median_s(denominator), 3)


def last_turn(asked: Sequence[Asked]) -> list[Asked]:
    """Return the last turn of every session."""
    latest = max(one.turn for one in asked)
    return [one for one in asked if one.turn == latest]


def computed_ratio(numerator: Sequence[Asked], denominator: Sequence[Asked]) -> float:
    """Return the ratio of the prompt tokens computed."""
    found = sum(one.num_computed for one in numerator)
    return round(found / sum(one.num_computed for one in denominator), 3)


def _median_s(asked: Sequence[Asked]) -> float:
    return statistics.median(one.ttft_s for one in asked)


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 1)
