"""Where the start of a prompt is cached."""

from __future__ import annotations

from typing import NamedTuple

from common.ids import Incarnation


class PrefixSource(NamedTuple):
    """A node that has a prompt's first `num_tokens` in its prefix cache, as far as is known.

    The last `num_disk_tokens` of them are on disk alone, so it reads them before it sends them.
    It has `num_queued_tokens` to compute, and answers between steps.
    """

    node: Incarnation
    num_tokens: int
    num_disk_tokens: int = 0
    num_queued_tokens: int = 0
