"""KV of a small layout over both transports."""

from __future__ import annotations

from common.kv.kv_layout import KVLayout
from pdserve.profiling.transfer_times import transfer_times

LAYOUT = KVLayout(
    model_digest="m", num_layers=2, num_kv_heads=2, head_dim=64, block_size=16, dtype="bfloat16"
)


def test_each_transport_is_measured_by_size() -> None:
    lines: list[str] = []
    found = transfer_times(LAYOUT, lines.append, 1 << 20)
    most = (1 << 20) // LAYOUT.block_bytes
    sizes = [LAYOUT.block_bytes * blocks for blocks in (1, 4, 16, 64) if blocks <= most]
    for transport in ("zmq", "shm"):
        of_it = [one for one in found if one.transport == transport]
        assert [one.num_bytes for one in of_it] == sizes
        assert all(one.seconds > 0 for one in of_it)
    assert len(lines) == len(found)
