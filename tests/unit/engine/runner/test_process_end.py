"""A process whose kernels have run ends when it is told to."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[4]
END_TIMEOUT_S = 60.0

# As in a node: on a thread of its own, which ends before the process does.
KERNEL_ON_A_THREAD = """
import os, threading
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import numba, numpy
from engine.runner.paddle_import import set_num_threads

@numba.njit(parallel=True)
def kernel(numbers):
    for place in numba.prange(len(numbers)):
        numbers[place] += place

def run():
    set_num_threads(1)
    numbers = numpy.zeros(100)
    kernel(numbers)
    print(int(numbers.sum()), flush=True)

thread = threading.Thread(target=run)
thread.start()
thread.join()
"""


def test_it_ends_on_one_core() -> None:
    done = subprocess.run(
        [sys.executable, "-c", KERNEL_ON_A_THREAD],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=END_TIMEOUT_S,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "4950\n"), done.stderr
