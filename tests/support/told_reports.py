"""What a process that takes whole files tells the first process of a run of its tests.

pytest-xdist would tell of five things for each test, each in a message of its own, which costs more
than most tests. Here a process tells what is printed: that a test passed, a set-up or an end that
took long, and everything of other tests. What has passed is told together, at the end of a file and
twice a second.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from _pytest.runner import runtestprotocol
from xdist.workermanage import WorkerController

from tests.support.whole_files import WholeFile

SHOWN_S = 0.005
"""What takes less is in no list of `--durations`."""
MOST_DELAY_S = 0.5
_PASSED = "passed"
_TELLER = pytest.StashKey["Teller"]()


class Teller:
    """Sends the events of one process, with what has passed before each of them."""

    def __init__(self, send: Callable[..., None]) -> None:
        self._send = send
        self._passed: list[tuple[str, str, float]] = []
        self._told_at_s = time.monotonic()

    def note(self, report: pytest.TestReport) -> None:
        """Tell of what has passed, now or soon."""
        self._passed.append((report.nodeid, report.when, report.duration))
        if time.monotonic() - self._told_at_s > MOST_DELAY_S:
            self._tell_passed()

    def send(self, name: str, **event: Any) -> None:
        """Send an event; what has passed before it goes first."""
        self._tell_passed()
        self._send(name, **event)

    def _tell_passed(self) -> None:
        self._told_at_s = time.monotonic()
        if self._passed:
            self._send(_PASSED, reports=self._passed)
            self._passed = []


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Have a process that takes whole files tell less."""
    config = session.config
    if not getattr(config, "workerinput", {}).get("takes_whole_files"):
        return
    # It is of a module that pytest-xdist has read in this process under another name.
    plugins = config.pluginmanager.get_plugins()
    (interactor,) = (plugin for plugin in plugins if type(plugin).__name__ == "WorkerInteractor")
    teller = config.stash[_TELLER] = Teller(interactor.sendevent)
    interactor.sendevent = teller.send


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Run a test, and tell of it when it has ended; None leaves it to pytest."""
    teller = item.config.stash.get(_TELLER, None)
    if teller is None or isinstance(item, WholeFile):
        return None
    for report in runtestprotocol(item, log=False, nextitem=nextitem):
        if not is_plain(report):
            item.ihook.pytest_runtest_logreport(report=report)
        elif is_shown(report):
            teller.note(report)
    return True


def is_plain(report: pytest.TestReport) -> bool:
    """Return whether nothing is to be said of a part of a test but that it passed."""
    is_more = report.sections or report.user_properties or hasattr(report, "wasxfail")
    return report.outcome == "passed" and not is_more


def is_shown(report: pytest.TestReport) -> bool:
    """Return whether a part of a test that passed changes what a run prints."""
    return report.when == "call" or report.duration >= SHOWN_S


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: WorkerController) -> None:
    """Understand what a process tells of tests that have passed."""
    receive = partial(_receive, node, node.process_from_remote)
    node.process_from_remote = receive


def _receive(node: WorkerController, receive: Callable[[Any], None], event: Any) -> None:
    """Make reports of what has passed; pytest-xdist takes them, as it takes all other events."""
    if not isinstance(event, tuple) or event[0] != _PASSED:
        receive(event)
        return
    for nodeid, when, duration in event[1]["reports"]:
        file, _, name = nodeid.partition("::")
        place = (file, None, name.replace("::", "."))
        report = pytest.TestReport(nodeid, place, {}, "passed", None, when, duration=duration)
        node.notify_inproc("testreport", node=node, rep=report)
