"""The bench of KV transfer: every way moves the right bytes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from bench.transfer import connector_ends, plain, workload
from bench.transfer.processes import Pair
from bench.transfer.ways import Receiver, Sender, Span, Way
from bench.transfer.workload import Memory
from common.kv_layout import KVLayout
from kv_transfer.curve_keys import new_curve_keys
from kv_transfer.shm.shared_pool import SharedPool

SMALL = KVLayout(
    model_digest="t", num_layers=2, num_kv_heads=1, head_dim=64, block_size=16, dtype="bfloat16"
)
NUM_MOVED = 9
KEYS = new_curve_keys()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (workload, connector_ends):
        monkeypatch.setattr(module, "LAYOUT", SMALL)
        monkeypatch.setattr(module, "NUM_MOVED", NUM_MOVED)
    monkeypatch.setattr(workload, "NUM_BLOCKS", 2 * NUM_MOVED)
    monkeypatch.setattr(workload, "POOL_BYTES", 2 * NUM_MOVED * SMALL.block_bytes)


def memory(seed: int) -> Memory:
    shape = (SMALL.num_layers, 2, 2 * NUM_MOVED, SMALL.piece_bytes)
    shared = SharedPool(int(np.prod(shape)), is_touched=False)
    pool = shared.memory.reshape(shape)
    pool[:] = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    return Memory(pool, shared)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("pattern", workload.PATTERNS)
@pytest.mark.parametrize(
    ("make_receiver", "make_sender"),
    [
        (plain.SocketReceiver, plain.SocketSender),
        (connector_ends.ConnectorReceiver, connector_ends.ConnectorSender),
        (
            partial(connector_ends.ConnectorReceiver, keys=KEYS),
            partial(connector_ends.ConnectorSender, keys=KEYS),
        ),
        (connector_ends.shm_receiver, connector_ends.shm_sender),
    ],
)
def test_a_way_moves_every_block_and_no_other(
    make_receiver: Callable[[Memory], Receiver],
    make_sender: Callable[[Memory], Sender],
    pattern: str,
) -> None:
    source, target = memory(1), memory(2)
    sources, targets = workload.source_blocks(pattern), workload.target_blocks(pattern)
    wanted = target.pool.copy()
    wanted[:, :, targets] = source.pool[:, :, sources]
    receiver, sender = make_receiver(target), make_sender(source)
    try:
        prepared = receiver.prepare(pattern)
        spans: list[Span] = []
        thread = threading.Thread(target=lambda: spans.append(sender.send(pattern, prepared)))
        thread.start()
        received = receiver.receive()
        thread.join(20)
        assert spans[0].began_at_s is not None
        assert received.ended_at_s is not None
        assert received.ended_at_s > spans[0].began_at_s
    finally:
        sender.close()
        receiver.close()
    assert np.array_equal(target.pool, wanted)
    assert workload.digest(source.pool, sources) == workload.digest(target.pool, targets)
    assert workload.digest(source.pool, sources) != workload.digest(target.pool, targets[::-1])


def failing(memory: Memory) -> Any:
    raise OSError("no such device")


def one_page(seed: int) -> Memory:
    return Memory(np.zeros((1, 2, 1, 64), np.uint8))


def test_what_fails_in_a_process_is_told() -> None:
    way = Way("failing", failing, failing, source=one_page, target=one_page)
    with pytest.raises(RuntimeError, match="OSError: no such device"):
        Pair(way)
