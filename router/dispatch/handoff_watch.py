"""Reads from outputs which handoffs work: passes that to the chooser, counts and logs it.

A prefill node also reports which decode nodes do not answer it, in its load.
"""

from __future__ import annotations

import logging

from common.errors import HandoffFailed, error_from_code
from common.ids import Incarnation
from common.observing.clock import Clock
from common.request import FinishReason, RequestOutput
from router.core.known.pair_health import Pair
from router.core.placement import Chooser
from router.core.request_flow import RequestFlow
from router.watch.router_metrics import RouterMetrics

log = logging.getLogger("pdserve.router")


class HandoffWatch:
    """Looks at the outputs of attempts that two nodes hold."""

    def __init__(self, chooser: Chooser, clock: Clock, metrics: RouterMetrics) -> None:
        self._chooser = chooser
        self._clock = clock
        self._metrics = metrics

    def before_output(self, flow: RequestFlow, node: Incarnation, output: RequestOutput) -> None:
        """Look at an output that the flow will take next, while both its nodes are known."""
        is_error = output.details.finish_reason is FinishReason.ERROR
        pair = flow.pair(output.id) if is_error or self._chooser.has_failed_pairs else None
        if pair is None or node not in pair:
            return
        prefill, decode = pair
        if not is_error:
            if node == decode and self._chooser.on_worked((prefill, decode)):
                log.info("KV from %s to %s: the handoff works again", prefill, decode)
            return
        error = error_from_code(output.details.error_code, output.details.error_message)
        if isinstance(error, HandoffFailed):
            self._on_failed((prefill, decode), error)

    def _on_failed(self, pair: Pair, error: HandoffFailed) -> None:
        self._metrics.handoffs_failed.inc()
        failed = self._chooser.on_failed(pair, self._clock.now_s())
        if failed is not None:
            num_failures, pause_s = failed
            what = "KV from %s to %s: %d handoffs failed in a row, not placed there for %g s: %s"
            log.warning(what, *pair, num_failures, pause_s, error)
