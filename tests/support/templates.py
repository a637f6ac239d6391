"""Processes that have imported what roles need, once in a test run, and are forked for each role.

The first process of a run, which outlives its others, has the templates. Those others know their
addresses, so that a run in six processes imports once what it would import six times. A program
that is no test run has its own. A template starts with its first fork, and ends with the process
that has it.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from multiprocessing import reduction, resource_tracker
from typing import Any

import pytest

_MAIN = "from multiprocessing.forkserver import main; main({listener}, {alive}, {modules})"


class Template:
    """A process that imports `modules`, and the address at which it is asked for forks."""

    def __init__(self, modules: Sequence[str]) -> None:
        self.modules = list(modules)
        self.address = ""
        self._lock = threading.Lock()

    def listen(self) -> str:
        """Have the template in this process, unless another one has; return its address."""
        with self._lock:
            if not self.address:
                listener = socket.socket(socket.AF_UNIX)
                self.address = f"\0pdserve-{os.getpid()}-{secrets.token_hex(8)}"
                listener.bind(self.address)
                listener.listen()
                start = threading.Thread(target=self._start_when_asked, args=(listener,))
                start.daemon = True
                start.start()
            return self.address

    def _start_when_asked(self, listener: socket.socket) -> None:
        select.select([listener], [], [])
        # The template ends when this process has closed the other end, in whatever way it ends.
        alive, self._held = os.pipe()
        fds = (listener.fileno(), alive)
        command = _MAIN.format(listener=fds[0], alive=alive, modules=self.modules)
        subprocess.Popen(
            [sys.executable, "-c", command], stdin=subprocess.DEVNULL, pass_fds=fds
        ).returncode = 0  # nobody waits for it
        os.close(alive)
        listener.close()

    def connect_to_new_process(self, fds: Sequence[int]) -> tuple[int, int]:
        """Do what `multiprocessing.forkserver` does by this name, with this template."""
        resource_tracker.ensure_running()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(self.listen())
            status, of_child = os.pipe()
            for_child, data = os.pipe()
            # A fork forks nothing by itself, so what is in the place of its template means nothing.
            tracker = resource_tracker.getfd()
            assert tracker is not None
            reduction.sendfds(client, [for_child, of_child, for_child, tracker, *fds])
            os.close(of_child)
            os.close(for_child)
        return status, data


FORKED = (
    "tests.support.cluster.forked_serve",
    "tests.support.cluster.frozen",  # the last one
)
_EACH = (
    "pdserve.roles.run_role",
    "tests.support.cluster.slow_serve",
    "tests.support.grammars.patient_trials",
    *FORKED,
)
KERNELS = "tests.support.cluster.kernels_of_nodes"
NODES = Template(
    (
        "tests.support.cluster.grpc_of_nodes",
        "engine.runner.start.load",
        "numba",
        "pdserve.roles.engine_role",
        KERNELS,
        *_EACH,
    )
)
ROUTERS = Template(
    (
        "tests.support.cluster.grpc_of_routers",
        "pdserve.roles.router_role",
        "pydantic.v1",  # FastAPI imports it with its first route: a quarter of a router's start
        *_EACH,
    )
)


def pytest_configure_node(node: Any) -> None:
    """Tell a process of a run where its templates are."""
    node.workerinput["templates"] = [template.listen() for template in (NODES, ROUTERS)]


def pytest_configure(config: pytest.Config) -> None:
    """Use the templates of the process that started this one, if it has them."""
    addresses = getattr(config, "workerinput", {}).get("templates", ("", ""))
    NODES.address, ROUTERS.address = addresses
