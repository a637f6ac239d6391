"""Numbers of steps on their way to the card and back, on one that runs nothing that need not have
run: the host is ahead of it by as many steps as it may be."""

from __future__ import annotations

# First: it puts Triton into its interpreter before any kernel is decorated.
from tests.gpu_kernels.late_device import LateDevice  # isort: skip

from typing import Any

import numpy as np

from engine.runner.gpu.steps.staging import Staging

STEPS = 1


def test_what_was_put_is_on_the_card_when_the_step_reads_it() -> None:
    """Each step reads its own numbers, though the host has written those of later ones."""
    device: Any = LateDevice()
    staging = Staging(device, {"tokens": (4,)})
    seen = device.allocate_pinned(4 * 4 * 5)
    for step in range(5):
        staging.wait()
        staging.put("tokens", np.full(4, step))
        staging.send(STEPS)
        device.copy(seen.address + 16 * step, staging["tokens"], 16, STEPS)
    device.synchronize(STEPS)
    found = seen.host_bytes().view(np.int32).reshape(5, 4)
    assert (found == np.arange(5)[:, None]).all()


def test_the_host_is_one_step_ahead_and_no_more() -> None:
    device: Any = LateDevice()
    staging = Staging(device, {"tokens": (4,)})
    ends = []
    for step in range(3):
        staging.wait()
        ends.append(device.num_done)
        staging.put("tokens", np.full(4, step))
        staging.send(STEPS)
    assert ends == [0, 0, 2], "the copy of the first step and its event, before the third is put"
