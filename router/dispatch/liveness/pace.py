"""How often a router and a node tell each other that they live.

A message costs a router up to 0.2 ms of CPU time, so with many nodes there are fewer, and fewest
with those on which the router has no request. A loss in either direction, on a node with requests,
is noticed within 2 s.
"""

from __future__ import annotations

from typing import NamedTuple


class Pace(NamedTuple):
    """Spans in ticks of `silence.TICK_S`, except `beat_ms`."""

    echo_every: int
    """The ticks from one number that is sent to the next one."""
    beat_ms: int
    """The longest silence of the node, sent to it with each echo number; 0: its own choice."""
    late: int
    """A silence that is no news; less than `unreached`, so that a busy node is not taken for one
    that is not reached."""
    suspicion: int
    unreached: int
    """Behind a number that is not repeated."""


USUAL = Pace(echo_every=2, beat_ms=0, late=2, suspicion=5, unreached=5)
WIDE = Pace(echo_every=3, beat_ms=900, late=4, suspicion=8, unreached=5)
"""A node that is told how long it may be silent repeats each number at once."""
IDLE = Pace(echo_every=39, beat_ms=12250, late=4, suspicion=8, unreached=5)
"""The pace of one of many nodes on which the router has no request. It may say nothing until it is
asked, so a silence is counted from a number on. By itself it speaks when a number is 2.5 s late:
when it is suspected already. A router that says nothing for 5 s is pinged by the node,
in less than 10 s once. One whose lease has ended is not waited for: it is asked at `WIDE`."""
WIDE_NODES = 64
"""Number of nodes from which the paces `WIDE` and `IDLE` are used."""
IDLE_TICKS = 8
"""The time without a request after which a node is idle."""
PINGED_TICKS = 160
"""The time without a request after which a node of many is not pinged any more: to connect again
costs as much as the pings of about so long."""
ALARM_TICKS = 8
"""The time for which all nodes are asked at the pace `WIDE` after one fell silent."""
PHASES = IDLE.echo_every
"""Number of phases: many nodes should send in different ticks, at either pace."""
