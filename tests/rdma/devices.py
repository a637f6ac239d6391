"""The RDMA devices of this machine, engines on them, and the wire between them.

`make test-rdma` runs these tests where there are two devices; elsewhere they are skipped.
"""

from __future__ import annotations

import contextlib
import functools
import json
import mmap
import os
import subprocess
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from common.kv.kv_layout import KVLayout
from kv_transfer.lanes.pool_memory import Bytes
from kv_transfer.lanes.rdma.mooncake_engine import MooncakeEngine
from tests.support.kv.kinds import shape_of_bytes

DEVICES = [name for name in os.environ.get("PDSERVE_RDMA_DEVICES", "").split(",") if name]
HOSTS = os.environ.get("PDSERVE_RDMA_HOSTS", "").split(",")
WAIT_S = 60.0
# The kernel's own packets, of which there are a few now and then, are not meant.
LOST_BY_A_WRITE = 20

needs_rdma = pytest.mark.skipif(len(DEVICES) < 2, reason="needs two RDMA devices: make test-rdma")


@functools.cache
def engine_of(number: int) -> MooncakeEngine:
    """The engine of the `number`th node of a test, made once; neighbours differ in device."""
    at = number % len(DEVICES)
    return MooncakeEngine(HOSTS[at], DEVICES[at])


def shared_pool(layout: KVLayout, num_blocks: int) -> Bytes:
    """Memory that peers may write."""
    memory = np.frombuffer(mmap.mmap(-1, num_blocks * layout.block_bytes), np.uint8)
    return memory.reshape(shape_of_bytes(layout, num_blocks))


def wait_until(is_so: Callable[[], bool], what: str, every_s: float = 0.01) -> None:
    """Wait for something that the kernel or a library does without a notification."""
    deadline_at_s = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < deadline_at_s, f"not within {WAIT_S:g} s: {what}"
        time.sleep(every_s)


class Wire:
    """The wire from device 0 to device 1: all RDMA packets on it can be lost, for a while."""

    def __init__(self) -> None:
        self.is_cut = False

    def cut(self) -> None:
        _tc("add", "netem", "loss", "100%")
        self.is_cut = True

    def heal(self) -> None:
        if self.is_cut:
            _tc("del")
            self.is_cut = False

    def wait_loss(self, since: int = 0) -> None:
        """Wait until so many packets were lost that a write must be in flight, and stuck."""
        wait_until(lambda: self.num_lost >= since + LOST_BY_A_WRITE, "packets were lost")

    @property
    def num_lost(self) -> int:
        shown = subprocess.run(
            ["tc", "-s", "-j", "qdisc", "show", "dev", "wire0"],
            capture_output=True,
            check=True,
        )
        return sum(int(qdisc["drops"]) for qdisc in json.loads(shown.stdout))


@contextlib.contextmanager
def a_wire() -> Iterator[Wire]:
    wire = Wire()
    try:
        yield wire
    finally:
        wire.heal()


def _tc(verb: str, *what: str) -> None:
    subprocess.run(["tc", "qdisc", verb, "dev", "wire0", "root", *what], check=True)
