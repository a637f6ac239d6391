"""The requests of a trial: a window of a trace, or requests that are drawn.

A search runs dozens of trials, so a long trace is sampled: each seed gets a window of requests that
follow each other, and the first seed the one with the most work per second. Windows keep the times
between requests, and so the bursts; a cache is empty at the beginning of each.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

from common.errors import ConfigError
from pdserve.planning.access_log import HUMAN_LINE, is_log_line, read_access_log
from pdserve.planning.lengths import Lengths
from simulator.trace_file import AZURE_HEADER, TraceRequest, read_trace

LEAST_S, LEAST_REQUESTS, MOST_REQUESTS = 60.0, 250, 4000
"""A window has the larger one of these two, and no more than the third."""
OUTPUT_WORK = 20
"""Tokens of a prompt that are as much work as one of an answer, to find the busiest window."""
_DRAWS = 100


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests by arrival from 0, which `seed` chooses windows of; `source` names them.

    `lengths` is set where they are drawn, `rate` of them a second.
    """

    source: str
    requests: Sequence[TraceRequest]
    num_in_window: int
    model: str = ""
    rate: float = 0.0
    lengths: Lengths | None = None
    max_model_len: int = 0
    num_too_long: int = 0

    @property
    def is_sampled(self) -> bool:
        """Whether a window lacks requests of the trace."""
        return self.num_in_window < len(self.requests)

    @property
    def rate_rps(self) -> float:
        """Requests per second in the mean."""
        span_s = self.requests[-1].arrival_s
        return self.rate or (len(self.requests) - 1) / span_s

    def window(self, seed: int) -> list[TraceRequest]:
        """Return the requests of a seed, from 0 on."""
        if self.lengths is not None:
            count = self.num_in_window
            return drawn(self.rate, self.lengths, count, seed, self.max_model_len)
        return self.from_index(self._begin(seed))

    def from_index(self, begin: int) -> list[TraceRequest]:
        """Return the window that begins with this request."""
        chosen = self.requests[begin : begin + self.num_in_window]
        return [replace(one, arrival_s=one.arrival_s - chosen[0].arrival_s) for one in chosen]

    def _begin(self, seed: int) -> int:
        last = len(self.requests) - self.num_in_window
        if seed == 0 or last <= 0:
            return busiest(self.requests, self.num_in_window)
        return random.Random(seed).randrange(last + 1)  # noqa: S311


def busiest(requests: Sequence[TraceRequest], count: int) -> int:
    """Return where the window of `count` requests begins that has the most work per second."""
    work = [one.num_prompt + OUTPUT_WORK * one.num_output for one in requests]
    sums = [0, *accumulate(work)]

    def density(begin: int) -> float:
        end = begin + count
        span_s = requests[end - 1].arrival_s - requests[begin].arrival_s
        return (sums[end] - sums[begin]) / max(span_s, 1e-3)

    last = max(0, len(requests) - count)
    return max(range(0, last + 1, max(1, count // 8)), key=density)


def drawn(
    rate: float, lengths: Lengths, count: int, seed: int, max_model_len: int
) -> list[TraceRequest]:
    """Return requests of a Poisson process with lengths that fit the context.

    Raises `ConfigError` where hardly any fit.
    """
    rng, at_s, found = random.Random(seed), 0.0, list[TraceRequest]()  # noqa: S311
    for _ in range(count):
        for _ in range(_DRAWS):
            num_prompt, num_output = lengths.prompt.draw(rng), lengths.output.draw(rng)
            if num_prompt + num_output <= max_model_len:
                break
        else:
            raise ConfigError(f"--lengths: hardly any fit the {max_model_len} tokens of a request")
        found.append(TraceRequest(at_s, num_prompt, num_output))
        at_s += rng.expovariate(rate)
    return found


def faster(requests: Sequence[TraceRequest], load: float) -> list[TraceRequest]:
    """Return the requests at `load` times their rate."""
    return [replace(one, arrival_s=one.arrival_s / load) for one in requests]


def drawn_workload(rate: float, lengths: Lengths, max_model_len: int, most: int | None) -> Workload:
    """Return a workload of `rate` requests a second. Raises `ConfigError` for too long ones."""
    lengths.checked(max_model_len)
    count = _window_size(rate, most)
    requests = drawn(rate, lengths, count, 0, max_model_len)
    return Workload(
        f"{rate:g} requests a second, drawn",
        requests, count, rate=rate, lengths=lengths, max_model_len=max_model_len,
    )  # fmt: skip


def trace_workload(path: Path, max_model_len: int, most: int | None, model: str) -> Workload:
    """Return the workload of a file. Raises `ConfigError`, which says what is wrong in it."""
    found, model = _read(path, model)
    requests = [one for one in found if one.num_prompt + one.num_output <= max_model_len]
    if not requests:
        shortest = min(one.num_prompt + one.num_output for one in found)
        raise ConfigError(
            f"trace {path}: no request fits a node of this profile, which holds {max_model_len} "
            f"tokens of one request: the shortest has {shortest}"
        )
    if len(requests) < 2 or not requests[-1].arrival_s > requests[0].arrival_s:
        raise ConfigError(
            f"trace {path} has {len(requests)} request(s) at one moment, and no rate follows from "
            "that: wanted requests over some time, or --rate with --lengths"
        )
    began_s = requests[0].arrival_s
    requests = [replace(one, arrival_s=one.arrival_s - began_s) for one in requests]
    rate = (len(requests) - 1) / requests[-1].arrival_s
    count = min(len(requests), _window_size(rate, most))
    too_long = len(found) - len(requests)
    return Workload(str(path), requests, count, model=model, num_too_long=too_long)


def _window_size(rate: float, most: int | None) -> int:
    if most is not None:
        return most
    return min(MOST_REQUESTS, max(LEAST_REQUESTS, round(LEAST_S * rate)))


def _read(path: Path, model: str) -> tuple[list[TraceRequest], str]:
    try:
        with path.open(encoding="utf-8-sig", errors="replace") as file:
            first = next((line.strip() for line in file if line.strip()), "")
    except OSError as error:
        raise ConfigError(f"trace {path} cannot be read: {error.strerror}") from error
    if not first:
        raise ConfigError(f"trace {path} is empty: wanted requests")
    if HUMAN_LINE.match(first):
        raise ConfigError(
            f"trace {path} is a log for people, which is not read: wanted one that the router "
            "writes with --log-format json"
        )
    if first != AZURE_HEADER and not first.startswith("{"):
        begin = f"begins with {first[:60]!r}" if first.isprintable() else "is no text"
        raise ConfigError(
            f"trace {path} {begin}: wanted {AZURE_HEADER!r} (Azure), a JSON "
            "object per line (Mooncake), or the log of a router with --log-format json"
        )
    if is_log_line(first):
        return read_access_log(path, model)
    return read_trace(path), ""
