"""Preemptions in the log, at most one line in some seconds: an operator sees a pool too small."""

from __future__ import annotations

import logging

from engine.core.step.step_in_flight import Preempted

log = logging.getLogger("pdserve.engine")

LOG_EVERY_S = 5.0


class PreemptionLog:
    """Adds up what steps preempted since the last line. Only the step thread calls it."""

    def __init__(self) -> None:
        self._next_at_s = 0.0
        self._num_for_blocks = 0
        self._num_for_priority = 0
        self._num_lost_tokens = 0
        self._ratio_before = 0.0
        self._last: Preempted | None = None

    def on_step(self, preempted: Preempted | None, now_s: float) -> None:
        """Take a step's preemptions, if there were any, and write a line if one is due."""
        if preempted is not None:
            if self._last is None:
                self._ratio_before = preempted.ratio_before
            self._last = preempted
            self._num_for_blocks += preempted.num_for_blocks
            self._num_for_priority += preempted.num_for_priority
            self._num_lost_tokens += preempted.num_lost_tokens
        if self._last is not None and now_s >= self._next_at_s:
            self._write(self._last)
            self._next_at_s = now_s + LOG_EVERY_S
            self._last = None
            self._num_for_blocks = self._num_for_priority = self._num_lost_tokens = 0

    def _write(self, last: Preempted) -> None:
        blocks = last.blocks
        log.info(
            "preempted %d sequences, %d for blocks and %d for more urgent requests: %d computed "
            "tokens lost their KV; new_token_ratio %.3f -> %.3f; %d sequences run and %d wait; "
            "blocks: %d free, %d cached, %d running, %d reserved, %d receiving, %d quarantined",
            self._num_for_blocks + self._num_for_priority,
            self._num_for_blocks,
            self._num_for_priority,
            self._num_lost_tokens,
            self._ratio_before,
            last.ratio_after,
            last.num_running,
            last.num_waiting,
            blocks.free,
            blocks.cached,
            blocks.running,
            blocks.reserved,
            blocks.receiving,
            blocks.quarantined,
        )
