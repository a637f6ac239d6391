"""Trials of grammars on a machine that computes for others as well: the time of each is its own.

A trial that has computed for long gives way to every other process, and has 20 s in all: where
other tests compute, it would not come to the limit that a test wants.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Collection, Sequence

from common.child_process import start_helper
from grammars.trying import trials

NEVER_S = 600.0
_SERVER = f"""
import os, sys
from grammars.trying import server
set_priority = os.setpriority
os.setpriority = lambda kind, pid, _: set_priority(kind, pid, os.getpriority(kind, 0) + 1)
server.MAX_TRIAL_S = {NEVER_S}
sys.exit(server.main(sys.argv[1:]))
"""


def start_patient(
    command: Sequence[str], descriptors: Collection[int] = ()
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start the process of trials, for `trials.start_helper`."""
    return start_helper((sys.executable, "-c", _SERVER, command[-1]), descriptors)


def wait_for_trials() -> None:
    """All trials of this process are patient from now on."""
    trials.start_helper = start_patient  # type: ignore[attr-defined]
    trials.MAX_SILENCE_S = NEVER_S
