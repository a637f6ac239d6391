"""A process's tasks, and the processes that it started, as the kernel names them.

A process leaves /proc when another one has waited for it: at any moment, also while its folder is
read. A template waits for its forks by itself, so a role of a test may be gone between any two
calls.
"""

from __future__ import annotations

import contextlib
from pathlib import Path


def tasks_of(pid: int) -> list[Path]:
    """Return the folder of each thread; none of a process that has ended."""
    try:
        return list(Path(f"/proc/{pid}/task").iterdir())
    except (FileNotFoundError, ProcessLookupError):
        return []


def children_of(pid: int) -> list[int]:
    """Return the ids of the processes that it started and that run, or that it has not waited for.

    A process that has ended has none.
    """
    found: list[int] = []
    for task in tasks_of(pid):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that ended
            found += map(int, (task / "children").read_text().split())
    return found


def process_tree(pid: int) -> list[int]:
    """Return the process and all that it started, directly or not."""
    found = [pid]
    for parent in found:  # it grows
        found += children_of(parent)
    return found
