"""Placements, and what people see of them: metrics of sessions and blocks, and lines about pairs of
nodes whose handoffs fail.

Outputs show that a handoff failed. A prefill node also tells which decode nodes do not answer it.
"""

from __future__ import annotations

import logging

from common.errors import HandoffFailed, error_from_code
from common.ids import Incarnation
from common.observing.clock import Clock
from common.request import FinishReason, RequestOutput
from router.core.choosing.chooser import Chooser
from router.core.effects import Choose
from router.core.known.block_reports import BlockReport
from router.core.known.pair_health import Pair
from router.core.known.roster import Roster
from router.core.placement import ChosenNodes
from router.core.policies.query import Query
from router.core.request_flow import RequestFlow
from router.watch.router_metrics import RouterMetrics

log = logging.getLogger("pdserve.router")


class PairPlacer:
    """A `Chooser` on a clock, seen in metrics and log lines."""

    def __init__(self, chooser: Chooser, clock: Clock, metrics: RouterMetrics) -> None:
        self._chooser = chooser
        self._clock = clock
        self._metrics = metrics
        metrics.sessions.set_function(lambda: chooser.num_sessions)
        metrics.known_blocks.set_function(lambda: chooser.num_known_blocks)

    def choose(self, nodes: Roster, query: Query, wanted: Choose) -> ChosenNodes:
        """Choose nodes, or a prefill node for a reservation.

        Raises `InvalidRequest` and `Overloaded` as `Placer` does.
        """
        chosen, placed = self._chooser.choose(nodes, query, wanted, self._clock.now_s())
        if placed is not None:
            self._metrics.session_placements.labels(placed.value).inc()
        return chosen

    def on_blocks(self, node: Incarnation, report: BlockReport) -> None:
        """Take what a node says of its prefix cache."""
        num_dropped = self._chooser.on_blocks(node, report)
        if num_dropped:
            self._metrics.blocks_dropped.inc(num_dropped)

    def on_lost(self, node: Incarnation) -> None:
        """Forget what a node holds: it will say it again, if it comes back."""
        self._chooser.on_lost(node)

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
