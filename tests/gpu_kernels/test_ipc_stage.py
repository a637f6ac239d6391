"""What the stage `ipc_lane` does in two processes on a card, in one on an interpreted one."""

from __future__ import annotations

import contextlib
from typing import Any

# First: it puts Triton into its interpreter before any kernel is decorated.
from tests.gpu_kernels.interpreted import InterpretedDevice, InterpretedKernel  # isort: skip

import numpy as np
import pytest

from common.kv.kv_layout import KVLayout
from kv_transfer.contract import Landed
from tests.gpu import ipc_sender
from tests.gpu.stages.sharing import tickets_for

LAYOUT = KVLayout(
    model_digest="random", num_layers=2, num_kv_heads=1, head_dim=16, block_size=16,
    dtype="bfloat16",
)  # fmt: skip


class InterpretedStageCard:
    """Has what a stage's card has."""

    kernel, stream = InterpretedKernel, 1

    def __init__(self) -> None:
        self.device: Any = InterpretedDevice()


def test_prompts_go_from_the_senders_cache_to_the_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ipc_sender, "LAYOUT", LAYOUT)
    content = ipc_sender.content_of(LAYOUT)
    with contextlib.ExitStack() as at_end:
        source = ipc_sender.cache_of(InterpretedStageCard(), LAYOUT, content)
        card = InterpretedStageCard()
        target = ipc_sender.cache_of(card, LAYOUT)
        sender, ends = ipc_sender.connector_of(source, "p", is_offered=True)
        receiver, events = ipc_sender.connector_of(target, "d", is_offered=False)
        for one in (target, source, receiver, sender):
            at_end.callback(one.close)
        tickets = tickets_for(receiver, 1, 4)
        assert ipc_sender.send(sender, ends, tickets) == []
        landed = [events.get(timeout=20) for _ in tickets]
        assert {type(event) for event in landed} == {Landed}
        assert receiver.statistics().bytes_received == content.nbytes
        held = np.frombuffer(card.device.download(target.pool.address, content.nbytes), np.uint8)
        assert np.array_equal(held, content)
