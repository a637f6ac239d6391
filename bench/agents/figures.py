"""What a played load comes to, and how two of them compare."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.agents.playing import Asked
from bench.agents.tiers import PULLED, TIERS
from common.observing.latency import percentile


@dataclass(frozen=True, slots=True)
class Played:
    """Turns, and the seconds, of time and of CPU of all processes, in which they were answered."""

    asked: tuple[Asked, ...] = ()
    took_s: float = 0.0
    cpu_s: float = 0.0
    found: Counter[str] = field(default_factory=Counter)
    """What `tiers.found_by_tier` returns after them."""

    def __add__(self, other: Played) -> Played:
        """Return both, one after the other."""
        return Played(
            self.asked + other.asked,
            self.took_s + other.took_s,
            self.cpu_s + other.cpu_s,
            self.found + other.found,
        )

    def hit_rates(self) -> dict[str, float]:
        """Return the share of all prompt tokens that was found in each tier.

        The answers report the uncached tokens; the nodes report in which tier the others were.
        """
        num_tokens = sum(one.num_prompt_tokens for one in self.asked)
        num_found = num_tokens - sum(one.num_computed for one in self.asked)
        num_blocks = sum(self.found[tier] for tier in TIERS)
        share = num_found / num_tokens / num_blocks if num_blocks else 0.0
        return {tier: round(share * self.found[tier], 4) for tier in TIERS}


def figures(played: Played) -> dict[str, object]:
    """Return tokens, and times to the first token in milliseconds, over all turns and by turn."""
    asked = played.asked
    return {
        "num_answered": len(asked),
        "prompt_tokens": sum(one.num_prompt_tokens for one in asked),
        "computed_tokens": sum(one.num_computed for one in asked),
        **first_tokens([(one.turn, one.ttft_s) for one in asked]),
        "hit_rate_by_tier": played.hit_rates(),
        "pulled_tokens": played.found[PULLED],
        "took_s": round(played.took_s, 1),
        "cpu_s": round(played.cpu_s, 1),
    }


def first_tokens(times: Sequence[tuple[int, float]]) -> dict[str, object]:
    """Return the milliseconds to the first token, over all turns and by turn.

    `times` are turns, each with its seconds.
    """
    turns = sorted({turn for turn, _ in times})
    by_turn = [[time_s for at, time_s in times if at == turn] for turn in turns]
    times_s = [time_s for _, time_s in times]
    return {
        "ttft_ms_p50": _ms(statistics.median(times_s)),
        "ttft_ms_p99": _ms(percentile(times_s, 99)),
        "ttft_ms_p50_by_turn": [_ms(statistics.median(one)) for one in by_turn],
        "ttft_ms_p99_by_turn": [_ms(percentile(one, 99)) for one in by_turn],
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


def cost_shares(now: Played, off: Played) -> dict[str, float]:
    """Return by how much more `now` takes for the same requests: shares of what `off` takes.

    Times are those of the median of all requests, each compared with itself.
    """
    pairs = list(zip(now.asked, off.asked, strict=True))
    shares = {
        "ttft_share": statistics.median(one.ttft_s / other.ttft_s for one, other in pairs) - 1,
        "time_share": statistics.median(one.took_s / other.took_s for one, other in pairs) - 1,
        "cpu_share": now.cpu_s / off.cpu_s - 1,
    }
    shares["cost_share"] = max(shares.values())
    return {name: round(share, 4) for name, share in shares.items()}


def _median_s(asked: Sequence[Asked]) -> float:
    return statistics.median(one.ttft_s for one in asked)


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 1)
