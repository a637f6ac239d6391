"""How many outputs of a burst are passed on before other requests have a turn, and how many calls
share a message to a node."""

from __future__ import annotations

from collections.abc import Sequence

from common.request import RequestOutput

FEW_OUTPUTS = 8
"""A message with more outputs is passed on in parts; after each part the event loop runs
`TURNS_FOR_OTHERS` turns of other work."""
TURNS_FOR_OTHERS = 2
OUTPUTS_AT_ONCE = 32
OUTPUTS_AT_MOST = 512
PARTS = 60
MESSAGE_SPACING_S = 0.003
"""The least time between two messages to one node while more than `FEW_REQUESTS` run: a message
costs the router as much as a tenth of a request, whatever is in it."""
FEW_REQUESTS = 8


def part_size(num_running: int, num_waiting: int) -> int:
    """Return how many of `num_waiting` outputs are passed on at once, with `num_running` requests.

    A part may have `OUTPUTS_AT_ONCE` outputs, one for each running request, and one in `PARTS`
    of those that wait. Up to `OUTPUTS_AT_MOST` it grows as the square of the requests: under load,
    requests that are handled together share messages to the nodes.
    """
    for_many = min(OUTPUTS_AT_MOST, num_running * num_running // OUTPUTS_AT_ONCE)
    return max(OUTPUTS_AT_ONCE, num_running, for_many, -(-num_waiting // PARTS))


def message_pause_s(num_running: int, since_last_s: float) -> float:
    """Return how long a message to a node waits for further calls, with `num_running` requests.

    One that follows nothing leaves at once, and so does each while few requests run.
    """
    if num_running <= FEW_REQUESTS:
        return 0.0
    return max(0.0, MESSAGE_SPACING_S - since_last_s)


def part_end(outputs: Sequence[RequestOutput], size: int) -> int:
    """Return where the next part of the waiting outputs ends: at most `size` of them are in it.

    It ends between two requests, if some do in its second half: the tokens of one answer that are
    passed on together are one write to its client.
    """
    if len(outputs) <= size:
        return len(outputs)
    behind = outputs[size].id
    for end in range(size, size // 2, -1):
        if outputs[end - 1].id != behind:
            return end
    return size
