"""A node's end of the KV plane as configured: memory, lanes, connector."""

from __future__ import annotations

import logging
import mmap
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt

from common.errors import ConfigError, HandoffFailed
from common.files.keys_folder import Keys
from common.ids import Incarnation
from common.kv.kv_layout import KVLayout
from common.settings.config import Config
from kv_transfer.contract import OnEvent
from kv_transfer.lanes.card_pool import CardPool
from kv_transfer.lanes.ipc.ipc_lane import IpcLane
from kv_transfer.lanes.lane import Lane
from kv_transfer.lanes.pool_memory import Pool, host_pool, ring_pool
from kv_transfer.lanes.rdma.mooncake_engine import MooncakeEngine, RdmaUnavailable
from kv_transfer.lanes.rdma.rdma_lane import RdmaLane
from kv_transfer.lanes.rdma.read_lane import RdmaReadLane
from kv_transfer.lanes.shm.shared_pool import SharedPool
from kv_transfer.lanes.shm.shm_lane import ShmLane
from kv_transfer.shared.limits import Limits
from kv_transfer.shared.pool_shape import PoolShape
from kv_transfer.zmq.connector import ZmqConnector
from kv_transfer.zmq.curve_keys import load_curve_keys
from node.life.node_parts import LoadedModel, NodeConnector
from node.life.self_description import advertised_kv_host

log = logging.getLogger("pdserve.node")


