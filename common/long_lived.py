"""What a process has made by the end of its start lives as long as the process."""

from __future__ import annotations

import gc

_GC_THRESHOLD = 10_000
"""Allocations minus deallocations before the collector looks for cycles among young objects."""


def exclude_from_collection() -> None:
    """Exclude every present object from garbage collection, and collect less often from now on.

    Modules, compiled kernels, routes and the tokenizer are several hundred thousand objects, and a
    full collection would look at each of them while no other code runs.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD)
