"""What roles are forked from: one process of a run has it, and others ask it for forks."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import templates
from tests.support.clocks.waiting import wait_until
from tests.support.cluster.forked_serve import FORKS
from tests.support.cluster.processes import is_alive
from tests.support.templates import Template
from tests.unit.tree import ROOT

IMPORTED = "imported_by_the_template_alone"
OTHER = f"""
from tests.support.templates import Template
template = Template(["{IMPORTED}"])
print(template.listen(), flush=True)
input()
"""


@pytest.fixture
def other(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process, which has a template and prints its address."""
    (tmp_path / f"{IMPORTED}.py").touch()
    with subprocess.Popen(
        [sys.executable, "-c", OTHER],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(tmp_path)},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        yield process
        process.kill()


@pytest.fixture
def asking(other: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """This process asks the template of the other one for its forks."""
    assert other.stdout is not None
    template = Template(())
    template.address = other.stdout.readline().strip()
    monkeypatch.setattr(forkserver, "connect_to_new_process", template.connect_to_new_process)


def tell_imported() -> None:
    sys.exit(7 if IMPORTED in sys.modules else 1)


def parent_of(process: ForkServerProcess) -> int:
    status = Path(f"/proc/{process.pid}/stat").read_text()
    return int(status.rpartition(") ")[2].split()[1])


@pytest.mark.usefixtures("asking")
def test_a_fork_has_what_the_template_of_another_process_has_imported() -> None:
    process = FORKS.Process(target=tell_imported, daemon=True)
    process.start()
    process.join(60)
    assert process.exitcode == 7
    assert IMPORTED not in sys.modules


@pytest.mark.usefixtures("asking")
def test_all_forks_are_of_one_template_which_ends_with_the_process_that_has_it(
    other: subprocess.Popen[str],
) -> None:
    forks = [FORKS.Process(target=time.sleep, args=(300,), daemon=True) for _ in range(2)]
    try:
        for fork in forks:
            fork.start()
        (template,) = {parent_of(fork) for fork in forks}
        assert template not in (os.getpid(), other.pid)
        assert is_alive(template)
        other.kill()
        wait_until(lambda: not is_alive(template), "the template has ended")
    finally:
        for fork in forks:
            os.kill(fork.pid or 0, 9)


def test_processes_of_a_run_use_the_templates_of_the_first_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nodes, routers = Template(()), Template(())
    monkeypatch.setattr(templates, "NODES", nodes)
    monkeypatch.setattr(templates, "ROUTERS", routers)
    others: list[Any] = [SimpleNamespace(workerinput={}) for _ in range(2)]
    for other in others:
        templates.pytest_configure_node(other)
    told = [other.workerinput["templates"] for other in others]
    assert told == [[nodes.address, routers.address]] * 2
    assert "" != nodes.address != routers.address != ""
    nodes.address = routers.address = ""
    config: Any = others[0]
    templates.pytest_configure(config)
    assert [nodes.listen(), routers.listen()] == told[0]
