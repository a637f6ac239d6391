"""Mooncake's Transfer Engine, as far as the RDMA lane uses it, and its known behaviour.

- It uses RDMA where it finds a device and TCP where not, regardless of the protocol asked for, and
  reports success. So this module looks for devices before, and for the verbs descriptor after.
- It listens on every address and authenticates nobody: any host that reaches its port can read and
  write the registered pool. The network of its devices must be closed.
- A write or a read that failed or timed out is not cancelled: it may arrive later, with the bytes
  that its source then holds. Removing the target's memory key stops it only for a moment: it looks
  up the key that the address has then, and tries again. TCP mode has no keys, so it is refused.
- A batch may be queried once: the answer frees it, and a second query would end the process.
- It does not notice a peer's death before `MC_TRANSFER_TIMEOUT`.
- It gives a device up until the process ends, after 32 failures in a row without a success: of
  completions for which it blames the device, as those of reads that land late, behind a fence, and
  of batches to a peer that it pauses, as it does after five such failures. Here its pause is
  shorter than the lanes' cool-downs: what is tried after one of these is not refused and counted.
- It answers handshakes one after the other. A peer that is stopped within its handshake delays
  those of all others by 5 s. Writes that fail in that time are repeated over ZMQ.

Calls release the interpreter lock; waiting for a batch keeps one processor busy. So does each of
the engine's workers, two for each device by default, while anything is written. On machines with
few processors they compete with the computation of the KV, so there the engine gets one worker.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from common.addresses import host_port
from common.control_group import num_cores
from kv_transfer.lanes.rdma.slabs import Ranges

logger = logging.getLogger("pdserve.kv_transfer")

DEVICES_FOLDER = Path("/sys/class/infiniband")
# Read when a process makes its first engine. Variables that an operator has set are kept.
ENVIRONMENT = {
    "MC_HANDSHAKE_CONNECT_TIMEOUT": "2",
    "MC_LOG_LEVEL": "WARNING",
    "MC_RDMA_RAIL_PAUSE_SECONDS": "10",
    "MC_TRANSFER_TIMEOUT": "10",
}
WORKERS = "MC_WORKERS_PER_CTX"
FEW_PROCESSORS = 8
FORCE_TCP = "MC_FORCE_TCP"
NOT_REGISTERED = -3


class RdmaUnavailable(Exception):
    """This node cannot use RDMA; the text gives the reason."""


class MooncakeEngine:
    """One engine. A process needs one: memory of several pools may be registered with it.

    Peers reach it at `name`, `host:port` with a port that it chooses. `devices` are names separated
    by commas; "" means all. Raises `RdmaUnavailable`.
    """

    def __init__(self, host: str, devices: str = "") -> None:
        _check_devices(devices)
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        if num_cores() < FEW_PROCESSORS:
            os.environ.setdefault(WORKERS, "1")
        try:
            from mooncake.engine import TransferEngine
        except ImportError as error:
            raise RdmaUnavailable(
                f"Mooncake cannot be imported ({error}): wanted `pip install '.[rdma]'` and "
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
        """Let peers write and read there, with a new key. Raises `OSError`."""
        result = self._engine.register_memory(address, num_bytes)
        if result != 0:
            raise OSError(f"{num_bytes} bytes of the KV pool cannot be registered: {result}")

    def unregister(self, address: int) -> None:
        """Remove the key, so that nothing arrives with it any more. Raises `OSError`.

        Memory that is not registered stays so.
        """
        result = self._engine.unregister_memory(address)
        if result not in (0, NOT_REGISTERED):
            raise OSError(f"the KV pool at {address:#x} stays registered: {result}")

    def can_reach(self, peer_name: str) -> bool:
        """Return whether a peer's engine answers. Slow only where that one is stopped.

        Called before the first write, which would delay the writes to all other peers meanwhile.
        """
        return bool(self._engine.send_probe(peer_name) == 0)

    def submit(self, peer_name: str, ranges: Ranges) -> int:
        """Begin to write; return the batch, 0 on failure."""
        here, there, sizes = ranges.T.tolist()
        return int(self._engine.batch_transfer_async_write(peer_name, here, there, sizes))

    def submit_read(self, peer_name: str, ranges: Ranges) -> int:
        """Begin to read; return the batch, 0 on failure."""
        here, there, sizes = ranges.T.tolist()
        return int(self._engine.batch_transfer_async_read(peer_name, here, there, sizes))

    def wait(self, batch: int) -> bool:
        """Wait for the end of a batch; return whether all was moved. Never query it again."""
        return bool(self._engine.get_batch_transfer_status([batch]) == 0)


def _check_devices(devices: str) -> None:
    if os.environ.get(FORCE_TCP):
        raise RdmaUnavailable(f"{FORCE_TCP} is set: Mooncake would use TCP, which has no fence")
    found = sorted(path.name for path in DEVICES_FOLDER.glob("*"))
    missing = [name for name in devices.split(",") if name and name not in found]
    if missing or not found:
        wanted = ", ".join(missing) or "any"
        raise RdmaUnavailable(
            f"no RDMA device here (wanted {wanted}; there are: {', '.join(found) or 'none'})"
        )


def _num_verbs_descriptors() -> int:
    """Return how many RDMA devices this process holds open."""
    count = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            count += "uverbs" in str(descriptor.readlink())
        except OSError:
            continue  # It was closed meanwhile.
    return count
