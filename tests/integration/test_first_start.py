"""Nodes that start together on a machine where no kernel is compiled yet."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.runner.start.compile_progress import NUM_KERNELS
from pdserve.checkpoints.demo_model import demo_model_folder
from pdserve.local_cluster.child_process import ending_with_parent

TEAM = "engine.runner.kernels.team."

pytestmark = [pytest.mark.endurance, pytest.mark.timeout(400)]


def start(cache: Path) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "tests.support.cluster.compilations",
        str(demo_model_folder(False)),
    ]
    environment = os.environ | {"XDG_CACHE_HOME": str(cache), "NUMBA_CACHE_DIR": str(cache)}
    return subprocess.Popen(
        ending_with_parent(command), env=environment, stdout=subprocess.PIPE, text=True
    )


def compiled(process: subprocess.Popen[str]) -> list[str]:
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    kernels: list[str] = json.loads(output.splitlines()[-1])
    return kernels


def test_two_processes_that_start_together_compile_each_kernel_once(tmp_path: Path) -> None:
    """Except for the few lines that every kernel contains. numba caches none of its own code."""
    both = [start(tmp_path) for _ in range(2)]
    try:
        first, second = map(compiled, both)
    finally:
        for process in both:
            process.kill()
            process.wait()
    twice = {one for one in set(first) & set(second) if not one.startswith(("numba.", TEAM))}
    assert not twice
    # What `up` shows of the progress.
    assert abs(len([k for k in (*first, *second) if not k.startswith("numba.")]) - NUM_KERNELS) < 15
    assert compiled(start(tmp_path)) == []
