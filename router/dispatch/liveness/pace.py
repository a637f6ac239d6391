"""How often a router and a node tell each other that they live, by the number of nodes.

A message costs a router up to 0.1 ms of CPU time, so with many nodes there are fewer. With both
paces, a loss in either direction is noticed within 2 s, and a message may come a second late.
"""

from __future__ import annotations

from typing import NamedTuple


class Pace(NamedTuple):
    """Spans in ticks of `silence.TICK_S`, except the one that a node is told."""

    echo_every: int
    """The ticks from one number that is sent to the next one."""
    beat_ms: int
    """The longest silence of the node, which is told with each number; 0: its own choice."""
    late: int
    """A silence that is no news; less than `unreached`, so that a busy node is not taken for one
    that is not reached."""
    suspicion: int
    unreached: int
    """Behind a number that is not repeated."""


USUAL = Pace(echo_every=2, beat_ms=0, late=2, suspicion=5, unreached=5)
WIDE = Pace(echo_every=3, beat_ms=900, late=4, suspicion=8, unreached=5)
"""A node that is told how long it may be silent repeats each number at once."""
WIDE_NODES = 64
"""So many nodes and more are heard at the pace `WIDE`."""
