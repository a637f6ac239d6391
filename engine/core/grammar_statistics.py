"""What following grammars took on a node, as one immutable value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from common.observing.histogram import HistogramView


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarStatistics:
    """Counts since the start, and what is kept now.

    `compile_s` has the compilations by the kind of grammar, also those that were refused; `lookups`
    counts the requests for a matcher by result: cached, compiled or refused. `masks_s` is the CPU
    time for filling masks, `waited_s` the time for which steps waited for them. `failures` are
    requests that ended because of their grammar, by kind.
    """

    compile_s: Mapping[str, HistogramView]
    lookups: Mapping[str, int]
    num_cached: int
    cached_bytes: int
    num_masks: int
    masks_s: float
    waited_s: float
    num_forced_drafted: int
    num_forced_accepted: int
    failures: Mapping[str, int]
