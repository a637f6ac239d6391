"""The time of a step by the measured points of a profile, and straight lines between them.

The time of decodes is that of their rows at their mean context. The time of a chunk is that of its
tokens at the context with as many pairs of attention. A step with both runs the tokens of both
through the weights once:

    step_s = chunk(tokens and rows) + attention of the decodes
           + the cost of the rows above as many tokens of a prompt (drawing, short products)
           + the node's time beside the model (`beside_steps`)

Where a cluster was measured too, decodes and chunks take as many times as long as they did in it.

Other work on the machine makes measured times longer, never shorter. So a step that took longer
than one with more rows and more context counts with that one's time: `unevenness` is the largest
part that was cut off, a measure of the profile's noise.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import lru_cache, partial
from itertools import accumulate, pairwise

from common.measured_profile import MeasuredProfile
from engine.core.step.step_batch import StepBatch
from simulator.profiles.beside_steps import beside_steps

PUSHED_PARTS = 4
"""Layers of the modelled cache. A prefill node sends each when it is computed; a quarter of a real
model's layers is sent at once here, which saves most of the events and delays a handoff by at most
the time of a quarter of its last step."""
WITHIN_MACHINE = "shm"
"""The transport between nodes of one machine."""
_PART, _MOST_PARTS = 64, 4096
"""Steps of decodes that are computed at once, and the most such parts that are kept: 10 MB."""
Point = tuple[int, int, float]
"""Rows or tokens, context, seconds."""


class StepTable:
    """Seconds by size and context, linear between points and beyond them. Never below zero."""

    def __init__(self, points: Iterable[Point]) -> None:
        """Take at least one point; no two have the same size and context."""
        found = sorted(points)
        self.unevenness = 0.0
        by_size: dict[int, list[tuple[int, float]]] = {}
        for size, context, seconds in found:
            least_s = min(s for n, c, s in found if n >= size and c >= context)
            self.unevenness = max(self.unevenness, 1 - least_s / seconds)
            by_size.setdefault(size, []).append((context, least_s))
        self.sizes = list(by_size)
        slope = 0.0
        self._lines: list[tuple[list[int], list[float]]] = []
        for size, line in by_size.items():
            if len(line) > 1:
                slope = (line[-1][1] - line[0][1]) / (line[-1][0] - line[0][0]) / size
            else:  # attention costs what it costs at the size before, for each row
                context, seconds = line[0]
                line.append((context + 1, seconds + slope * size))
            self._lines.append(([context for context, _ in line], [took_s for _, took_s in line]))

    def seconds(self, size: float, context: float) -> float:
        """Return the seconds of a step of this size at this context."""
        if len(self.sizes) == 1:
            return self._at(0, context) * max(1.0, size / self.sizes[0])
        lower, share = _point_below(self.sizes, size)
        below_s, above_s = self._at(lower, context), self._at(lower + 1, context)
        return max(0.0, below_s + (above_s - below_s) * share)

    def rising(self, size: float, context: float, num_steps: int) -> list[float]:
        """Return the seconds of `num_steps` steps of one size, each at one more token of context.

        They equal those of `seconds`; points are looked up once for all steps between them.
        """
        found: list[float] = []
        while len(found) < num_steps:
            now = context + len(found)
            found.append(self.seconds(size, now))
            if len(self.sizes) == 1 or len(found) == num_steps:
                continue
            lower, share = _point_below(self.sizes, size)
            below, rise, at, span, until = self._segment(lower, now)
            above, other, start, width, ends = self._segment(lower + 1, now)
            end = _num_before(min(until, ends), context, num_steps)
            took_s = [
                below_s + ((above + other * ((now - start) / width)) - below_s) * share
                for number in range(len(found), end)
                for now in (context + number,)
                for below_s in (below + rise * ((now - at) / span),)
            ]
            found += took_s if min(took_s, default=0.0) >= 0 else [max(0.0, s) for s in took_s]
        return found

    def _at(self, index: int, context: float) -> float:
        below_s, rise_s, begin, span, _ = self._segment(index, context)
        return below_s + rise_s * ((context - begin) / span)

    def _segment(self, index: int, context: float) -> tuple[float, float, int, int, float]:
        """Return the line around a context: seconds and how they rise, its begin, length and end.

        The last line has no end.
        """
        contexts, seconds = self._lines[index]
        lower = max(0, min(bisect_right(contexts, context) - 1, len(contexts) - 2))
        begin, end = contexts[lower], contexts[lower + 1]
        until = math.inf if lower == len(contexts) - 2 else end
        return seconds[lower], seconds[lower + 1] - seconds[lower], begin, end - begin, until


def _num_before(until: float, context: float, most: int) -> int:
    """Return how many of `most` contexts from `context` on, one token apart, are below `until`."""
    if until == math.inf:
        return most
    number = min(most, max(0, math.ceil(until - context)))
    while number < most and context + number < until:
        number += 1
    while number and context + (number - 1) >= until:
        number -= 1
    return number


def _point_below(points: Sequence[int], wanted: float) -> tuple[int, float]:
    """Return the index of the last point not above, and the fraction of the way to the next one.

    The index is never the last one: beyond it the fraction exceeds 1.
    """
    lower = max(0, min(bisect_right(points, wanted) - 1, len(points) - 2))
    return lower, (wanted - points[lower]) / (points[lower + 1] - points[lower])


class MeasuredSteps:
    """`StepTimes` of a profile. `block_copy_s` is the time of a block from or to the host."""

    def __init__(self, profile: MeasuredProfile, block_copy_s: float) -> None:
        self._decodes, self._chunks = _decodes(profile, 1.0), _chunks(profile, 1.0)
        self._block_copy_s = block_copy_s
        self.beside = beside_steps(
            profile, self._decodes.seconds, self._prompt_s, partial(_moved_s, profile)
        )
        self._decodes = _decodes(profile, self.beside.answer_factor)
        self._chunks = _chunks(profile, self.beside.prompt_factor)
        self._least_chunk_s = self._chunks.seconds(1, 0) / 2
        self._part_s = lru_cache(_MOST_PARTS)(partial(self._decodes_s, num_steps=_PART))

    @property
    def unevenness(self) -> float:
        """The largest fraction by which a measured time was cut; 0: none was."""
        return max(self._decodes.unevenness, self._chunks.unevenness)

    @property
    def pairs_per_token(self) -> int:
        """Pairs of attention that cost as much as the matrix products of one token; 0: none do."""
        sizes, chunks = self._chunks.sizes, self._chunks
        most = sizes[-1]
        pair_s = (chunks.seconds(most, 1024) - chunks.seconds(most, 0)) / (1024 * most)
        token_s = (chunks.seconds(most, 0) - chunks.seconds(sizes[0], 0)) / max(1, most - sizes[0])
        return round(token_s / pair_s) if pair_s > 0 else 0

    def step_s(self, batch: StepBatch, num_copied_blocks: int = 0) -> float:
        """Return the seconds of a step that runs `batch` and copies blocks from or to the host."""
        rows = context = num_tokens = pairs = 0
        for count, start in zip(batch.num_tokens.tolist(), batch.starts.tolist(), strict=True):
            if count == 1:
                rows += 1
                context += start + 1
            else:
                num_tokens += count
                pairs += count * (2 * start + count + 1) // 2
        beside_s = self._block_copy_s * num_copied_blocks + self.beside.of_step(rows)
        return beside_s + self.seconds(rows, context, num_tokens, pairs)

    def seconds(self, rows: int, context: int, num_tokens: int = 0, pairs: int = 0) -> float:
        """Return the model's seconds of `rows` decodes that attend to `context` tokens in all, and
        chunks of `num_tokens` tokens with `pairs` pairs of attention."""
        if not num_tokens:
            return self._decodes.seconds(rows, context / rows) if rows else 0.0
        at_context = pairs / num_tokens - (num_tokens + 1) / 2
        chunk_s = max(
            self._chunks.seconds(num_tokens, at_context), self._least_chunk_s
        )  # many short prompts together attend to less than one of their length
        if not rows:
            return chunk_s
        base_s = self._decodes.seconds(rows, 0)
        more_s = self._chunks.seconds(num_tokens + rows, 0) - self._chunks.seconds(num_tokens, 0)
        attention_s = self._decodes.seconds(rows, context / rows) - base_s
        drawing_s = max(0.0, base_s - self._chunks.seconds(rows, 0))
        return chunk_s + more_s + attention_s + drawing_s

    def ends_of_decodes(
        self, began_s: float, count: int, context: int, num_steps: int
    ) -> list[float]:
        """Return the end of each of `num_steps` steps of `count` decodes, one after the other.

        They attend to `context` tokens in the first step, and to `count` more in each further one.
        """
        if count & (count - 1):  # a third of a token is rounded, and differs from step to step
            took_s = self._decodes_s(count, context / count, num_steps)
        else:
            took_s = self._known_decodes_s(count, context, num_steps)
        return list(accumulate(took_s, initial=began_s))[1:]

    def _known_decodes_s(self, count: int, context: int, num_steps: int) -> list[float]:
        """Return `_decodes_s`, in parts that begin at a multiple of `_PART` and are made once."""
        whole, rest = divmod(context, count)
        begin, skipped = whole - whole % _PART, whole % _PART
        took_s: list[float] = []
        while len(took_s) < num_steps:
            part_s = self._part_s(count, begin + rest / count)
            took_s += part_s[skipped : skipped + num_steps - len(took_s)]
            begin, skipped = begin + _PART, 0
        return took_s

    def _decodes_s(self, count: int, context: float, num_steps: int) -> list[float]:
        """Return the seconds of steps, each at one more token of context for each decode."""
        beside_s = self.beside.of_step(count)
        return [s + beside_s for s in self._decodes.rising(count, context, num_steps)]

    def _prompt_s(self, num_tokens: int) -> float:
        """Return the seconds of a prompt alone, in chunks of the largest size that was measured."""
        most = self._chunks.sizes[-1]
        return sum(
            self._chunks.seconds(min(most, num_tokens - begin), begin)
            for begin in range(0, num_tokens, most)
        )


def _decodes(profile: MeasuredProfile, factor: float) -> StepTable:
    return StepTable((p.rows, p.context, factor * p.step_s) for p in profile.decodes)


def _chunks(profile: MeasuredProfile, factor: float) -> StepTable:
    return StepTable((p.tokens, p.context, factor * p.step_s) for p in profile.chunks)


def _moved_s(profile: MeasuredProfile, num_tokens: int) -> float:
    """Return the seconds from the last step of a prompt until its KV is at another node of this
    machine: the last of `PUSHED_PARTS` is sent after that step."""
    if all(one.transport != WITHIN_MACHINE for one in profile.transfers):
        return 0.0
    bytes_per_s, latency_s = transfer_line(profile, WITHIN_MACHINE)
    num_bytes = num_tokens * profile.model.kv_bytes_per_token
    return latency_s + num_bytes / PUSHED_PARTS / bytes_per_s


def transfer_line(profile: MeasuredProfile, transport: str) -> tuple[float, float]:
    """Return the bytes per second of a transport and the seconds before the first byte.

    Raises `ValueError` where the profile has no transfer over it.
    """
    points = sorted((p.num_bytes, p.seconds) for p in profile.transfers if p.transport == transport)
    if not points:
        raise ValueError(f"there is no transfer over {transport}: measure with `pdserve profile`")
    seconds = [min(s for n, s in points if n >= num_bytes) for num_bytes, _ in points]
    num_bytes = [n for n, _ in points]
    rates = [
        (after - before) / (later_s - sooner_s)
        for (before, after), (sooner_s, later_s) in zip(
            pairwise(num_bytes), pairwise(seconds), strict=True
        )
        if later_s > sooner_s
    ]
    rate = rates[-1] if rates else num_bytes[-1] / seconds[-1]
    return rate, max(0.0, seconds[0] - num_bytes[0] / rate)
