"""The bench of KV transfer: every way moves the right bytes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from bench.transfer import connector_ends, plain, process_costs, push_calls, workload
from bench.transfer.processes import Pair
from bench.transfer.ways import Receiver, Sender, Span, Way
from bench.transfer.workload import Memory, Workload
from common.kv.kv_layout import KVLayout
from kv_transfer.lanes.shm.shared_pool import SharedPool
from kv_transfer.zmq.curve_keys import new_curve_keys

SMALL = KVLayout(
    model_digest="t", num_layers=2, num_kv_heads=1, head_dim=64, block_size=16, dtype="bfloat16"
)
MOVED = Workload(SMALL, num_moved=9)
KEYS = new_curve_keys()


def memory(seed: int) -> Memory:
    shape = (SMALL.num_layers, 2, MOVED.num_blocks, SMALL.piece_bytes)
    shared = SharedPool(int(np.prod(shape)), is_touched=False)
    pool = shared.memory.reshape(shape)
    pool[:] = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    return Memory(MOVED, pool, shared)


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
    sources, targets = MOVED.source_blocks(pattern), MOVED.target_blocks(pattern)
    wanted = target.pool.copy()
    wanted[:, :, targets] = source.pool[:, :, sources]
    move(make_receiver(target), make_sender(source), pattern)
    assert np.array_equal(target.pool, wanted)
    assert workload.digest(source.pool, sources) == workload.digest(target.pool, targets)
    assert workload.digest(source.pool, sources) != workload.digest(target.pool, targets[::-1])


def test_a_handoff_whose_writes_cost_nothing_commits_and_moves_nothing() -> None:
    source, target = memory(1), memory(2)
    before = target.pool.copy()
    receiver, sender = (
        connector_ends.free_rdma_receiver(target),
        connector_ends.free_rdma_sender(source),
    )
    move(receiver, sender, "scattered")
    assert np.array_equal(target.pool, before)


def move(receiver: Receiver, sender: Sender, pattern: str) -> None:
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


def test_processor_time_is_told_by_thread() -> None:
    before = process_costs.cpu_s()
    while process_costs.cpu_s()["caller"] - before["caller"] < 0.01:
        pass
    spans = process_costs.cpu_s()
    assert spans["all"] == pytest.approx(sum(s for name, s in spans.items() if name != "all"))


def failing(memory: Memory) -> Any:
    raise OSError("no such device")


def one_page(moved: Workload, seed: int) -> Memory:
    return Memory(moved, np.zeros((1, 2, 1, 64), np.uint8))


def test_what_fails_in_a_process_is_told() -> None:
    way = Way("failing", failing, failing, source=one_page, target=one_page)
    with pytest.raises(RuntimeError, match="OSError: no such device"):
        Pair(way, MOVED)


def test_the_calls_of_push_are_measured() -> None:
    figures = push_calls.measure((1, 3))
    assert list(figures) == ["1", "3"]
    for one in figures.values():
        assert 0 < one["push_us_p50"] <= one["push_us_p99"]
