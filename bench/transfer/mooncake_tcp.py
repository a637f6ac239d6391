"""Mooncake's Transfer Engine over TCP, called directly, where the package is installed.

Adjacent blocks are one write per range, as long as it is; scattered ones are large batches with
a write per piece. Both are the library at its best: nothing is checked or acknowledged here.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Any

from bench.transfer.ways import Span, now_s
from bench.transfer.workload import Memory, ranges
from kv_transfer.lanes.pool_memory import Bytes

_MOST_WRITES = 1024
"""The most writes of one batch; the library's queues refuse four times as many."""

Prepared = tuple[str, list[tuple[int, int]]]
"""The receiver's name, and address and length of each of its ranges."""


def why_missing() -> str | None:
    """Return why it cannot be measured here; None if it can."""
    if importlib.util.find_spec("mooncake") is None:
        return "not installed: pip install '.[rdma]'"
    try:
        importlib.import_module("mooncake.engine")
    except ImportError as error:
        return f"does not load: {error}"
    return None


def _engine(pool: Bytes) -> Any:
    # Otherwise it uses RDMA wherever the machine has it, regardless of the protocol argument.
    os.environ["MC_FORCE_TCP"] = "1"
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    engine = importlib.import_module("mooncake.engine").TransferEngine()
    code = engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "")
    code = code or engine.register_memory(pool.ctypes.data, pool.nbytes)
    if code != 0:
        raise RuntimeError(f"Mooncake cannot start: code {code}")
    return engine


def _address_ranges(pool: Bytes, blocks: tuple[int, ...]) -> list[tuple[int, int]]:
    return [(part.ctypes.data, part.nbytes) for part in ranges(pool, blocks)]


class MooncakeReceiver:
    def __init__(self, memory: Memory) -> None:
        self._pool, self._workload = memory.pool, memory.workload
        self._engine = _engine(self._pool)

    def prepare(self, pattern: str) -> Prepared:
        name = f"127.0.0.1:{self._engine.get_rpc_port()}"
        return name, _address_ranges(self._pool, self._workload.target_blocks(pattern))

    def receive(self) -> Span:
        return Span(None, None)  # This side is not notified.

    def close(self) -> None:
        self._engine.unregister_memory(self._pool.ctypes.data)


class MooncakeSender:
    def __init__(self, memory: Memory) -> None:
        self._pool, self._workload = memory.pool, memory.workload
        self._engine = _engine(self._pool)

    def send(self, pattern: str, prepared: Prepared) -> Span:
        """Write all ranges; `RuntimeError` when a write failed."""
        peer, targets = prepared
        sources = _address_ranges(self._pool, self._workload.source_blocks(pattern))
        addresses, lengths = zip(*sources, strict=True)
        target_addresses = [address for address, _ in targets]
        began_at_s = now_s()
        for start in range(0, len(sources), _MOST_WRITES):
            batch = slice(start, start + _MOST_WRITES)
            code = self._engine.batch_transfer_sync_write(
                peer, list(addresses[batch]), target_addresses[batch], list(lengths[batch])
            )
            if code != 0:
                raise RuntimeError(f"Mooncake's write failed: code {code}")
        return Span(began_at_s, now_s())

    def close(self) -> None:
        self._engine.unregister_memory(self._pool.ctypes.data)
