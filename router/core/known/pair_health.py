"""Which pairs of a prefill and a decode node fail to hand off, and when each is tried again. Pure.

A pair whose handoff failed is avoided for `FIRST_PAUSE_S`, after the next failure twice as long,
and so on up to `MOST_PAUSE_S`. After the pause one attempt is placed on it. Others avoid the pair
until that handoff has worked or failed, or the same pause has passed once more. After a handoff
that works the pair is not avoided any more.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from common.ids import Incarnation

Pair = tuple[Incarnation, Incarnation]
"""A prefill node and a decode node."""

FIRST_PAUSE_S = 1.0
MOST_PAUSE_S = 60.0
MAX_PAIRS = 1024


@dataclass(slots=True)
class _Trouble:
    num_failures: int
    pause_s: float
    avoided_until_s: float
    is_tried: bool = False


class PairHealth:
    """The pairs that failed last, at most `MAX_PAIRS`."""

    def __init__(self) -> None:
        self._troubled: OrderedDict[Pair, _Trouble] = OrderedDict()

    def __len__(self) -> int:
        return len(self._troubled)

    def on_failed(self, pair: Pair, now_s: float) -> tuple[int, float] | None:
        """Record a failed handoff; return how many failed in a row, and the pause in seconds.

        None for an attempt that was placed before the pause began: it says nothing new.
        """
        known = self._troubled.pop(pair, None)
        is_new = known is None or known.is_tried
        if known is None:
            known = _Trouble(1, FIRST_PAUSE_S, now_s + FIRST_PAUSE_S)
        elif is_new:
            pause_s = min(MOST_PAUSE_S, 2 * known.pause_s)
            known = _Trouble(known.num_failures + 1, pause_s, now_s + pause_s)
        self._troubled[pair] = known
        if len(self._troubled) > MAX_PAIRS:
            self._troubled.popitem(last=False)
        return (known.num_failures, known.pause_s) if is_new else None

    def on_worked(self, pair: Pair) -> bool:
        """Record a handoff that worked; return whether the pair had failed before."""
        return self._troubled.pop(pair, None) is not None

    def on_placed(self, pair: Pair, now_s: float) -> None:
        """Record that an attempt was placed on the pair; after the pause this tries it again."""
        trouble = self._troubled.get(pair)
        if trouble is not None and now_s >= trouble.avoided_until_s:
            trouble.is_tried = True
            trouble.avoided_until_s = now_s + trouble.pause_s

    def avoided(self, now_s: float) -> frozenset[Pair]:
        """Return the pairs on which no attempt should be placed now."""
        if not self._troubled:
            return frozenset()
        return frozenset(
            pair for pair, trouble in self._troubled.items() if now_s < trouble.avoided_until_s
        )
