"""A node of a test that is killed at any moment holds up no other one: they have one template."""

from __future__ import annotations

import importlib
import os
import signal
import sys

from tests.support.cluster.forked_serve import Forked
from tests.support.templates import KERNELS, NODES

TIME_LIMIT_S = 120.0
"""The template loads all kernels; a fork then takes no time."""
COUNTED = 7


def die_while_threads_are_counted() -> None:
    sys.modules[KERNELS].set_up_threads()
    importlib.import_module("numba.np.ufunc.parallel")._backend_init_process_lock.acquire()
    os.kill(os.getpid(), signal.SIGKILL)


def count_threads() -> None:
    sys.modules[KERNELS].set_up_threads()
    assert sys.modules["numba"].get_num_threads() > 0
    sys.exit(COUNTED)


def test_a_node_that_is_killed_in_numba_holds_up_no_other_one() -> None:
    assert Forked(NODES, die_while_threads_are_counted).wait(TIME_LIMIT_S) == -signal.SIGKILL
    other = Forked(NODES, count_threads)
    try:
        assert other.wait(TIME_LIMIT_S) == COUNTED
    finally:
        other.kill()
