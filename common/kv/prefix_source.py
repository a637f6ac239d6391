"""Where the start of a prompt is cached."""

from __future__ import annotations

from typing import NamedTuple

from common.ids import Incarnation


class PrefixSource(NamedTuple):
    """A node that has a prompt's first `num_tokens` in its prefix cache, as far as is known."""

    node: Incarnation
    num_tokens: int
