"""Processes that end while the folder of their tasks is read, as forks of a template do."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.observing.process_tasks import children_of, process_tree, tasks_of

PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
print(child.pid, flush=True)
input()
"""


@pytest.fixture
def parent() -> Iterator[subprocess.Popen[str]]:
    """A process that has started another one, whose id it prints."""
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.kill()


def test_a_child_is_found(parent: subprocess.Popen[str]) -> None:
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert children_of(parent.pid) == [child]
    assert process_tree(parent.pid) == [parent.pid, child]
    assert [task.name for task in tasks_of(parent.pid)] == [str(parent.pid)]


@pytest.mark.parametrize(
    ("ask", "is_listed"),
    [
        (tasks_of, False),
        (children_of, False),
        (children_of, True),
        (process_tree, False),
        (process_tree, True),
    ],
)
def test_a_process_that_ends_meanwhile_has_nothing_left(
    ask: Callable[[int], list[object]],
    is_listed: bool,
    parent: subprocess.Popen[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It ends just before its folder is listed, or after that and before its files are read."""
    real = Path.iterdir

    def iterdir(folder: Path) -> Iterator[Path]:
        found = list(real(folder)) if is_listed else []
        parent.kill()
        parent.wait()
        return iter(found) if is_listed else real(folder)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    assert ask(parent.pid) == ([parent.pid] if ask is process_tree else [])
