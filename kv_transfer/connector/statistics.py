"""A snapshot of a connector's counters, for metrics and tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from common.ids import Incarnation
from kv_transfer.connector.transfer_metrics import TransferMetricsView


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorStatistics:
    """Counters since the connector was made, and what is open now.

    `lanes`: the lane to each connected decode node, by its id. `unreachable`: decode nodes that did
    not answer and are being tried again, the latest first and only so many. Dropped frames are by
    reason, checksum failures by lane.
    """

    bytes_sent: int
    bytes_received: int
    transfers_open: int
    landings_open: int
    sessions_open: int
    blocks_quarantined: int
    lanes: Mapping[str, str]
    unreachable: tuple[Incarnation, ...] = ()
    frames_dropped: Mapping[str, int]
    checksum_failures: Mapping[str, int]
    measured: TransferMetricsView
