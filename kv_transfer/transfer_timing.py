"""The times of one committed transfer; the drawing is in `transfer_metrics`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferTiming:
    """One committed transfer, as its sender measured it. Times are on the connector's clock.

    `bytes_hidden` had been acknowledged when `commit` was called.
    """

    lease_token: int
    lane: str
    num_bytes: int
    bytes_hidden: int
    opened_at_s: float
    first_sent_at_s: float
    last_acked_at_s: float
    committed_at_s: float
    ended_at_s: float

    @property
    def duration_s(self) -> float:
        return self.ended_at_s - self.opened_at_s

    @property
    def sending_s(self) -> float:
        return self.last_acked_at_s - self.first_sent_at_s

    @property
    def exposed_s(self) -> float:
        return self.ended_at_s - self.committed_at_s
