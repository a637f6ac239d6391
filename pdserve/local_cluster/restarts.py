"""When a node that died is started again: after a pause that grows, and a few times only. Pure."""

from __future__ import annotations

from dataclasses import dataclass

MOST_TRIES = 5
"""Tries in a row, after which a person has to look."""
FIRST_PAUSE_S = 1.0
"""Each further pause of a row is twice as long."""
GOOD_AFTER_S = 600.0
"""A node that ran this long counts as healthy: its tries start again at one."""


@dataclass(slots=True)
class _Tries:
    num_tries: int = 0
    started_at_s: float = 0.0
    due_at_s: float | None = None


class Restarts:
    """The tries of each node, by name. Times are those of one clock."""

    def __init__(self) -> None:
        self._tries: dict[str, _Tries] = {}

    def after_death(self, name: str, now_s: float) -> str:
        """Plan the node's next start and say when it is; "" after all of its tries."""
        tries = self._tries.setdefault(name, _Tries())
        if tries.num_tries and now_s - tries.started_at_s >= GOOD_AFTER_S:
            tries.num_tries = 0
        if tries.num_tries >= MOST_TRIES:
            return ""
        pause_s = FIRST_PAUSE_S * 2.0**tries.num_tries
        tries.num_tries += 1
        tries.due_at_s = now_s + pause_s
        return f"{name} is started again in {pause_s:g} s, try {tries.num_tries} of {MOST_TRIES}."

    def take_due(self, now_s: float) -> list[str]:
        """Return the nodes to start now, each once."""
        due = [
            name
            for name, tries in self._tries.items()
            if tries.due_at_s is not None and tries.due_at_s <= now_s
        ]
        for name in due:
            self._tries[name].due_at_s, self._tries[name].started_at_s = None, now_s
        return due

    def next_at_s(self) -> float | None:
        """Return when the next node is due; None without any."""
        return min(
            (t.due_at_s for t in self._tries.values() if t.due_at_s is not None), default=None
        )
