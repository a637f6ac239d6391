"""A node's end of the KV plane, as its configuration wants it: memory, lanes, connector."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import cast

import numpy as np
import numpy.typing as npt

from common.config import Config
from common.errors import ConfigError
from common.ids import Incarnation
from common.kv_layout import KVLayout
from common.nodes import Role
from kv_transfer.connector import OnEvent
from kv_transfer.lane import Lane
from kv_transfer.shm.shared_pool import SharedPool
from kv_transfer.shm.shm_lane import ShmLane
from kv_transfer.zmq_connector import ZmqConnector
from node.engine_node import LoadedModel, NodeConnector, advertised_host

log = logging.getLogger("pdserve.node")

KV_PEER_TIMEOUT_S = 5.0


class KVPlane:
    """Made before the model is loaded, since the pool's memory is part of it."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._transport = config.handoff.kv_transport
        self._shared: SharedPool | None = None

    def host_memory(self, num_bytes: int, is_touched: bool) -> npt.NDArray[np.uint8] | None:
        """Shared memory for a pool that decode nodes of this host may read; None: not wanted.

        Raises `ConfigError` where it is wanted alone and cannot be had.
        """
        if self._config.role is not Role.PREFILL or self._transport not in ("auto", "shm"):
            return None
        try:
            self._shared = SharedPool(num_bytes, is_touched=is_touched)
        except OSError as error:
            if self._transport == "shm":
                raise ConfigError(
                    f"kv_transport is shm, but {num_bytes} bytes of shared memory cannot be had: "
                    f"{error}"
                ) from None
            log.warning("KV is not shared with decode nodes on this host: %s", error)
            return None
        return self._shared.memory

    def connect(
        self, model: LoadedModel, incarnation: Incarnation, on_event: OnEvent
    ) -> NodeConnector:
        """The node's one connector. Raises `ConfigError`."""
        from engine.runner.model_runner import ModelRunner

        config = self._config
        return ZmqConnector(
            cast(ModelRunner, model).kv_bytes,
            model.layout,
            incarnation,
            on_event,
            host=config.server.host,
            port=config.server.kv_port,
            advertised_host=advertised_host(config.server.host),
            window_bytes=config.handoff.kv_window,
            peer_timeout_s=KV_PEER_TIMEOUT_S,
            lanes=self._lanes(model.layout),
            has_inline=self._transport != "shm",
            verify=config.handoff.kv_verify,
        )

    def _lanes(self, layout: KVLayout) -> Sequence[Lane]:
        lanes: list[Lane] = []
        if self._transport in ("auto", "shm"):
            lanes.append(ShmLane(layout, self._shared))
        return lanes
