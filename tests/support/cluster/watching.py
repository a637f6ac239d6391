"""Requests beside an attack, in a process of their own, and how long each of them stood still.

An attacker keeps its own interpreter busy, so what it measured itself would be about itself.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event
from typing import Any

from tests.support.clocks.stall_free_clock import StallFreeClock
from tests.support.cluster.api import Api, Fields
from tests.support.cluster.forked_serve import FORKS
from tests.support.models.tiny_model import prompt_tokens
from tests.support.observing.process_tasks import tasks_of

TICK_S = 0.02
PAUSES_S = {"health": 0.1, "completion": 0.2, "stream": 0.1}
"""Between two requests of a kind, in seconds: the watched cluster has few cores for what it is
attacked with. A process that stands still shows in each kind, less by at most this."""
LONGEST_TICK_S = 0.1
"""A longer one is a stall of the watching process, of which no other process is the cause."""
TOLD_S = 0.05
"""Waits that are shorter than this are not worth a message."""
SAMPLE_S, NUM_SAMPLES = 0.1, 900
START_S = 60.0
END_S = 60.0
COMPLETION: Fields = {"prompt": "Hi", "max_tokens": 2, "temperature": 0, "ignore_eos": True}
STREAM: Fields = {
    "prompt": prompt_tokens(60, salt=71),
    "max_tokens": 60,
    "temperature": 0,
    "ignore_eos": True,
}


@dataclass(frozen=True, slots=True)
class Wait:
    """How long one thing took, in seconds of a clock without stalls of the watching process.

    `began_s` and `ended_s` are of the monotonic clock, which all processes share. For `queued_s` of
    the time the processes that were asked waited for a core: other processes had them. `fault`
    says what was wrong with an answer.
    """

    kind: str
    began_s: float
    ended_s: float
    took_s: float
    queued_s: float = 0.0
    fault: str = ""

    @property
    def own_s(self) -> float:
        """What is left when every process has a core at once, in seconds."""
        return self.took_s - self.queued_s


class CoreQueue:
    """How long each thread of some processes has waited for a core, sampled now and then."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self._samples: deque[tuple[float, dict[int, dict[str, int]]]] = deque(maxlen=NUM_SAMPLES)

    def sample(self) -> None:
        """Note what the kernel has counted, at most every `SAMPLE_S`."""
        now_s = time.monotonic()
        if not self._samples or now_s - self._samples[-1][0] >= SAMPLE_S:
            self._samples.append((now_s, {pid: _queued_ns(pid) for pid in self._pids}))

    def queued_s(self, began_s: float, ended_s: float) -> float:
        """Return the longest wait of a thread of each process between two times, added up."""
        samples = list(self._samples)
        before = [one for at_s, one in samples if at_s <= began_s][-1:] or [{}]
        after = [one for at_s, one in samples if at_s >= ended_s][:1]
        after = after or [one for _, one in samples[-1:]] or [{}]
        total_ns = 0
        for pid in self._pids:
            old = before[0].get(pid, {})
            new = after[0].get(pid, {})
            total_ns += max((new[one] - old[one] for one in new if one in old), default=0)
        return total_ns / 1e9


def _queued_ns(pid: int) -> dict[str, int]:
    found = {}
    for task in tasks_of(pid):
        with contextlib.suppress(OSError, ValueError):
            found[task.name] = int((task / "schedstat").read_text().split()[1])
    return found


@contextlib.contextmanager
def watching(
    url: str, pids: Sequence[int], headers: Mapping[str, str] | None = None
) -> Iterator[Callable[[], list[Wait]]]:
    """Watch a router, whose cluster has these processes; `headers` go with each request.

    Yields what returns the long waits and faults since its last call.
    """
    told: Queue[Wait] = FORKS.Queue()
    stop, has_begun = FORKS.Event(), FORKS.Event()
    process = FORKS.Process(
        target=_watch, args=(url, list(pids), headers or {}, told, stop, has_begun), daemon=True
    )
    process.start()

    def news() -> list[Wait]:
        assert process.is_alive() or stop.is_set(), "the watching process has ended"
        found = []
        while not told.empty():
            found.append(told.get())
        return found

    try:
        assert has_begun.wait(START_S), "the watching process has not begun"
        yield news
    finally:
        stop.set()
        process.join(END_S)
        if process.is_alive():
            process.kill()


def _watch(
    url: str,
    pids: Sequence[int],
    headers: Mapping[str, str],
    told: Queue[Wait],
    stop: Event,
    has_begun: Event,
) -> None:
    clock, queue = StallFreeClock(LONGEST_TICK_S), CoreQueue([*pids, os.getpid()])
    with Api(url, "tiny", headers) as api:
        right = api.complete(**COMPLETION), _streamed(api, clock, lambda *_: None)
        ways: dict[str, Callable[[], None]] = {
            "health": lambda: _ask_health(api),
            "completion": lambda: _same(api.complete(**COMPLETION), right[0]),
        }

        def tell(kind: str, began_s: float, took_s: float) -> None:
            if took_s > TOLD_S:
                ended_s = time.monotonic()
                told.put(Wait(kind, began_s, ended_s, took_s, queue.queued_s(began_s, ended_s)))

        def repeat(kind: str, way: Callable[[], None]) -> None:
            while not stop.wait(PAUSES_S[kind]):
                began_s, began_clock_s = time.monotonic(), clock.now_s()
                try:
                    way()
                except Exception as error:
                    fault = f"{type(error).__name__}: {error}"
                    told.put(Wait(kind, began_s, time.monotonic(), 0.0, fault=fault))
                if kind in ways:
                    tell(kind, began_s, clock.now_s() - began_clock_s)

        def stream() -> None:
            _same(_streamed(api, clock, lambda *gap: tell("stream", *gap)), right[1])

        threads = [threading.Thread(target=repeat, args=item) for item in ways.items()]
        threads.append(threading.Thread(target=repeat, args=("stream", stream)))
        for thread in threads:
            thread.start()
        has_begun.set()
        while not stop.wait(TICK_S):
            clock.now_s()
            queue.sample()
        for thread in threads:
            thread.join()


def _streamed(api: Api, clock: StallFreeClock, tell: Callable[[float, float], None]) -> list[Any]:
    """Return the texts of a stream's events, and tell each gap between two of them."""
    texts: list[Any] = []
    with api.stream(**STREAM) as stream:
        began_s, began_clock_s = time.monotonic(), clock.now_s()
        while (event := stream.read_event()) is not None:
            tell(began_s, clock.now_s() - began_clock_s)
            began_s, began_clock_s = time.monotonic(), clock.now_s()
            texts += [choice["text"] for choice in event["choices"]]
    return ["".join(texts)]


def _ask_health(api: Api) -> None:
    api.http.get("/health").raise_for_status()


def _same(answer: Any, right: Any) -> None:
    assert answer == right, f"{answer!r}, and {right!r} in peace"
