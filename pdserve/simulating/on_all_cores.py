"""Histories in several processes, each of which runs those of the next few seeds."""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from multiprocessing import get_context

from common.child_process import begin_helper
from common.errors import ConfigError
from simulator.faults.drawing import Wishes
from simulator.faults.history import History
from simulator.faults.search import WrongHistory, quiet, wrong_histories

SEEDS_AT_ONCE = 4
"""Seeds that a process is given at once: half a second of work, which a stop waits for."""
_Found = list[WrongHistory | None]
_for_good = ExitStack()


def wrong_histories_in_processes(
    seeds: Sequence[int], wishes: Wishes, run: Callable[[History], str], num_processes: int
) -> Iterator[WrongHistory | None]:
    """Run the history of each seed in `num_processes` processes, as `wrong_histories` does in one.

    Results come in the order of the seeds, so which one is wrong first does not depend on the
    number of processes. `run` is a function of a module, which the processes import. Raises
    `ConfigError` where one of them ended.
    """
    parts = (seeds[i : i + SEEDS_AT_ONCE] for i in range(0, len(seeds), SEEDS_AT_ONCE))
    executor = ProcessPoolExecutor(
        num_processes,
        mp_context=get_context("spawn"),
        initializer=_begin,
        initargs=(os.getpid(),),
    )
    running: deque[Future[_Found]] = deque()
    try:
        for part in parts:
            with _held_interrupts():
                running.append(executor.submit(_run_part, part, wishes, run))
            if len(running) > num_processes:
                yield from running.popleft().result()
        while running:
            yield from running.popleft().result()
    except BrokenProcessPool as error:
        raise ConfigError(
            "a process that ran histories ended, perhaps for want of memory: "
            "wanted fewer --processes"
        ) from error
    finally:
        executor.shutdown(cancel_futures=True)


def _begin(owner: int) -> None:
    begin_helper()
    if os.getppid() != owner:  # it died before its end would have ended this process
        os._exit(1)
    _for_good.enter_context(quiet())


def _run_part(seeds: Sequence[int], wishes: Wishes, run: Callable[[History], str]) -> _Found:
    return list(wrong_histories(seeds, wishes, run))


@contextmanager
def _held_interrupts() -> Iterator[None]:
    """Hold Ctrl-C back, which a terminal sends to all processes: no process begins by halves here,
    and one that begins is interrupted by its owner alone.

    That inherits the mask of this thread. Other threads of this process get the signal all the
    same, and Python handles it in this one.
    """
    held: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, _: held.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, handler)
    if held:
        raise KeyboardInterrupt
