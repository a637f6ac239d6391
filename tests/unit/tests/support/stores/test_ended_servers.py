"""Servers of a process of a test run that is killed: nobody else would end them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.clocks.waiting import wait_until
from tests.support.cluster.processes import is_alive
from tests.support.observing.process_tasks import children_of
from tests.unit.tree import ROOT

STARTS = """
import sys
from pathlib import Path
from tests.support.stores.redis_server import RedisServer
from tests.support.stores.redis_topologies import Sentinel
server = RedisServer(Path(sys.argv[1]))
server.start()
sentinel = Sentinel(Path(sys.argv[1]), server)
sentinel.start()
print("started", flush=True)
input()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_servers_end_with_the_process_that_started_them(
    number: signal.Signals, tmp_path: Path
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STARTS, str(tmp_path)],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == b"started\n"
        servers = children_of(process.pid)
        process.send_signal(number)
    assert len(servers) == 2
    try:
        wait_until(lambda: not any(map(is_alive, servers)), "the servers have ended")
    finally:
        for server in servers:
            with suppress(ProcessLookupError):
                os.kill(server, signal.SIGKILL)
