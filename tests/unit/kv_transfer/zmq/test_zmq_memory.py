"""Received frames come and go without their memory being taken from the system each time."""

from __future__ import annotations

import subprocess
import sys

import pytest

# As ZMQ's own thread does it: some frames at a time, of a thread that is not the first.
_CHURN = """
import resource, threading
import numpy as np
from kv_transfer.zmq import transport

def num_faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def churn():
    for round in range(22):
        if round == 2:
            before = num_faults()
        frames = [np.ones((1 << 20) - 64, np.uint8) for _ in range(8)]
        del frames
    print((num_faults() - before) // 20)

if {keeps}:
    transport._keep_freed_memory()
thread = threading.Thread(target=churn)
thread.start()
thread.join()
"""


def num_faults_per_round(*, keeps: bool) -> int:
    script = _CHURN.format(keeps=keeps)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    return int(done.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="about glibc's allocator")
def test_the_pages_of_a_frame_are_mapped_once() -> None:
    """Eight frames of 256 pages a round."""
    assert num_faults_per_round(keeps=False) > 1000  # otherwise there would be nothing to do
    assert num_faults_per_round(keeps=True) < 200


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_it_costs_no_memory_by_itself() -> None:
    script = """
from pathlib import Path
from kv_transfer.zmq import transport

def peak_kib():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

before = peak_kib()
transport._keep_freed_memory()
print(peak_kib() - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert int(done.stdout) < 1024
