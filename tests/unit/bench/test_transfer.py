"""The bench of KV transfer: every way moves the right bytes, and the figures add up."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from bench.transfer import __main__ as command
from bench.transfer import connector_ends, plain, workload
from bench.transfer.processes import Move, Pair
from bench.transfer.ways import Receiver, Sender, Span, Way
from bench.transfer.workload import Memory
from common.kv_layout import KVLayout
from kv_transfer.core.chunks import runs_of
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


def test_the_workload_is_256_mib_in_pieces_of_64_kib() -> None:
    assert workload.LAYOUT.piece_bytes == 64 << 10
    assert workload.MOVED_BYTES == 256 << 20
    for blocks in (workload.source_blocks, workload.target_blocks):
        assert len(runs_of(blocks("adjacent"))) == 1
        scattered = blocks("scattered")
        assert len(set(scattered)) == workload.NUM_MOVED
        # Not even in another order do two of them touch.
        assert len(runs_of(sorted(scattered))) == workload.NUM_MOVED
        assert max(scattered) < workload.NUM_BLOCKS
    assert workload.source_blocks("scattered") != workload.target_blocks("scattered")


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


def figures(seconds: float, patterns: tuple[str, ...]) -> command.Figures:
    moves = [Move(seconds * factor, 0.2, 0.1) for factor in (1.0, 7.0, 0.5)]
    return command.Figures(
        {pattern: moves if pattern == "adjacent" else moves[:1] * 3 for pattern in patterns},
        (3 << 20, 5 << 20),
    )


def test_figures_are_medians_and_their_ratios() -> None:
    gb = workload.MOVED_BYTES / 1e9
    measured = {
        "raw_socket": figures(gb / 4, ("adjacent",)),
        "zmq": figures(gb / 3, workload.PATTERNS),
        "mooncake_tcp": figures(gb / 2, workload.PATTERNS),
    }
    result = command.summary(measured, [gb / 16, gb / 10, gb / 1], {"shm": "no memory"})
    assert (result["raw_socket"], result["memcpy"]) == (4.0, 10.0)
    assert result["zmq"] == {"adjacent": 3.0, "scattered": 3.0}
    assert result["shm"] is None
    assert result["rdma_over_direct"] is None
    assert result["zmq_adjacent_over_raw_socket"] == 0.75
    assert result["zmq_over_mooncake_tcp_scattered"] == 1.5
    assert result["shm_scattered_over_memcpy"] is None
    assert result["memory_beyond_pools_mib"] == {"zmq": [3.0, 5.0]}
    assert result["cpu_s_per_gb"]["zmq"] == [round(0.2 / gb, 3), round(0.1 / gb, 3)]
    text = command.table(result)
    assert "shm was not measured: no memory" in text
    assert "zmq: 3 MiB beyond the pool on the sender, 5 MiB on the receiver" in text


def test_mooncake_is_left_out_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found, missing = command.ways()
    assert [way.name for way in found] == ["raw_socket", "zmq", "zmq_encrypted", "shm"]
    assert missing["mooncake_tcp"] == "not installed: pip install 'pdserve[rdma]'"
