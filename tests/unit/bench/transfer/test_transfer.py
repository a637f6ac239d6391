"""The bench of KV transfer: what it moves, and how its figures add up."""

from __future__ import annotations

import importlib.util

import pytest

from bench.transfer import __main__ as command
from bench.transfer import workload
from bench.transfer.processes import Move
from kv_transfer.shared.block_arrays import runs_of


@pytest.mark.parametrize("piece_kib", command.PIECE_KIB)
def test_the_workload_is_256_mib_in_pieces_of_a_size(piece_kib: int) -> None:
    moved = workload.workload(piece_kib)
    assert moved.layout.piece_bytes == piece_kib << 10
    assert moved.num_moved * moved.layout.block_bytes == workload.MOVED_BYTES == 256 << 20
    assert moved.num_pairs * 2 * moved.layout.piece_bytes == workload.MOVED_BYTES
    for blocks in (moved.source_blocks, moved.target_blocks):
        assert len(runs_of(blocks("adjacent"))) == 1
        scattered = blocks("scattered")
        assert len(set(scattered)) == moved.num_moved
        # Not even in another order do two of them touch.
        assert len(runs_of(sorted(scattered))) == moved.num_moved
        assert max(scattered) < moved.num_blocks
    assert moved.source_blocks("scattered") != moved.target_blocks("scattered")


MOVED = workload.workload(16)


def figures(seconds: float, patterns: tuple[str, ...]) -> command.Figures:
    moves = [
        Move(seconds * factor, {"all": 0.2, "zmq_io": 0.15}, {"all": 0.1})
        for factor in (1.0, 7.0, 0.5)
    ]
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
    result = command.summary(measured, [gb / 16, gb / 10, gb / 1], MOVED, {"shm": "no memory"})
    assert (result["raw_socket"], result["memcpy"]) == (4.0, 10.0)
    assert result["zmq"] == {"adjacent": 3.0, "scattered": 3.0}
    assert result["shm"] is None
    assert result["rdma_over_direct"] is None
    assert result["zmq_adjacent_over_raw_socket"] == 0.75
    assert result["zmq_over_mooncake_tcp_scattered"] == 1.5
    assert result["shm_scattered_over_memcpy"] is None
    assert result["memory_beyond_pools_mib"] == {"zmq": [3.0, 5.0]}
    assert result["cpu_s_per_gb"]["zmq"] == [round(0.2 / gb, 3), round(0.1 / gb, 3)]
    per_block = 1e6 / MOVED.num_pairs
    assert result["cpu_us_per_block"]["zmq"] == {
        "sender": {"all": round(0.2 * per_block, 3), "zmq_io": round(0.15 * per_block, 3)},
        "receiver": {"all": round(0.1 * per_block, 3)},
    }
    text = command.table(result)
    assert "shm was not measured: no memory" in text
    assert "zmq: 3 MiB beyond the pool on the sender, 5 MiB on the receiver" in text


def test_mooncake_is_left_out_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found, missing = command.ways()
    assert [way.name for way in found] == [
        "raw_socket",
        "zmq",
        "zmq_encrypted",
        "shm",
        "rdma_python",
        "zmq_2_lanes",
        "shm_2_lanes",
        "zmq_4_lanes",
        "shm_4_lanes",
    ]
    assert missing["mooncake_tcp"] == "not installed: pip install '.[rdma]'"
