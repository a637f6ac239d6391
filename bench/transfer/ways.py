"""The compared ways of moving blocks, each as two ends that live in their own process."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from bench.transfer.workload import PATTERNS, Memory, Workload, private_memory


@dataclass(frozen=True, slots=True)
class Span:
    """Start and end of an end's work, in seconds of the machine's monotonic clock.

    None: this end cannot know it.
    """

    began_at_s: float | None
    ended_at_s: float | None


class Receiver(Protocol):
    """The end that has the target pool."""

    def prepare(self, pattern: str) -> Any:
        """Prepare for one move; return what the sender needs to know, as picklable values."""

    def receive(self) -> Span:
        """Return when every byte of the move is in the pool."""

    def close(self) -> None: ...


class Sender(Protocol):
    """The end that has the source pool."""

    def send(self, pattern: str, prepared: Any) -> Span:
        """Move the blocks; return when they may be reused."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Way:
    """`receiver` and `sender` are called in their processes, so they are importable functions.

    `source` makes the sender's pool from a seed; `target` the receiver's. `imports` are loaded
    before memory is measured: code does not belong to a transfer. `is_checked`: the bytes arrive.
    """

    name: str
    receiver: Callable[[Memory], Receiver]
    sender: Callable[[Memory], Sender]
    patterns: tuple[str, ...] = PATTERNS
    source: Callable[[Workload, int], Memory] = private_memory
    target: Callable[[Workload, int], Memory] = private_memory
    imports: tuple[str, ...] = ()
    is_checked: bool = True


def now_s() -> float:
    """Return the time on a clock that all processes of the machine share."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)
