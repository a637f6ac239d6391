"""Which hosts reach which others, one way at a time."""

from __future__ import annotations

from collections import Counter


class Paths:
    """Every host reaches every other one, except where that was cut; hosts go by their names.

    Two cuts of one way end when both have ended.
    """

    def __init__(self) -> None:
        self._cuts: Counter[tuple[str, str]] = Counter()

    def is_open(self, source: str, target: str) -> bool:
        """Return whether what `source` sends arrives at `target`."""
        return not self._cuts or not self._cuts[source, target]

    def cut(self, source: str, target: str) -> None:
        """Let nothing through from `source` to `target`; it waits."""
        self._cuts[source, target] += 1

    def mend(self, source: str, target: str) -> None:
        """End one cut of this way."""
        self._cuts[source, target] -= 1
