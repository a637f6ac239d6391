"""`pdserve simulate` in several processes: the same result as in one, and nothing that is left."""

from __future__ import annotations

import io
import os
import signal
import subprocess
from pathlib import Path

import pytest

from common.child_process import module_command, module_environment
from common.errors import ConfigError
from pdserve.simulating.on_all_cores import wrong_histories_in_processes
from pdserve.simulating.simulate_command import (
    HISTORIES_PER_PROCESS,
    run_simulation,
    simulation_of,
)
from simulator.faults.history import History
from simulator.faults.search import ALL

NUM_SEEDS = 2 * HISTORIES_PER_PROCESS


def wrong_from_13(history: History) -> str:
    """Play a cluster in which the seeds from 13 on are wrong."""
    return f"Violation: seed {history.seed}" if history.seed >= 13 else ""


def ending(history: History) -> str:
    """Play a process that the kernel ends."""
    if history.seed == 12:
        os._exit(9)
    return ""


def test_the_first_wrong_history_is_the_same_as_in_one_process(tmp_path: Path) -> None:
    texts = []
    for processes in ("1", "2"):
        path, out = tmp_path / processes, io.StringIO()
        wanted = simulation_of(
            {"histories": str(NUM_SEEDS), "processes": processes, "output": str(path)}
        )
        assert not run_simulation(wanted, out, run=wrong_from_13)
        assert "seed 13, " in out.getvalue()
        texts.append(path.read_text())
    assert texts[0] == texts[1]


def test_a_process_that_ends_is_told_in_one_sentence() -> None:
    with pytest.raises(ConfigError, match=r"a process that ran histories ended.*--processes"):
        list(wrong_histories_in_processes(range(NUM_SEEDS), ALL, ending, 1))


def _children_of(pid: int) -> set[int]:
    return {int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}


@pytest.mark.parametrize(
    ("sent", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_nothing_is_left_of_a_run_that_is_ended(sent: signal.Signals, code: int) -> None:
    """Ctrl-C reaches the whole group, a kill the first process alone."""
    command = module_command("pdserve", "simulate", "--histories", "100000", "--processes", "2")
    with subprocess.Popen(
        command,
        env=module_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as process:
        while len(_children_of(process.pid)) < 3:  # one is of multiprocessing
            assert process.poll() is None
        if sent is signal.SIGINT:
            os.killpg(process.pid, sent)
        else:
            process.send_signal(sent)
        # The output ends when the last of them has.
        said, _ = process.communicate()
        assert process.returncode == code
    if sent is signal.SIGINT:
        assert b"Traceback" not in said, said.decode()
