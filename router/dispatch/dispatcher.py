"""Runs request flows: performs their effects on real nodes, and feeds them what comes back."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from typing import TypeVarTuple, cast

from prometheus_client import CollectorRegistry

from common.clock import Clock, MonotonicClock
from common.errors import InternalError, InvalidRequest, NodeLost, Overloaded, PdserveError
from common.ids import Incarnation, new_request_id
from common.keys_folder import Keys
from common.logs import log_fields
from common.request import RequestOutput, SamplingParams
from placement.store import Placement, PlacementStore, PlacementUnavailable
from protos import pdserve_node_pb2 as pb
from router.core.effects import (
    Choose,
    Effect,
    EmitTokens,
    Fail,
    Finish,
    LegClosed,
    PlaceRecord,
    SendAbort,
    SendPrefill,
    SendReserve,
    Unplace,
)
from router.core.generation import SHUTTING_DOWN, RequestListener, TakeChunks, TokenChunk
from router.core.placement import Placer
from router.core.policies.query import Query
from router.core.request_flow import RequestFlow
from router.core.ttft_stages import StageWatch
from router.dispatch.active_request import ActiveRequest
from router.dispatch.node_calls import PrefillCall, ReserveCall
from router.dispatch.node_clients import SILENCE_S
from router.dispatch.node_pool import NodePool
from router.dispatch.placement_recorder import PlacementRecorder
from router.watch.choice_watch import ChoiceWatch
from router.watch.request_watch import RequestWatch
from router.watch.router_metrics import RouterMetrics

log = logging.getLogger("pdserve.router")

CLOSE_TIMEOUT_S = 3.0
NUM_RECENT_PLACEMENTS = 32
_LATE_TIMER_S = 0.001

Args = TypeVarTuple("Args")


class Dispatcher:
    """A `Generator` over the nodes in one placement store. The store stays its owner's to close."""

    def __init__(
        self,
        store: PlacementStore,
        *,
        router_id: str,
        model: str,
        policy: str,
        node_lease_s: float,
        registry: CollectorRegistry,
        on_failed: Callable[[], None],
        clock: Clock | None = None,
        keys: Keys | None = None,
    ) -> None:
        """Uses the nodes that serve `model`; `on_failed` is called when a bug keeps it from it."""
        self._store = store
        self._clock = clock or MonotonicClock()
        self._metrics = RouterMetrics(registry)
        self._placer = Placer(policy)
        self._requests: dict[str, ActiveRequest] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._is_closing = False
        self._on_failed = on_failed
        self.has_failed = False
        self._recorder = PlacementRecorder(store, router_id, self._clock, self._metrics)
        self.incarnation = Incarnation(router_id, 0)
        self.model = model
        self.recent_placements: deque[Placement] = deque(maxlen=NUM_RECENT_PLACEMENTS)
        self.num_placements = 0
        self.pool = NodePool(
            store,
            model=model,
            lease_s=node_lease_s,
            clock=self._clock,
            metrics=self._metrics,
            num_running=lambda: self.num_running,
            on_outputs=self._on_outputs,
            on_lost=self._on_lost,
            keys=keys,
        )

    @property
    def num_running(self) -> int:
        """Choices in progress."""
        return len(self._requests)

    def flows(self) -> list[RequestFlow]:
        """Their flows, oldest first; to be read, not fed."""
        return [request.flow for request in self._requests.values()]

    async def start(self) -> None:
        """Take an epoch and begin to follow the cluster; does not wait for nodes."""
        router_id = self.incarnation.node_id
        try:
            epoch = await self._store.next_epoch(router_id)
        except PlacementUnavailable as away:
            log.warning("no epoch from the placement store, taking the time: %s", away)
            epoch = time.time_ns() // 1000
        self.incarnation = Incarnation(router_id, epoch)
        self._tasks = [
            asyncio.create_task(self.pool.run(self.incarnation), name="membership"),
            asyncio.create_task(self._recorder.run(), name="placements"),
        ]
        for task in self._tasks:
            task.add_done_callback(self._on_task_end)

    async def wait_for_nodes(self, unless: asyncio.Event) -> None:
        """Return when every node there is was heard, or `unless` is set. A silent one is waited for
        as long as it takes to lose one.

        A request before that would find fewer nodes than there are, or none.
        """
        met = asyncio.create_task(self.pool.wait_met())
        never_mind = asyncio.create_task(unless.wait())
        tasks = {met, never_mind}
        await asyncio.wait(tasks, timeout=SILENCE_S, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        # Without its members or its recorder a router would only get worse: better to end it.
        if not task.cancelled():
            log.error("%s ended by a bug", task.get_name(), exc_info=task.exception())
            self.has_failed = True
            self._on_failed()

    async def close(self) -> None:
        """End every request, tell every node, leave nothing in the store. Idempotent."""
        if self._is_closing:
            return
        self._is_closing = True
        for request in list(self._requests.values()):
            closing = Overloaded(SHUTTING_DOWN)
            self._feed(request, request.flow.on_failure, closing)
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self.pool.wait_sent()
                if self._tasks:
                    await self._recorder.wait_idle()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.pool.close()
        with suppress(PlacementUnavailable):
            await self._store.leave(self.incarnation)

    async def generate(
        self,
        prompt_token_ids: tuple[int, ...],
        sampling: SamplingParams,
        *,
        deadline_s: float,
        priority: int = 0,
        listener: RequestListener | None = None,
        take_now: TakeChunks | None = None,
    ) -> AsyncGenerator[Sequence[TokenChunk], None]:
        """Stream one answer; see `router.core.generation.Generator`."""
        if self._is_closing:
            raise Overloaded(SHUTTING_DOWN)
        if not prompt_token_ids:
            raise InvalidRequest("the prompt is empty: wanted at least 1 token", param="prompt")
        request = self._admit(prompt_token_ids, sampling, deadline_s, priority, listener, take_now)
        try:
            self._feed(request, request.flow.start)
            while True:
                chunks = await request.next_chunks()
                yield chunks
                if chunks[-1].finish_reason is not None:
                    return
        finally:
            self._feed(request, request.flow.on_client_gone)

    def _admit(
        self,
        prompt_token_ids: tuple[int, ...],
        sampling: SamplingParams,
        deadline_s: float,
        priority: int,
        listener: RequestListener | None,
        take_now: TakeChunks | None,
    ) -> ActiveRequest:
        now_s = self._clock.now_s()
        deadline_at_s = now_s + deadline_s
        flow = RequestFlow(
            new_request_id(),
            prompt_token_ids,
            sampling,
            deadline_at_s=deadline_at_s,
            priority=priority,
        )
        query = Query(prompt_token_ids, sampling.max_tokens)
        choice = ChoiceWatch(
            listener or RequestWatch("", self.model, now_s), flow.attempt.request_id
        )
        request = ActiveRequest(flow, query, deadline_at_s, StageWatch(now_s), choice, take_now)
        self._requests[request.request_id] = request
        self._metrics.running.set(len(self._requests))
        self._set_timer(request)
        return request

    def _set_timer(self, request: ActiveRequest) -> None:
        delay_s = max(_LATE_TIMER_S, request.deadline_at_s - self._clock.now_s())
        loop = asyncio.get_running_loop()
        request.timer = loop.call_later(delay_s, self._on_timer, request)

    # What comes in.

    def _on_timer(self, request: ActiveRequest) -> None:
        self._feed(request, request.flow.on_time, self._clock.now_s())
        if not request.flow.is_done:
            self._set_timer(request)

    def _on_outputs(self, node: Incarnation, outputs: Sequence[RequestOutput]) -> None:
        requests, with_news = self._requests, []
        for output in outputs:
            request = requests.get(output.id.request_id)
            if request is None:
                continue
            chunk = request.flow.next_tokens(node, output)
            if chunk is None:
                self._feed(request, request.flow.on_output, node, output)
            elif request.put(chunk):
                with_news.append(request)
        for request in with_news:  # with all at once of what came for it
            request.pass_on()

    def _on_lost(self, node: Incarnation) -> None:
        for request in list(self._requests.values()):
            self._feed(request, request.flow.on_node_lost, node)

    def _feed(
        self, request: ActiveRequest, event: Callable[[*Args], Sequence[Effect]], *args: *Args
    ) -> None:
        """Apply one event. A bug ends this request, and nothing else."""
        try:
            self._perform(request, event(*args))
        except Exception:
            self._end_by_bug(request)

    def _end_by_bug(self, request: ActiveRequest) -> None:
        attempt = request.flow.attempt
        log.exception("%s ended by a bug", attempt, extra=log_fields(attempt))
        error = InternalError(f"an internal error ended {request.request_id}")
        try:
            self._perform(request, request.flow.on_failure(error))
        except Exception:
            log.exception("%s could not be ended in order", attempt, extra=log_fields(attempt))
        # The flow may be over by an effect that was never performed: the client must hear of it.
        if request.request_id in self._requests:
            request.fail(error)
            self._end(request, error.code)

    # What goes out.

    def _perform(self, request: ActiveRequest, effects: Sequence[Effect]) -> None:
        pending = list(effects)
        for effect in pending:
            match effect:
                case EmitTokens():
                    request.put(self._timed(request, effect.chunk))
                    request.pass_on()
                case Choose():
                    pending.extend(self._choose(request, effect))
                case SendReserve():
                    self._reserve(request, effect)
                case SendPrefill():
                    self._prefill(request, effect)
                case SendAbort():
                    client = self.pool.client(effect.node)
                    if client is not None:
                        client.abort_nowait(effect.attempt)
                case LegClosed():
                    self.pool.membership.on_leg_closed(effect.node)
                case PlaceRecord():
                    self._place(request, effect)
                case Unplace():
                    self._recorder.unplace_nowait(effect.attempt)
                case Finish():
                    self._end(request, effect.reason.value)
                case Fail():
                    request.fail(effect.error)
                    self._end(request, effect.error.code)

    def _choose(self, request: ActiveRequest, effect: Choose) -> list[Effect]:
        nodes, flow = self.pool.nodes(), request.flow
        now_s = self._clock.now_s()
        request.stages.on_choosing(flow.attempt.attempt, now_s)
        request.watch.on_choosing(
            flow.attempt, now_s, is_reserved=effect.decode is not None, failure=flow.failure
        )
        try:
            if effect.decode is None:
                choice = self._placer.choose(nodes, request.query, effect.excluded)
            else:
                choice = self._placer.choose_prefill(
                    nodes, request.query, effect.decode, effect.excluded
                )
        except PdserveError as none_left:
            return flow.on_no_choice(none_left)
        now_s = self._clock.now_s()
        return flow.on_choice(choice.decode, choice.prefill, choice.reason, now_s)

    def _reserve(self, request: ActiveRequest, effect: SendReserve) -> None:
        node, attempt, now_s = effect.node, effect.request.id, self._clock.now_s()
        self.pool.membership.on_leg_opened(node)
        request.stages.on_reserve_asked(attempt.attempt, now_s)
        request.watch.on_reserve_asked(attempt, node, now_s)
        call = ReserveCall(self._feed, request, node, attempt, self._clock.now_s)
        client = self.pool.client(node)
        if client is None:
            asyncio.get_running_loop().call_soon(call.on_failed, NodeLost(f"{node} has left"))
            return
        client.reserve_nowait(
            request.watch.asks(effect.request),
            call,
            must_prefill_locally=effect.must_prefill_locally,
            may_wait=effect.may_wait,
        )

    def _prefill(self, request: ActiveRequest, effect: SendPrefill) -> None:
        node = effect.node
        self.pool.membership.on_leg_opened(node)
        call = PrefillCall(self._feed, request, node, effect.request.id)
        client = self.pool.client(node)
        if client is None:
            asyncio.get_running_loop().call_soon(call.on_failed, NodeLost(f"{node} has left"))
            return
        ticket = cast("pb.Ticket | None", effect.ticket)
        client.prefill_nowait(request.watch.asks(effect.request), call, ticket)

    def _timed(self, request: ActiveRequest, chunk: TokenChunk) -> TokenChunk:
        """The chunk; with token 0 also where its time went."""
        if chunk.first_index or not chunk.token_ids:
            return chunk
        stages = request.stages.on_first_token(
            self._clock.now_s(), queue_s=chunk.queue_s, compute_s=chunk.compute_s
        )
        return chunk._replace(stages=stages)

    def _place(self, request: ActiveRequest, effect: PlaceRecord) -> None:
        now_s = self._clock.now_s()
        request.stages.on_placed(effect.attempt.attempt, now_s)
        request.watch.on_placed(effect.decode, effect.prefill, effect.reason, now_s)
        placement = Placement(
            attempt=effect.attempt,
            router_id=self.incarnation.node_id,
            decode=effect.decode,
            prefill=effect.prefill,
            reason=effect.reason,
        )
        self.recent_placements.append(placement)
        self.num_placements += 1
        self._recorder.place_nowait(placement)

    def _end(self, request: ActiveRequest, outcome: str) -> None:
        if request.timer is not None:
            request.timer.cancel()
        self._requests.pop(request.request_id, None)
        self._metrics.running.set(len(self._requests))
        self._metrics.requests.labels(outcome).inc()
        self._metrics.retries.inc(request.flow.attempt.attempt - 1)
        request.watch.on_end(outcome, self._clock.now_s())
