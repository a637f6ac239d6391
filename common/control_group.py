"""What the control groups of this process leave it of the machine: memory, and time of its cores.

Groups of both versions are read, and those that they lie in, as far as they can be seen: a
container sees its own group as the root.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path


def group_limit_bytes(root: Path) -> int | None:
    """Return the least memory limit of this process's control groups; None: there is none.

    The kernel's files are read below `root`.
    """
    limits = [
        int(text)
        for group, is_first_version in _groups(root, "memory")
        for text in _lines(group / ("memory.limit_in_bytes" if is_first_version else "memory.max"))
        if text.isdecimal()
    ]
    return min(limits, default=None)


def num_visible_cores() -> int:
    """Return on how many cores this process may run, whatever time of them it gets.

    Libraries that look at no control group begin as many threads.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return cores or 1


def num_cores(root: Path = Path("/")) -> int:
    """Return how many cores this process may keep busy.

    Those that it may run on, or fewer where its control groups limit the time of all its threads,
    as with `docker run --cpus`: with a thread on each core it would stand still for most of each
    tenth of a second. A part of a core counts as one.
    """
    limits = [
        int(quota) / int(period)
        for group, is_first_version in _groups(root, "cpu")
        for quota, period in _times(group, is_first_version)
        if quota.isdecimal() and period.isdecimal()
    ]
    return max(1, math.ceil(min([*limits, num_visible_cores()])))


def _times(group: Path, is_first_version: bool) -> list[tuple[str, str]]:
    """Return the time that a group's threads have together in each period, and the period."""
    if is_first_version:
        quotas, periods = (_lines(group / f"cpu.cfs_{what}_us") for what in ("quota", "period"))
        return list(zip(quotas, periods, strict=False))
    return [(line.partition(" ")[0], line.partition(" ")[2]) for line in _lines(group / "cpu.max")]


def _groups(root: Path, controller: str) -> Iterator[tuple[Path, bool]]:
    """Yield the folders of the groups, and whether they are of the first version."""
    for line in _lines(root / "proc/self/cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        is_second_version = number == "0" and not controllers
        if not is_second_version and controller not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / ("" if is_second_version else controller)
        group = Path(path.lstrip("/"))
        for one in (group, *group.parents):
            yield mount / one, not is_second_version


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="surrogateescape").splitlines()  # names may have any bytes
    except OSError:
        return []
