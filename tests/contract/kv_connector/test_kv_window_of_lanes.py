"""The window of a pair grows with its connections."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest

from common.errors import ConfigError
from common.ids import Incarnation
from kv_transfer.zmq.connector import ZmqConnector
from tests.support.kv.kv_cluster import LAYOUT, PAIR_BYTES


def connector(kv_lanes: int, window_bytes: int) -> ZmqConnector:
    pool = np.zeros(LAYOUT.pool_shape(4), np.uint8)
    return ZmqConnector(
        pool,
        LAYOUT,
        Incarnation("p", 1),
        lambda _: None,
        kv_lanes=kv_lanes,
        window_bytes=window_bytes,
    )


def test_a_block_fits_the_windows_of_all_connections() -> None:
    with closing(connector(4, PAIR_BYTES // 4)):
        pass
    for kv_lanes, window_bytes in ((4, PAIR_BYTES // 4 - 1), (1, PAIR_BYTES - 1)):
        with pytest.raises(ConfigError, match="the KV window is"):
            connector(kv_lanes, window_bytes)
