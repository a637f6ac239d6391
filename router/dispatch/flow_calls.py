"""What a choice's flow asks for: nodes of the chooser, work of nodes, a record of its placement."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVarTuple, cast

from common.errors import PdserveError
from common.ids import AttemptId, Incarnation
from common.observing.clock import Clock
from placement.store import Placement
from protos import pdserve_node_pb2 as pb
from router.core.candidates import NodeAway
from router.core.counted_legs import CountedEffect, count_legs
from router.core.effects import Choose, Effect, PlaceRecord, SendAbort, SendPrefill, SendReserve
from router.core.placement import Chooser
from router.core.policies.query import NoneStays
from router.core.request_flow import DecodeGrant, PrefillGrant
from router.dispatch.client.node_calls import NodeCalls
from router.dispatch.client.stream_calls import Caller
from router.dispatch.missing_nodes import what_is_missing
from router.dispatch.node_pool import NodePool
from router.dispatch.placement_recorder import PlacementRecorder
from router.dispatch.running_choice import RunningChoice
from router.watch.router_metrics import RouterMetrics

Args = TypeVarTuple("Args")


class Feed(Protocol):
    """Applies one event to the flow of a choice."""

    def __call__(
        self, choice: RunningChoice, event: Callable[[*Args], Sequence[Effect]], *args: *Args
    ) -> None: ...


class FlowCalls:
    """Performs the effects of flows that ask for something. Replies and failures go to `feed`."""

    def __init__(
        self,
        pool: NodePool,
        chooser: Chooser,
        recorder: PlacementRecorder,
        metrics: RouterMetrics,
        clock: Clock,
        *,
        router_id: str,
        feed: Feed,
    ) -> None:
        self._pool = pool
        self._chooser = chooser
        self._recorder = recorder
        self._metrics = metrics
        self._clock = clock
        self._router_id = router_id
        self._feed = feed

    def choose(self, choice: RunningChoice, effect: Choose) -> list[Effect]:
        """Choose nodes for the present attempt; return the effects of the flow's next event."""
        nodes, flow, query = self._pool.nodes(), choice.flow, choice.query
        now_s = self._clock.now_s()
        query.max_tokens = flow.max_tokens
        query.needs_prompt_logprobs &= not flow.num_output_tokens  # they came with token 0
        is_reserved = effect.decode is not None
        choice.trace.on_choosing(flow.attempt, now_s, is_reserved=is_reserved, failure=flow.failure)
        try:
            chosen, placed = self._chooser.choose(nodes, query, effect, now_s)
        except NoneStays as none_left:
            missing = what_is_missing(nodes, self._pool.membership)
            return flow.on_no_choice(NoneStays(missing, retry_after_s=none_left.retry_after_s))
        except PdserveError as none_left:
            return flow.on_no_choice(none_left)
        if placed is not None:
            self._metrics.session_placements.labels(placed.value).inc()
        now_s = self._clock.now_s()
        return flow.on_choice(
            chosen.decode, chosen.prefill, chosen.reason, now_s, chosen.source, chosen.layout
        )

    def reserve(self, choice: RunningChoice, effect: SendReserve) -> None:
        """Ask a decode node for blocks and a seat."""
        node, attempt = effect.node, effect.request.id
        self.count(choice, effect)
        choice.trace.on_reserve_asked(attempt, node, self._clock.now_s())
        calls, on_failed = self._calls_of(choice, node, attempt)
        if calls is None:
            return

        def on_reply(reply: DecodeGrant | PdserveError) -> None:
            now_s = self._clock.now_s()
            self._feed(choice, choice.flow.on_reserve_reply, node, attempt, reply, now_s)

        calls.reserve_nowait(
            choice.trace.asks(effect.request),
            Caller(on_reply, on_failed),
            must_prefill_locally=effect.must_prefill_locally,
            may_wait=effect.may_wait,
            source=self._pool.source_that_sends(effect.source),
        )

    def prefill(self, choice: RunningChoice, effect: SendPrefill) -> None:
        """Ask a prefill node to compute the prompt."""
        node, attempt = effect.node, effect.request.id
        self.count(choice, effect)
        calls, on_failed = self._calls_of(choice, node, attempt)
        if calls is None:
            return

        def on_reply(reply: PrefillGrant | PdserveError) -> None:
            self._feed(choice, choice.flow.on_prefill_reply, node, attempt, reply)

        calls.prefill_nowait(
            choice.trace.asks(effect.request),
            Caller(on_reply, on_failed),
            cast("pb.Ticket | None", effect.ticket),
            self._pool.source_that_sends(effect.source),
        )

    def abort(self, effect: SendAbort) -> None:
        """Abort an attempt on a node."""
        client = self._pool.client(effect.node)
        if client is not None:
            client.calls.abort_nowait(effect.attempt)

    def count(self, choice: RunningChoice, effect: CountedEffect) -> None:
        """Count what an effect changes of the requests and prompt tokens on nodes."""
        count_legs(self._pool.membership, effect, choice.num_prompt_tokens)

    def place(self, choice: RunningChoice, effect: PlaceRecord) -> None:
        """Record the nodes of an attempt."""
        choice.trace.on_placed(
            effect.attempt, effect.decode, effect.prefill, effect.reason, self._clock.now_s()
        )
        placement = Placement(
            attempt=effect.attempt,
            router_id=self._router_id,
            decode=effect.decode,
            prefill=effect.prefill,
            reason=effect.reason,
        )
        self._recorder.place_nowait(placement)

    def unplace(self, attempt: AttemptId) -> None:
        """Remove the record of an attempt."""
        self._recorder.unplace_nowait(attempt)

    def _calls_of(
        self, choice: RunningChoice, node: Incarnation, attempt: AttemptId
    ) -> tuple[NodeCalls | None, Callable[[PdserveError], None]]:
        """Return the calls of a node, and what takes a failure; None: the call has failed."""

        def on_failed(error: PdserveError) -> None:
            self._feed(choice, choice.flow.on_call_failed, node, attempt, error)

        client = self._pool.client(node)
        if client is None:
            asyncio.get_running_loop().call_soon(on_failed, NodeAway(f"{node} has left"))
            return None, on_failed
        return client.calls, on_failed
