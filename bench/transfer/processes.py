"""A way's two ends, each in a process of its own, driven over pipes."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bench.remote import Remote
from bench.transfer.process_costs import cpu_s, memory_bytes, reset_peak_memory
from bench.transfer.ways import Span, Way
from bench.transfer.workload import Memory, Workload, digest
from common.long_lived import exclude_from_collection


@dataclass(frozen=True, slots=True)
class Move:
    """One move of all blocks: its time, and CPU seconds of each process by thread."""

    seconds: float
    sender_cpu_s: dict[str, float]
    receiver_cpu_s: dict[str, float]


class Pair:
    """Both ends of a way."""

    def __init__(self, way: Way, workload: Workload) -> None:
        self.way = way
        self._workload = workload
        self._receiver = Remote(End, way.receiver, way.target)
        self._sender = Remote(End, way.sender, way.source)
        try:
            for seed, end in enumerate((self._receiver, self._sender)):
                end.call("start", workload, seed, way.imports)
        except BaseException:
            self.close()
            raise

    def move(self, pattern: str) -> Move:
        prepared = self._receiver.call("prepare", pattern)
        self._receiver.ask("receive")
        self._sender.ask("send", pattern, prepared)
        sent, sender_cpu_s = self._sender.answer()
        received, receiver_cpu_s = self._receiver.answer()
        return Move(_seconds(sent, received), sender_cpu_s, receiver_cpu_s)

    def check(self, pattern: str) -> None:
        """Raise `RuntimeError` unless the blocks of the last move have arrived."""
        sent = self._sender.call("digest", self._workload.source_blocks(pattern))
        found = self._receiver.call("digest", self._workload.target_blocks(pattern))
        if self.way.is_checked and found != sent:
            raise RuntimeError(f"{self.way.name}: {pattern} blocks did not arrive unchanged")

    def memory_bytes(self) -> tuple[int, int]:
        """Return the peak memory of sender and receiver besides their pools, in bytes."""
        return self._sender.call("memory"), self._receiver.call("memory")

    def close(self) -> None:
        self._sender.close()
        self._receiver.close()


def _seconds(sent: Span, received: Span) -> float:
    began = [at_s for at_s in (sent.began_at_s, received.began_at_s) if at_s is not None]
    ended = [at_s for at_s in (sent.ended_at_s, received.ended_at_s) if at_s is not None]
    return max(ended) - min(began)


# -- inside a process ----------------------------------------------------------------------------


class End:
    """One end of a way, in its process: a method for each kind of call."""

    def __init__(
        self, make_end: Callable[[Memory], Any], make_memory: Callable[[Workload, int], Memory]
    ) -> None:
        self._make_end = make_end
        self._make_memory = make_memory
        self._end: Any = None

    def start(self, workload: Workload, seed: int, imports: tuple[str, ...]) -> None:
        for name in imports:
            importlib.import_module(name)
        self._memory = self._make_memory(workload, seed)
        reset_peak_memory()
        self._before = memory_bytes()
        self._end = self._make_end(self._memory)
        exclude_from_collection()  # As nodes do at the end of their start.

    def prepare(self, pattern: str) -> Any:
        return self._end.prepare(pattern)

    def receive(self) -> tuple[Span, dict[str, float]]:
        return self._timed(self._end.receive)

    def send(self, pattern: str, prepared: Any) -> tuple[Span, dict[str, float]]:
        return self._timed(lambda: self._end.send(pattern, prepared))

    def digest(self, blocks: tuple[int, ...]) -> int:
        return digest(self._memory.pool, blocks)

    def memory(self) -> int:
        now = memory_bytes()
        mapped = now.shared - self._before.shared
        return now.peak - self._before.resident - mapped

    def close(self) -> None:
        if self._end is not None:
            self._end.close()

    def _timed(self, work: Callable[[], Span]) -> tuple[Span, dict[str, float]]:
        before_s = cpu_s()
        span = work()
        return span, {name: at_s - before_s.get(name, 0.0) for name, at_s in cpu_s().items()}
