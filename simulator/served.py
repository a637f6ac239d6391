"""Times and outcomes of the requests of a simulation, and the figures of all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from operator import sub
from typing import NamedTuple

from common.observing.latency import LatencyTargets, percentile, tpot_s
from simulator.clients import ClientRequest

PERCENTS = (50, 99)


class TokenTimes(NamedTuple):
    """When the tokens of one message came, in seconds; several may have come at the last time.

    `second_s` is below 0 where all came at once, and the longest gap between two then 0.
    """

    first_s: float
    second_s: float
    last_s: float
    longest_gap_s: float

    @classmethod
    def of(cls, at_s: Sequence[float]) -> TokenTimes:
        """Return the times of tokens that came at `at_s`, in order."""
        if len(at_s) == 1:
            return cls(at_s[0], -1.0, at_s[0], 0.0)
        longest_s = max(map(sub, at_s[1:], at_s))
        return cls(at_s[0], at_s[1], at_s[-1], longest_s)


@dataclass(slots=True)
class ServedRequest:
    """The times of one request at its router, in seconds of the virtual clock."""

    client: ClientRequest
    arrived_at_s: float
    first_at_s: float = -1.0
    last_at_s: float = -1.0
    num_tokens: int = 0
    longest_gap_s: float = 0.0
    num_cached_tokens: int = 0
    """Tokens of the prompt that its decode node had cached."""
    outcome: str = ""
    """Its finish reason, or the code of its error; empty: it has not ended."""
    granted_at_s: float = -1.0
    """Time at which a decode or mixed node granted its reservation; below 0: none has yet."""
    queue_s: float = 0.0
    """Seconds that the prompt waited for its first step, on the node that computed it."""
    compute_s: float = 0.0
    """Seconds from there to token 0."""
    second_at_s: float = -1.0
    """Time of the second token: with a handoff, KV has landed before."""
    story: list[tuple[float, str]] | None = None
    """Its placements, answers and end, each with its time; None: not kept."""

    @property
    def ttft_s(self) -> float:
        """Seconds from its arrival to its first token."""
        return self.first_at_s - self.arrived_at_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first; None without a second one."""
        return tpot_s(self.first_at_s, self.last_at_s, self.num_tokens)

    def on_tokens(self, num_tokens: int, times: TokenTimes) -> None:
        """Take the next tokens."""
        if self.num_tokens == 0:
            self.first_at_s, self.second_at_s = times.first_s, times.second_s
        else:
            if self.second_at_s < 0:
                self.second_at_s = times.first_s
            self.longest_gap_s = max(self.longest_gap_s, times.first_s - self.last_at_s)
        self.longest_gap_s = max(self.longest_gap_s, times.longest_gap_s)
        self.last_at_s = times.last_s
        self.num_tokens += num_tokens


def latency_figures(
    served: Sequence[ServedRequest], targets: LatencyTargets, span_s: float
) -> dict[str, float]:
    """Return TTFT and TPOT in seconds, and goodput in requests per second of `span_s`.

    `common.observing.latency` defines them. Only complete answers count; `failed` are the others.
    """
    outcomes = Counter(one.outcome for one in served)
    answered = [one for one in served if one.outcome in ("stop", "length")]
    tpots_s = [one.tpot_s for one in answered]
    columns = {
        "ttft_s": [one.ttft_s for one in answered],
        "tpot_s": [one for one in tpots_s if one is not None],
        "gap_s": [one.longest_gap_s for one in answered if one.num_tokens > 1],
    }
    figures: dict[str, float] = {
        "requests": len(served),
        "answered": len(answered),
        "failed": len(served) - outcomes["stop"] - outcomes["length"],
    }
    for name, values in columns.items():
        for percent in PERCENTS:
            found = percentile(values, percent) if values else 0.0
            figures[f"{name}_p{percent}"] = round(found, 6)
    good = sum(
        one.ttft_s <= targets.ttft_s and (tpot is None or tpot <= targets.tpot_s)
        for one, tpot in zip(answered, tpots_s, strict=True)
    )
    figures["goodput_rps"] = round(good / span_s, 4) if span_s > 0 else 0.0
    return figures
