"""What the nodes of a cluster that starts are doing, out of the ends of their logs. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_TIMESTAMP = re.compile(r"^[0-9-]+ [0-9:,]+ ")
_COMPILED = re.compile(r"compiled ([0-9]{1,6}) of about ([0-9]{1,6}) CPU kernels")
_MOST_CHARS = 100


def compiled_kernels(tails: Iterable[Sequence[str]]) -> str:
    """Return how many kernels all nodes have compiled, "" where none has compiled any.

    `tails` are the last lines of each node's log. Nodes that start together divide the kernels;
    a few small ones each of them compiles.
    """
    counts = [_last_count(lines) for lines in tails]
    num_compiled = sum(compiled for compiled, _ in counts)
    total = max((total for _, total in counts), default=0)
    if not num_compiled:
        return ""
    return f"{min(num_compiled, total)} of about {total} compiled, once on this machine"


def last_words(tail: Sequence[str]) -> str:
    """Return the last line of a log without its time, "" of an empty one."""
    return _TIMESTAMP.sub("", tail[-1])[:_MOST_CHARS] if tail else ""


def _last_count(lines: Sequence[str]) -> tuple[int, int]:
    for line in reversed(lines):
        if found := _COMPILED.search(line):
            return int(found[1]), int(found[2])
    return 0, 0
