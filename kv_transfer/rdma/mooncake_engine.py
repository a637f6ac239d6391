"""Mooncake's Transfer Engine, as far as the RDMA lane uses it, and what is known of its ways.

- It takes RDMA where it finds a device and TCP where not, whatever protocol it is asked for, and
  reports success. So devices are looked for before, and the verbs descriptor after it was made.
- It listens on every address, for whoever knows its port, and asks nobody who they are: whoever
  reaches it can read and write the registered pool. The network of its devices must be closed.
- A write that failed or timed out is not cancelled: it may arrive later, with what its source then
  holds. Taking the target's memory key away stops it for a moment: it looks up whatever key the
  address has then, and tries again. In its TCP mode there are no keys: that mode is refused.
- A batch may be asked for once: the answer frees it, and a second question would end the process.
- It knows nothing of a peer's death before `MC_TRANSFER_TIMEOUT`.

Calls release the interpreter lock; waiting for a batch keeps one processor busy. So does each of
the engine's workers, two for each device by default, while anything is written. Where processors
are few they take them from each other, and from who computes the KV: there it gets one.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

from common.addresses import host_port
from kv_transfer.rdma.slabs import Range

logger = logging.getLogger("pdserve.kv_transfer")

DEVICES_FOLDER = Path("/sys/class/infiniband")
# Read when a process makes its first engine. What an operator has set is left alone.
ENVIRONMENT = {
    "MC_HANDSHAKE_CONNECT_TIMEOUT": "2",
    "MC_LOG_LEVEL": "WARNING",
    "MC_TRANSFER_TIMEOUT": "10",
}
WORKERS = "MC_WORKERS_PER_CTX"
FEW_PROCESSORS = 8
FORCE_TCP = "MC_FORCE_TCP"
NOT_REGISTERED = -3


class RdmaUnavailable(Exception):
    """This node cannot speak RDMA; the text says why."""


class MooncakeEngine:
    """One engine. A process needs one: memory of several pools may be registered with it.

    Peers reach it at `name`, `host:port` with a port of its own choice. `devices` are names
    separated by commas; "" means all. Raises `RdmaUnavailable`.
    """

    def __init__(self, host: str, devices: str = "") -> None:
        _check_devices(devices)
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        if len(os.sched_getaffinity(0)) < FEW_PROCESSORS:
            os.environ.setdefault(WORKERS, "1")
        try:
            from mooncake.engine import TransferEngine
        except ImportError as error:
            raise RdmaUnavailable(
                f"Mooncake cannot be imported ({error}): wanted `pip install 'pdserve[rdma]'` and "
                "the libraries libibverbs1, librdmacm1, libnuma1, libcurl4"
            ) from None
        num_before = _num_verbs_descriptors()
        self._engine = TransferEngine()
        result = self._engine.initialize(host, "P2PHANDSHAKE", "rdma", devices)
        if result != 0:
            raise RdmaUnavailable(f"Mooncake could not start: {result}")
        if _num_verbs_descriptors() == num_before:
            raise RdmaUnavailable(f"Mooncake opened none of the devices {devices or '(all)'}")
        self.name = host_port(host, self._engine.get_rpc_port())
        logger.warning(
            "KV by RDMA: Mooncake listens on port %s of every address, and whoever reaches it may "
            "read and write the KV pool; keep that network closed",
            self._engine.get_rpc_port(),
        )

    def register(self, address: int, num_bytes: int) -> None:
        """Let peers write there, with a new key. Raises `OSError`."""
        result = self._engine.register_memory(address, num_bytes)
        if result != 0:
            raise OSError(f"{num_bytes} bytes of the KV pool cannot be registered: {result}")

    def unregister(self, address: int) -> None:
        """Take the key away; nothing written with it arrives any more. Raises `OSError`.

        Memory that is not registered stays so.
        """
        result = self._engine.unregister_memory(address)
        if result not in (0, NOT_REGISTERED):
            raise OSError(f"the KV pool at {address:#x} stays registered: {result}")

    def can_reach(self, peer_name: str) -> bool:
        """Whether a peer's engine answers. Takes long only where it is stopped.

        Asked before the first write, which would hold up those to everybody else meanwhile.
        """
        return bool(self._engine.send_probe(peer_name) == 0)

    def submit(self, peer_name: str, ranges: Sequence[Range]) -> int:
        """Begin to write `(address here, address there, bytes)`; the batch, 0 when it failed."""
        here, there, sizes = (list(column) for column in zip(*ranges, strict=True))
        return int(self._engine.batch_transfer_async_write(peer_name, here, there, sizes))

    def wait(self, batch: int) -> bool:
        """Whether all of it was written, when that is known. Never ask for a batch again."""
        return bool(self._engine.get_batch_transfer_status([batch]) == 0)


def _check_devices(devices: str) -> None:
    if os.environ.get(FORCE_TCP):
        raise RdmaUnavailable(f"{FORCE_TCP} is set: Mooncake would speak TCP, which has no fence")
    found = sorted(path.name for path in DEVICES_FOLDER.glob("*"))
    missing = [name for name in devices.split(",") if name and name not in found]
    if missing or not found:
        wanted = ", ".join(missing) or "any"
        raise RdmaUnavailable(
            f"no RDMA device here (wanted {wanted}; there are: {', '.join(found) or 'none'})"
        )


def _num_verbs_descriptors() -> int:
    """How many RDMA devices this process holds open."""
    count = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            count += "uverbs" in str(descriptor.readlink())
        except OSError:
            continue  # It was closed meanwhile.
    return count
