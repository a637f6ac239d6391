"""Two processes that change roles over one real Redis: never both, also when one was frozen."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

from pdserve.local_cluster.child_process import ending_with_parent
from tests.support.clocks.waiting import wait_until

LEASE_S = 1.0


class Router:
    """A process of `leading_router`, and what it has printed."""

    def __init__(self, url: str, name: str) -> None:
        program = [sys.executable, "-m", "tests.integration.leading_router"]
        self.process = subprocess.Popen(
            ending_with_parent([*program, url, name, str(LEASE_S)]),
            stdout=subprocess.PIPE, text=True, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        self.lines: list[str] = []
        self._reading = threading.Thread(target=self._read)
        self._reading.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self.lines.append(line.strip())

    @property
    def leads(self) -> int:
        """How often it has begun to lead."""
        return self.lines.count("leads")

    @property
    def changes(self) -> list[int]:
        """The numbers of the changes that it was allowed."""
        return [int(line) for line in self.lines if line.isdecimal()]

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reading.join()


@contextlib.contextmanager
def routers(url: str) -> Iterator[tuple[Router, Router]]:
    first = Router(url, "first")
    try:
        wait_until(lambda: first.changes, "the first router changes a role")
        second = Router(url, "second")
        try:
            yield first, second
        finally:
            second.end()
    finally:
        first.end()


def test_a_router_that_was_frozen_past_its_lease_changes_nothing_when_it_wakes(
    redis_url: str,
) -> None:
    with routers(redis_url) as (first, second):
        first.process.send_signal(signal.SIGSTOP)
        wait_until(lambda: len(second.changes) >= 3, "the second router leads")
        first.process.send_signal(signal.SIGCONT)
        num_before = len(second.changes) + len(first.changes)
        wait_until(
            lambda: len(second.changes) + len(first.changes) >= num_before + 5, "changes go on"
        )
        second.process.send_signal(signal.SIGSTOP)
        wait_until(lambda: first.leads >= 2, "the first router leads again")
        wait_until(lambda: max(first.changes) > max(second.changes), "it changes roles again")
        second.process.send_signal(signal.SIGCONT)
        num_before = len(first.changes)
        wait_until(lambda: len(first.changes) >= num_before + 5, "changes go on")
        assert_one_after_the_other(first, second)


def assert_one_after_the_other(first: Router, second: Router) -> None:
    """Check that by number the changes of a router come together, each time that it has led."""
    found = [(number, router) for router in (first, second) for number in router.changes]
    by_number = [router for _, router in sorted(found, key=lambda one: one[0])]
    assert len({number for number, _ in found}) == len(found)
    for router in (first, second):
        begins = [
            one is router and (not index or by_number[index - 1] is not router)
            for index, one in enumerate(by_number)
        ]
        assert 1 <= sum(begins) <= router.leads
