"""The receiving machine of a decode node, which takes every byte for good."""

from __future__ import annotations

from collections import deque

from bench.fanout.workload import BLOCKS, DEADLINE_S, LAYOUT, ticket_for
from common.ids import Incarnation
from kv_transfer.contract import Landed, Ticket
from kv_transfer.receiving.effects import OpenLane, SendBack, Write
from kv_transfer.receiving.machine import Receiver
from kv_transfer.shared.effects import Emit
from kv_transfer.shared.limits import Limits
from kv_transfer.wire import frames

LIMITS = Limits()


class DecodeMachine:
    """A `Receiver` with room for so many handoffs, over one lane; `num_landed` counts them."""

    def __init__(self, number: int, endpoint: str, lane: str, num_handoffs: int) -> None:
        self.incarnation = Incarnation(f"decode-{number}", 1)
        self.endpoint = endpoint
        self.num_landed = 0
        self._lane = lane
        self._rooms = deque(range(0, num_handoffs * len(BLOCKS), len(BLOCKS)))
        num_blocks = num_handoffs * len(BLOCKS)
        self._machine = Receiver(self.incarnation, LAYOUT, LIMITS, num_blocks=num_blocks)

    def reserve(self, token: int, now_s: float) -> Ticket:
        """Open a landing, in the room that was used longest ago, and return its ticket."""
        ticket = ticket_for(token, self.incarnation, self.endpoint, self._rooms[0])
        self._rooms.rotate(-1)
        self._machine.on_expect(ticket, DEADLINE_S, now_s)
        return ticket

    def answers(
        self, session: bytes, frame: frames.Frame, part_sizes: list[int], now_s: float
    ) -> list[frames.Frame]:
        """Return the answers to a frame. Raises `RuntimeError` when a landing fails."""
        todo = deque(self._machine.on_frame(session, frame, part_sizes, now_s))
        found: list[frames.Frame] = []
        while todo:
            match todo.popleft():
                case SendBack(_, answer):
                    found.append(answer)
                case OpenLane():
                    todo += self._machine.on_lane(session, self._lane, b"")
                case Write() as write:
                    todo += self._machine.on_written(write, None)
                case Emit(Landed()):
                    self.num_landed += 1
                case other:
                    raise RuntimeError(f"{self.incarnation}: {other}")
        return found
