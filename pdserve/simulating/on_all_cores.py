"""Histories in several processes (`history_runner`), each of which runs some and then some more."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import cycle, islice
from typing import NamedTuple, TextIO

from common.child_process import module_command, start_helper
from common.errors import ConfigError
from pdserve.simulating.history_runner import wishes_json
from simulator.faults.drawing import Wishes
from simulator.faults.search import WrongHistory, history_of

HISTORIES_AT_ONCE = 4
"""What a process is asked for at once: half a second of work."""
_AHEAD = 2
"""How many times a process is asked before its first answer is awaited, so that it never waits."""


class _Runner(NamedTuple):
    """The lines that a process reads, and those that it writes."""

    asked: TextIO
    answers: TextIO


def wrong_histories_in_processes(
    seeds: range, wishes: Wishes, num_processes: int, *, command: Sequence[str] = ()
) -> Iterator[WrongHistory | None]:
    """Run the history of each seed in `num_processes` processes, as `wrong_histories` does in one.

    Results come in the order of the seeds, so which one is wrong first does not depend on the
    number of processes. `command` is what starts a process, if not `history_runner`. Raises
    `ConfigError` where one of them cannot be started, or ends.
    """
    command = command or module_command("pdserve.simulating.history_runner", wishes_json(wishes))
    try:
        with ExitStack() as started:
            runners = [started.enter_context(_runner(command)) for _ in range(num_processes)]
            yield from _found(seeds, wishes, runners)
    except (OSError, EOFError) as error:
        raise ConfigError(
            "a process that ran histories has ended, or cannot be started; is there too little "
            "memory? wanted fewer --processes"
        ) from error


def _found(
    seeds: range, wishes: Wishes, runners: Sequence[_Runner]
) -> Iterator[WrongHistory | None]:
    """Ask the processes by turns, and yield their answers in the same order."""
    parts, asked = _parts(seeds), cycle(runners)
    for part in islice(parts, _AHEAD * len(runners)):
        _ask(next(asked), part)
    for part, runner in zip(_parts(seeds), cycle(runners), strict=False):
        texts = _answer(runner)
        following = next(parts, None)
        if following is not None:
            _ask(next(asked), following)
        for seed, wrong in zip(part, texts, strict=True):
            yield WrongHistory(history_of(seed, wishes), wrong) if wrong else None


def _parts(seeds: range) -> Iterator[range]:
    for begin in range(0, len(seeds), HISTORIES_AT_ONCE):
        yield seeds[begin : begin + HISTORIES_AT_ONCE]


def _ask(runner: _Runner, seeds: range) -> None:
    print(json.dumps((seeds.start, len(seeds))), file=runner.asked, flush=True)


def _answer(runner: _Runner) -> list[str]:
    """Return what is wrong in the histories that were asked for. Raises `EOFError`."""
    line = runner.answers.readline()
    if not line:
        raise EOFError
    texts: list[str] = json.loads(line)
    return texts


@contextmanager
def _runner(command: Sequence[str]) -> Iterator[_Runner]:
    """Start a process, which has ended afterwards."""
    process, ours = start_helper(command)
    try:
        with ours, ours.makefile("w", encoding="utf-8") as asked, ours.makefile("r") as answers:
            yield _Runner(asked, answers)
    finally:
        process.kill()
        process.wait()
