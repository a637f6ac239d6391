"""`pdserve simulate` in several processes: the same result as in one, and nothing that is left."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from common.child_process import module_command, module_environment
from common.errors import ConfigError
from pdserve.simulating.history_runner import serve, wishes_json, wishes_of
from pdserve.simulating.on_all_cores import HISTORIES_AT_ONCE, wrong_histories_in_processes
from simulator.faults.drawing import Wishes
from simulator.faults.history import History
from simulator.faults.kinds import FaultKind
from simulator.faults.search import ALL, wrong_histories

SEEDS = range(7, 8 + 9 * HISTORIES_AT_ONCE)
PLAYED = f"""
import json, sys
for line in sys.stdin:
    first, number = json.loads(line)
    if "ends" in sys.argv and first > {SEEDS[20]}:
        sys.exit()
    seeds = range(first, first + number)
    print(json.dumps(["late" if seed > 23 else "" for seed in seeds]), flush=True)
"""


def late(history: History) -> str:
    return "late" if history.seed > 23 else ""


@pytest.mark.parametrize("num_processes", [1, 2, 3, 20])
def test_results_come_in_the_order_of_the_seeds(num_processes: int) -> None:
    command = [sys.executable, "-c", PLAYED]
    found = wrong_histories_in_processes(SEEDS, ALL, num_processes, command=command)
    assert list(found) == list(wrong_histories(SEEDS, ALL, late))


def test_a_process_that_ends_is_told_in_one_sentence() -> None:
    found = wrong_histories_in_processes(
        SEEDS, ALL, 2, command=[sys.executable, "-c", PLAYED, "ends"]
    )
    with pytest.raises(ConfigError, match=r"a process that ran histories has ended.*--processes"):
        list(found)
    with pytest.raises(ConfigError, match="cannot be started"):
        list(wrong_histories_in_processes(SEEDS, ALL, 2, command=["/no/such/program"]))


def test_a_process_runs_what_it_is_asked_for() -> None:
    replies = io.StringIO()
    serve(["[22, 4]\n", "[3, 1]\n"], replies, ALL, late)
    assert [json.loads(line) for line in replies.getvalue().splitlines()] == [
        ["", "", "late", "late"],
        [""],
    ]


def test_a_process_has_the_same_wishes() -> None:
    wishes = Wishes(kinds=(FaultKind.CRASH, FaultKind.STORE), num_requests=3, num_decode=2)
    assert wishes_of(wishes_json(wishes)) == wishes


def _children_of(pid: int) -> set[int]:
    return {int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}


@pytest.mark.parametrize(
    ("sent", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_nothing_is_left_of_a_run_that_is_ended(sent: signal.Signals, code: int) -> None:
    command = module_command("pdserve", "simulate", "--histories", "100000", "--processes", "2")
    with subprocess.Popen(
        command,
        env=module_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as process:
        while len(_children_of(process.pid)) < 2:
            assert process.poll() is None
        os.killpg(process.pid, sent)
        # The output ends when the last of them has.
        said, _ = process.communicate()
        assert process.returncode == code
    assert b"Traceback" not in said, said.decode()
