"""Runs request flows: feeds them events and tokens, and performs their effects."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry

from common.errors import (
    InternalError,
    InvalidRequest,
    Overloaded,
    PdserveError,
    PlacementUnavailable,
)
from common.files.keys_folder import Keys
from common.ids import Incarnation, new_id
from common.kv.prompt_blocks import PromptBlocks
from common.observing.clock import Clock, MonotonicClock
from common.observing.logs import log_fields
from common.request import FinishReason, RequestOutput, SamplingParams
from placement.store import PlacementStore
from router.core.effects import (
    Accepted,
    Choose,
    Effect,
    Fail,
    Finish,
    LegClosed,
    PlaceRecord,
    PromptComputed,
    PromptKept,
    SendAbort,
    SendPrefill,
    SendReserve,
    Unplace,
    Wait,
)
from router.core.generation import SHUTTING_DOWN, RequestListener, Sink, TokenChunk
from router.core.known.pair_health import Pair
from router.core.known.sessions import SessionId
from router.core.placement import Placing
from router.core.policies.query import query_of
from router.core.request_flow import RequestFlow
from router.dispatch.flow_calls import Args, FlowCalls
from router.dispatch.handoff_watch import HandoffWatch
from router.dispatch.node_pool import NodePool
from router.dispatch.placement_recorder import PlacementRecorder
from router.dispatch.placing_recording import PlacingRecording
from router.dispatch.running_choice import EARLY_S, RunningChoice
from router.watch.choice_trace import ChoiceTrace
from router.watch.recent_placements import RecentPlacements
from router.watch.request_watch import RequestWatch
from router.watch.router_metrics import RouterMetrics

log = logging.getLogger("pdserve.router")

CLOSE_TIMEOUT_S = 3.0


class Dispatcher:
    """A `Generator` over the nodes in one placement store, which its owner closes."""

    def __init__(
        self,
        store: PlacementStore,
        placing: Placing,
        *,
        router_id: str,
        registry: CollectorRegistry,
        on_failed: Callable[[], None],
        clock: Clock | None = None,
        keys: Keys | None = None,
        recording: PlacingRecording | None = None,
    ) -> None:
        """Use the nodes that serve one model. `on_failed` is called when a bug ended a task of it.

        A `recording` is that of the same `placing`; its owner closes it.
        """
        self._store = store
        self._clock = clock or MonotonicClock()
        self._metrics = RouterMetrics(registry)
        self._metrics.running.set_function(lambda: len(self._choices))
        membership, chooser = (recording or placing).machines()
        self._chooser = chooser
        self._handoffs = HandoffWatch(chooser, self._clock, self._metrics)
        self._metrics.sessions.set_function(lambda: chooser.num_sessions)
        self._metrics.known_blocks.set_function(lambda: chooser.num_known_blocks)
        self._choices: dict[str, RunningChoice] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._is_closing = False
        self._on_failed = on_failed
        self.has_failed = False
        self._recorder = PlacementRecorder(store, router_id, self._clock, self._metrics)
        self.incarnation = Incarnation(router_id, 0)
        self.model = placing.model
        self.recent_placements = RecentPlacements()
        self.pool = NodePool(
            store,
            membership,
            lease_s=placing.lease_s,
            clock=self._clock,
            metrics=self._metrics,
            num_running=lambda: self.num_running,
            on_outputs=self._on_outputs,
            on_blocks=chooser.on_blocks,
            on_lost=self._on_lost,
            on_suspected=partial(self._tell_all, RequestFlow.on_node_suspected),
            on_trusted=partial(self._tell_all, RequestFlow.on_node_trusted),
            on_decodes=partial(self._tell_all, RequestFlow.on_node_decodes),
            keys=keys,
        )
        self._calls = FlowCalls(
            self.pool,
            chooser,
            self._recorder,
            self._metrics,
            self._clock,
            router_id=router_id,
            feed=self._feed,
        )

    @property
    def num_running(self) -> int:
        """Choices in progress."""
        return len(self._choices)

    def flows(self) -> list[RequestFlow]:
        """Return the flows of these choices, oldest first, to be read only."""
        return [choice.flow for choice in self._choices.values()]

    def avoided_pairs(self) -> frozenset[Pair]:
        """Return the pairs of a prefill and a decode node on which no attempt is placed now."""
        return self._chooser.avoided(self.pool.nodes(), self._clock.now_s())

    async def start(self) -> None:
        """Take an epoch and begin to follow the cluster; does not wait for nodes."""
        try:
            epoch = await self._store.next_epoch(self.incarnation.node_id)
        except PlacementUnavailable as away:
            log.warning("no epoch from the placement store, taking the time: %s", away)
            epoch = time.time_ns() // 1000
        self.incarnation = Incarnation(self.incarnation.node_id, epoch)
        self._tasks = [
            asyncio.create_task(self.pool.run(self.incarnation), name="membership"),
            asyncio.create_task(self._recorder.run(), name="placements"),
        ]
        for task in self._tasks:
            task.add_done_callback(self._on_task_end)

    def add_task(self, task: Coroutine[Any, Any, None], name: str) -> None:
        """Run what serves the cluster beside requests, from `start` until `close`."""
        added = asyncio.create_task(task, name=name)
        added.add_done_callback(self._on_task_end)
        self._tasks.append(added)

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        # Without membership or records a router only degrades: end it, so that it is restarted.
        if not task.cancelled():
            log.error("%s ended by a bug", task.get_name(), exc_info=task.exception())
            self.has_failed = True
            self._on_failed()

    async def close(self) -> None:
        """End every request, tell every node, leave nothing in the store. Idempotent."""
        if self._is_closing:
            return
        self._is_closing = True
        for choice in list(self._choices.values()):
            self._feed(choice, choice.flow.on_failure, Overloaded(SHUTTING_DOWN))
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

    def generate(
        self,
        prompt_token_ids: tuple[int, ...],
        sampling: SamplingParams,
        sink: Sink,
        *,
        deadline_s: float,
        priority: int = 0,
        cache_salt: str = "",
        needs_salt: bool = True,
        session: SessionId = b"",
        is_cut_to_fit: bool = False,
        listener: RequestListener | None = None,
    ) -> Callable[[], None]:
        """Start one answer; see `router.core.generation.Generator`.

        Raises `InvalidRequest` for an empty prompt, and `Overloaded` while the router closes.
        """
        if self._is_closing:
            raise Overloaded(SHUTTING_DOWN)
        if not prompt_token_ids:
            raise InvalidRequest("the prompt is empty: wanted at least 1 token", param="prompt")
        choice_id, now_s = new_id("choice"), self._clock.now_s()
        deadline_at_s = now_s + deadline_s
        prompt = PromptBlocks(prompt_token_ids)
        flow = RequestFlow(
            choice_id,
            prompt,
            sampling,
            deadline_at_s=deadline_at_s,
            priority=priority,
            cache_salt=cache_salt,
            is_cut_to_fit=is_cut_to_fit,
        )
        query = query_of(prompt, sampling, cache_salt, session, needs_salt=needs_salt)
        listener = listener or RequestWatch("", self.model, now_s)
        trace = ChoiceTrace(listener, choice_id, self.recent_placements, now_s)
        choice = RunningChoice(flow, sink, query, deadline_at_s, trace)
        self._choices[choice_id] = choice
        choice.set_deadline(now_s, self._on_deadline)
        self._feed(choice, flow.start, self.pool.membership.suspects)
        return partial(self._on_client_gone, choice)

    # Events.

    def _on_deadline(self, choice: RunningChoice) -> None:
        now_s = self._clock.now_s()
        self._feed(choice, choice.flow.on_time, now_s)
        if not choice.flow.is_done:
            choice.set_deadline(now_s, self._on_deadline)

    def _on_client_gone(self, choice: RunningChoice) -> None:
        self._feed(choice, choice.flow.on_time, self._clock.now_s() + EARLY_S)
        self._feed(choice, choice.flow.on_client_gone)

    def _on_outputs(self, node: Incarnation, outputs: Sequence[RequestOutput]) -> None:
        choices, with_chunks = self._choices, []
        for output in outputs:
            choice = choices.get(output.id.choice_id)
            if choice is None:
                continue
            try:  # `_feed`, without a call for every token
                chunk = choice.flow.next_tokens(node, output)
                if chunk is not None:
                    choice.chunks.append(chunk)
                else:
                    self._handoffs.before_output(choice.flow, node, output)
                    self._perform(choice, choice.flow.on_output(node, output))
            except Exception:
                self._end_by_bug(choice)
            if len(choice.chunks) == 1:
                with_chunks.append(choice)
        for choice in with_chunks:
            self._push(choice)
        for choice in with_chunks:
            self._send(choice)

    def _on_lost(self, node: Incarnation, is_orderly: bool) -> None:
        self._chooser.on_lost(node)
        self._tell_all(RequestFlow.on_node_lost, node, is_orderly)

    def _tell_all(self, event: Callable[..., Sequence[Effect]], *told: object) -> None:
        for choice in list(self._choices.values()):
            self._feed(choice, partial(event, choice.flow, *told))

    def _on_waited(self, choice: RunningChoice) -> None:
        self._feed(choice, choice.flow.on_waited)

    def _feed(
        self, choice: RunningChoice, event: Callable[[*Args], Sequence[Effect]], *args: *Args
    ) -> None:
        """Apply one event. A bug ends this choice, and nothing else."""
        try:
            self._perform(choice, event(*args))
        except Exception:
            self._end_by_bug(choice)

    def _end_by_bug(self, choice: RunningChoice) -> None:
        attempt = choice.flow.attempt
        log.exception("%s ended by a bug", attempt, extra=log_fields(attempt))
        error = InternalError(f"an internal error ended {attempt.choice_id}")
        try:
            self._perform(choice, choice.flow.on_failure(error))
        except Exception:
            log.exception("%s could not be ended in order", attempt, extra=log_fields(attempt))
        # The flow may be over by an effect that was never performed: the sink still needs an end.
        self._fail(choice, error)

    # Effects.

    def _perform(self, choice: RunningChoice, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case TokenChunk():
                    choice.take(effect, self._clock)
                case Choose():  # the last effect of its event
                    self._perform(choice, self._calls.choose(choice, effect))
                case Wait():
                    choice.wait(effect.wait_s, self._on_waited)
                case SendReserve():
                    self._calls.reserve(choice, effect)
                case SendPrefill():
                    self._calls.prefill(choice, effect)
                case SendAbort():
                    self._calls.abort(effect)
                case Accepted():
                    choice.sink.on_accepted()
                case PromptKept() | PromptComputed() | LegClosed():
                    self._calls.count(choice, effect)
                case PlaceRecord():
                    self._calls.place(choice, effect)
                case Unplace():
                    self._calls.unplace(effect.attempt)
                case Finish():
                    self._finish(choice, effect.reason)
                case Fail():
                    self._fail(choice, effect.error)

    def _deliver(self, choice: RunningChoice) -> None:
        """Push the chunks that came together, and let them be sent."""
        if choice.chunks:
            self._push(choice)
            self._send(choice)

    def _push(self, choice: RunningChoice) -> None:
        chunks, choice.chunks = choice.chunks, []
        if chunks:
            try:
                choice.sink.on_chunks(chunks)
            except Exception:
                self._end_by_bug(choice)

    def _send(self, choice: RunningChoice) -> None:
        try:
            choice.sink.send_now()
        except Exception:
            self._end_by_bug(choice)

    def _finish(self, choice: RunningChoice, reason: FinishReason) -> None:
        if reason is FinishReason.ABORT:
            choice.chunks.clear()
        self._deliver(choice)
        self._end(choice, reason.value)

    def _fail(self, choice: RunningChoice, error: PdserveError) -> None:
        self._deliver(choice)
        if choice.flow.attempt.choice_id in self._choices:  # a bug in `_deliver` ends it
            try:
                choice.sink.on_failed(error)
            finally:
                self._end(choice, error.code)

    def _end(self, choice: RunningChoice, outcome: str) -> None:
        """Forget the choice, once."""
        if self._choices.pop(choice.flow.attempt.choice_id, None) is None:
            return
        choice.cancel_timers()
        self._metrics.requests(outcome).inc()
        if choice.flow.attempt.attempt > 1:
            self._metrics.retries.inc(choice.flow.attempt.attempt - 1)
        flow = choice.flow
        choice.trace.on_end(
            outcome, flow.answering_attempt, flow.num_output_tokens, self._clock.now_s()
        )
