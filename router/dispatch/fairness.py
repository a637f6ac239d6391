"""How much of a burst of outputs is passed on before everybody else has a turn."""

from __future__ import annotations

FEW_OUTPUTS = 8
"""More than so many are passed on in parts, behind each of which the event loop turns
`TURNS_FOR_OTHERS` times for everybody else."""
TURNS_FOR_OTHERS = 2
OUTPUTS_AT_ONCE = 32
OUTPUTS_AT_MOST = 512
PARTS = 60


def part_size(num_running: int, num_waiting: int) -> int:
    """How many of the `num_waiting` outputs are passed on at once, with `num_running` requests.

    A part is at least so many outputs, one for each request that runs, and one in `PARTS` of those
    that wait; up to a bound it grows as the square of the requests. The more there is to do, the
    less often it is interrupted: requests that are looked at together share messages to the nodes.
    """
    for_many = min(OUTPUTS_AT_MOST, num_running * num_running // OUTPUTS_AT_ONCE)
    return max(OUTPUTS_AT_ONCE, num_running, for_many, -(-num_waiting // PARTS))
