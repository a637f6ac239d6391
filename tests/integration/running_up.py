"""`pdserve up` as a process, until its first line."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pdserve.local_cluster.child_process import ending_with_parent

PDSERVE = (sys.executable, "-m", "pdserve")


@contextmanager
def running_up(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """`pdserve up`, with its temporary files under `folder`."""
    process = subprocess.Popen(
        ending_with_parent([*PDSERVE, "up", *arguments]),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "TMPDIR": str(folder)},
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
