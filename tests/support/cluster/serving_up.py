"""A cluster of `pdserve up` in a process of its own, and its end by Ctrl-C."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pdserve.local_cluster.child_process import ending_with_parent
from pdserve.local_cluster.free_ports import free_loopback_port
from tests.support.cluster.processes import role_environment


@dataclass(frozen=True, slots=True)
class ServingUp:
    """The process of `pdserve up`, and the port of its router."""

    pid: int
    port: int


@contextmanager
def serving_up(
    folder: Path,
    model: Path,
    *arguments: str,
    environ: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    umask: int = -1,
) -> Iterator[ServingUp]:
    """Start a cluster, with `folder` for its files; the block gets it when it serves.

    Where the block has not failed it is ended by SIGINT, and must exit with 0.
    """
    port = free_loopback_port()
    flags = ("--port", str(port), "--model", str(model), *arguments)
    process = subprocess.Popen(
        ending_with_parent([sys.executable, "-m", "pdserve", "up", *flags]),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**role_environment(), "TMPDIR": str(folder), **(environ or {})},
        cwd=cwd,
        text=True,
        umask=umask,
    )
    assert process.stdout is not None
    try:
        printed = ""
        while "Serving on" not in printed:
            line = process.stdout.readline()
            assert line, printed
            printed += line
        yield ServingUp(process.pid, port)
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.wait() == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
