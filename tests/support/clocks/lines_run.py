"""A cost that no other load on the machine changes: lines of Python that run."""

from __future__ import annotations

import sys
from collections.abc import Callable


def lines_run(act: Callable[[], object]) -> int:
    """Return how many lines of Python ran in `act`."""
    count = 0

    def trace(frame: object, event: str, _: object) -> object:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)  # type: ignore[arg-type]
    try:
        act()
    finally:
        sys.settrace(before)
    return count
