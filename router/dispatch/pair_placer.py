"""Placements that avoid pairs of nodes whose handoffs fail, and that keep sessions together.

Outputs show that a handoff failed. A prefill node also tells which decode nodes do not answer it.
"""

from __future__ import annotations

import logging
import secrets

from common.errors import HandoffFailed, error_from_code
from common.ids import Incarnation
from common.observing.clock import Clock
from common.request import FinishReason, RequestOutput
from router.core.effects import Choose
from router.core.known.block_reports import BlockReport
from router.core.known.pair_health import Pair, PairHealth
from router.core.known.roster import Roster
from router.core.known.sessions import KnownSessions, SessionNodes
from router.core.placement import ChosenNodes, Placer
from router.core.policies.query import Query
from router.core.request_flow import RequestFlow
from router.watch.router_metrics import RouterMetrics

log = logging.getLogger("pdserve.router")


class PairPlacer:
    """A `Placer`, the pairs that it avoids, and where the requests of sessions were placed."""

    def __init__(
        self,
        policy: str,
        session_ttl_s: float,
        clock: Clock,
        metrics: RouterMetrics,
        *,
        seed: int | None = None,
    ) -> None:
        """Look the policy up. Raises `KeyError` for a policy that does not exist.

        A session is known for `session_ttl_s` after its last request was placed. From `seed`
        follows which nodes of a wide cluster are looked at; None: a random one.
        """
        self._placer = Placer(policy, seed=secrets.randbits(64) if seed is None else seed)
        self._clock = clock
        self._metrics = metrics
        self._pairs = PairHealth()
        self._sessions = KnownSessions(session_ttl_s)
        metrics.sessions.set_function(lambda: len(self._sessions))
        metrics.known_blocks.set_function(lambda: self._placer.num_known_blocks)

    def choose(self, nodes: Roster, query: Query, wanted: Choose) -> ChosenNodes:
        """Choose nodes, or a prefill node for a reservation.

        Raises `InvalidRequest` and `Overloaded` as `Placer` does.
        """
        now_s = self._clock.now_s()
        avoided = self._pairs.avoided(now_s) | nodes.unreachable
        if query.session:
            query.last = self._sessions.last(query.session, now_s)
        if wanted.decode is None:
            chosen = self._placer.choose(nodes, query, wanted.excluded, avoided)
        else:
            chosen = self._placer.choose_prefill(
                nodes, query, wanted.decode, wanted.excluded, avoided
            )
        if chosen.prefill is not None and chosen.decode is not None:
            self._pairs.on_placed((chosen.prefill, chosen.decode), now_s)
        if query.session:
            self._note(query, chosen, now_s)
        return chosen

    def _note(self, query: Query, chosen: ChosenNodes, now_s: float) -> None:
        """Remember where a request of a session goes."""
        nodes = SessionNodes(chosen.decode, chosen.prefill, len(query.prompt_token_ids))
        placed = self._sessions.on_placed(query.session, nodes, now_s)
        self._metrics.session_placements.labels(placed.value).inc()

    def on_blocks(self, node: Incarnation, report: BlockReport) -> None:
        """Take what a node says of its prefix cache."""
        num_dropped = self._placer.on_blocks(node, report)
        if num_dropped:
            self._metrics.blocks_dropped.inc(num_dropped)

    def on_lost(self, node: Incarnation) -> None:
        """Forget what a node holds: it will say it again, if it comes back."""
        self._placer.on_lost(node)

    def before_output(self, flow: RequestFlow, node: Incarnation, output: RequestOutput) -> None:
        """Look at an output that the flow will take next, while both its nodes are known."""
        is_error = output.details.finish_reason is FinishReason.ERROR
        pair = flow.pair(output.id) if is_error or self._pairs else None
        if pair is None or node not in pair:
            return
        prefill, decode = pair
        if not is_error:
            if node == decode and self._pairs.on_worked((prefill, decode)):
                log.info("KV from %s to %s: the handoff works again", prefill, decode)
            return
        error = error_from_code(output.details.error_code, output.details.error_message)
        if isinstance(error, HandoffFailed):
            self._on_failed((prefill, decode), error)

    def _on_failed(self, pair: Pair, error: HandoffFailed) -> None:
        self._metrics.handoffs_failed.inc()
        failed = self._pairs.on_failed(pair, self._clock.now_s())
        if failed is not None:
            num_failures, pause_s = failed
            what = "KV from %s to %s: %d handoffs failed in a row, not placed there for %g s: %s"
            log.warning(what, *pair, num_failures, pause_s, error)
