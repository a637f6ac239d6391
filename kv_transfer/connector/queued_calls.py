"""Calls of a sending machine that other threads queue, made in their order by the connector's."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kv_transfer.sending.effects import SenderEffect
from kv_transfer.sending.machine import Sender

Effects = list[SenderEffect]


class _Push(NamedTuple):
    """What `Sender.on_push` takes."""

    token: int
    layer: int
    ordinals: Sequence[int]
    source_blocks: Sequence[int]


class QueuedCalls:
    """Any thread may add to it; `take_next` belongs to the thread that has the machine.

    Each call that is added wakes that thread. `is_closed` is whether further calls are dropped:
    what they are about has ended.

    Pushes of one transfer that wait together are taken together: their frames are made at once, and
    one acknowledgement is asked for all of them.
    """

    def __init__(self, machine: Sender, wake: Callable[[], object]) -> None:
        self._machine = machine
        self._wake = wake
        self._calls: deque[Callable[[], Effects] | _Push] = deque()
        self.is_closed = False

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, call: Callable[[], Effects]) -> None:
        if not self.is_closed:
            self._calls.append(call)
            self._wake()

    def add_push(
        self, token: int, layer: int, ordinals: Sequence[int], source_blocks: Sequence[int]
    ) -> None:
        if not self.is_closed:
            self._calls.append(_Push(token, layer, ordinals, source_blocks))
            self._wake()

    def close(self) -> None:
        """Drop the calls that are added from now on; those that wait are still taken."""
        self.is_closed = True

    def take_next(self) -> Effects:
        """Make the first call; there must be one. Raises what it raises."""
        call = self._calls.popleft()
        if not isinstance(call, _Push):
            return call()
        follower = self._calls[0] if self._calls else None
        is_last = not isinstance(follower, _Push) or follower.token != call.token
        return self._machine.on_push(*call, is_last=is_last)