class KVPlane:
    """Makes the pool's memory, the lanes and the connector of one node.

    It is made before the model is loaded, so that an unusable transport is reported at once and the
    pool can be allocated in its memory. It sends and receives, whatever the role of the node: that
    may change. The transport `auto` uses every lane that is available,
    except RDMA in a cluster with a KV key: an RDMA engine lets every machine that reaches it read
    and write the pool, which the key is meant to prevent.
    """

    def __init__(self, config: Config, keys: Keys | None = None) -> None:
        """Prepare the transport. Raises `ConfigError` when it is not available on this machine."""
        self._config = config
        self._host = advertised_kv_host(config.server)
        transport = config.handoff.kv_transport
        self._is_ipc_only, self._is_shm_only = transport == "ipc", transport == "shm"
        self._takes_ipc = transport in ("auto", "ipc")
        self._takes_shm = transport in ("auto", "shm")
        self._shared: SharedPool | None = None
        self._shared_host: SharedPool | None = None
        key = keys.kv_key_path if keys else config.handoff.kv_key
        self._keys = load_curve_keys(Path(key)) if key else None
        self._is_rdma_wanted = transport == "rdma"
        self._takes_rdma = self._is_rdma_wanted or (transport == "auto" and self._keys is None)
        self._engine: MooncakeEngine | None = None
        if self._is_rdma_wanted:
            try:
                self._engine = self._start_engine()
            except RdmaUnavailable as error:
                self._do_without_rdma(error)

    def host_memory(self, num_bytes: int, is_touched: bool) -> npt.NDArray[np.uint8] | None:
        """Return shared memory for the KV pool, or a ring; None: private memory will do.

        Nodes on this host to which this one sends read the pool through it. What RDMA writes to
        requires it too, because it is fenced by moving it to other addresses.

        Raises `ConfigError` when it cannot be allocated and the transport is not `auto`.
        """
        if not (self._takes_shm or self._is_rdma_wanted):
            return None
        try:
            self._shared = SharedPool(num_bytes, is_touched=is_touched)
        except OSError as error:
            if self._is_shm_only or self._is_rdma_wanted:
                raise ConfigError(
                    f"kv_transport is {self._config.handoff.kv_transport}, but {num_bytes} bytes "
                    f"of shared memory cannot be allocated: {error}"
                ) from None
            log.warning("the KV pool is private memory: %s", error)
            return None
        return self._shared.memory

    def host_space_memory(self, num_bytes: int, is_touched: bool) -> npt.NDArray[np.uint8] | None:
        """Return shared memory for blocks of prefixes in host memory; None: private memory will do.

        Nodes on this host that pull from there read it as they read the pool.
        """
        if not (self._takes_shm and self._keeps_prefixes):
            return None
        try:
            self._shared_host = SharedPool(num_bytes, is_touched=is_touched)
        except OSError as error:
            log.warning("prefixes in host memory are in private memory: %s", error)
            return None
        return self._shared_host.memory

    @property
    def secret(self) -> bytes:
        """The secret half of the KV key; empty without one."""
        return b"" if self._keys is None else self._keys.secret

    @property
    def _keeps_prefixes(self) -> bool:
        return self._config.engine.prefix_host_memory > 0

    def connect(
        self, model: LoadedModel, incarnation: Incarnation, on_event: OnEvent
    ) -> NodeConnector:
        """Return the node's connector. Raises `ConfigError` when a required lane is unusable.

        A tensor-parallel node would attach here: each rank has a pool and a KV layout of its own
        (its slice of the KV heads), so each needs lanes and an endpoint, in one ticket.
        """
        from engine.runner.model_runner import ModelRunner

        config = self._config
        runner = cast(ModelRunner, model)
        beside = None
        # Memory that a lane's receivers cannot read is not sent from on any lane.
        is_readable = self._shared_host is not None or not self._takes_shm
        if self._keeps_prefixes and model.num_host_blocks and is_readable:
            beside = host_pool(model.host_kv, model.layout)
        card = cast(CardPool | None, runner.card_pool)
        if card is None:
            pool = host_pool(runner.kv_bytes, model.layout)
        else:
            pool = self._ring(model.layout)
        return ZmqConnector(
            pool,
            model.layout,
            incarnation,
            on_event,
            host=config.server.kv_host or config.server.host,
            port=config.server.kv_port,
            advertised_host=self._host,
            window_bytes=config.handoff.kv_window,
            kv_lanes=config.handoff.kv_lanes,
            lanes=[
                *self._card_lanes(card, model.layout),
                *self._lanes(pool, model.layout, has_card=card is not None),
            ],
            beside=beside,
            card=card,
            has_inline=not (self._is_shm_only or self._is_ipc_only),
            verify=config.handoff.kv_verify,
            keys=self._keys,
        )

    def _card_lanes(self, card: CardPool | None, layout: KVLayout) -> list[Lane]:
        """Return the lane between cards. Raises `ConfigError` where only that one is wanted."""
        if not self._takes_ipc:
            return []
        try:
            if card is None:
                raise HandoffFailed("the KV cache is not on a GPU with attention_backend triton")
            return [IpcLane(layout, card, is_offered=True)]
        except HandoffFailed as error:
            if self._is_ipc_only:
                raise ConfigError(
                    f"kv_transport is ipc, but {error}; --kv-transport auto does without"
                ) from None
            log.debug("KV does not travel between cards: %s", error)
            return []

    def _ring(self, layout: KVLayout) -> Pool:
        """Return the ring through which lanes of the host reach a card.

        No page of it is touched: it takes memory when a lane needs it, by RDMA at the start.
        """
        handoff = self._config.handoff
        limits = Limits(window_bytes=handoff.kv_lanes * handoff.kv_window)
        num_bytes = PoolShape.ring(layout, limits.ring_slots(layout)).num_bytes
        memory = self.host_memory(num_bytes, False)
        if memory is None:
            memory = np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)
        return ring_pool(memory, layout)

    def _lanes(self, pool: Pool, layout: KVLayout, *, has_card: bool) -> list[Lane]:
        """Return the lanes of host memory, in which a node with a card has a ring."""
        lanes: list[Lane] = []
        if self._takes_shm:
            lanes.append(ShmLane(layout, self._shared, self._shared_host, is_ring=has_card))
        if self._takes_rdma:
            try:
                lanes.append(self._rdma_lane(pool, has_card=has_card))
            except RdmaUnavailable as error:
                self._do_without_rdma(error)
        return lanes

    def _rdma_lane(self, pool: Pool, *, has_card: bool) -> Lane:
        """Return the lane by RDMA. Raises `RdmaUnavailable`.

        Others write a pool in host memory by themselves. A ring has slots in place of its blocks:
        others read it.
        """
        engine = self._engine or self._start_engine()
        make_lane = RdmaReadLane if has_card else RdmaLane
        return make_lane(pool, engine, window_bytes=self._config.handoff.kv_window)

    def _start_engine(self) -> MooncakeEngine:
        return MooncakeEngine(self._host, self._config.handoff.rdma_devices)

    def _do_without_rdma(self, error: RdmaUnavailable) -> None:
        if self._is_rdma_wanted:
            raise ConfigError(
                f"kv_transport is rdma, but {error}; --kv-transport auto does without"
            ) from None
        log.debug("KV does not travel by RDMA: %s", error)
