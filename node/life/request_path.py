"""The path of requests through a node: control service, inbox, step thread, token streams."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace

from common.files.cache_folder import full_path
from common.ids import Incarnation, new_lease_token
from common.nodes import NodeLoad
from common.settings.config import Config
from node.control.block_reports import tiers_of
from node.control.control_service import ControlService
from node.control.drain import NodeDrain
from node.control.output_streams import OutputStreams
from node.control.role import NodeRole
from node.control.router_calls import IgnoredPriorities, Replies
from node.flow.inbox import Inbox
from node.flow.messages import NodeStatistics, RouterGone
from node.flow.perform_effects import NodeEffects
from node.flow.step_progress import StepProgress, expected_step_s
from node.life.connector_watch import wait_for_hang
from node.life.make_scheduler import make_scheduler, max_chunk_tokens_of, plans_ahead
from node.life.node_parts import LoadedModel, NodeConnector, NodeParts
from node.life.prefix_disk import disk_index_of, start_disk
from node.life.self_description import told_uptime_s
from node.life.step_recording import StepRecording, record_steps
from node.life.step_thread import StepThread
from node.watch.attempt_watch import AttemptWatch
from node.watch.kv_metrics import kv_links

WARM_WISH_S = 30.0
"""A router that is met later is not asked by which node this one warms itself."""


class RequestPath:
    """The parts of a node that a request passes, connected. Belongs to the event loop.

    `service` takes the calls; `start_step_thread` runs the loop that computes the answers;
    `progress` tells whether that loop makes progress.
    """

    def __init__(
        self,
        config: Config,
        parts: NodeParts,
        incarnation: Incarnation,
        model: LoadedModel,
        connector: NodeConnector,
        inbox: Inbox,
        drain: NodeDrain,
        role: NodeRole,
    ) -> None:
        self._loop = loop = asyncio.get_running_loop()
        self._model = model
        self._connector = connector
        self._inbox = inbox
        self._drain = drain
        self._clock = parts.clock
        self._ready_at_s = parts.clock.now_s()
        largest_s = expected_step_s(model.step_costs, max_chunk_tokens_of(config))
        self.progress = StepProgress(largest_s)
        scheduler = make_scheduler(config, model, disk_index_of(config, model))
        self._disk = start_disk(config, model, parts.kv_secret)
        self._tiers = tiers_of(scheduler)
        for told in self._tiers.values():
            told.keep_news()
        self._is_async = plans_ahead(config, model)
        self._recording: StepRecording | None = None
        draw_lease_token = new_lease_token
        if config.tracing.record:
            folder = full_path(config.tracing.record)
            self._recording = record_steps(folder, config, model, incarnation, connector)
            draw_lease_token = self._recording.drawing(new_lease_token)
        self._flow = parts.make_flow(scheduler, model, incarnation, connector, draw_lease_token)
        self._published = self._flow.snapshot()
        self._streams = OutputStreams(loop, lambda router: inbox.put(RouterGone(router)))
        self._streams.warm_from = config.handoff.warm_from
        loop.call_later(WARM_WISH_S, self._streams.start_is_over)
        replies = Replies(loop)
        self.service = ControlService(
            incarnation=incarnation,
            role=role,
            inbox=inbox,
            replies=replies,
            streams=self._streams,
            clock=parts.clock,
            drain=drain,
            progress=self.progress,
            prepare_grammar=model.prepare_grammar,
            priorities=IgnoredPriorities(are_enabled=config.scheduling.enable_priority_scheduling),
        )
        self._effects = NodeEffects(
            connector,
            replies,
            self._streams,
            model,
            on_drained=drain.on_drained,
            on_copied=inbox.put,
            disk=self._disk,
        )
        self._watch = AttemptWatch(self._flow.attempts, parts.tracing, loop, parts.clock)

    def statistics(self) -> NodeStatistics:
        """Return what the step thread published last."""
        return self._published.statistics

    def load(self) -> NodeLoad:
        """Return the load for the next heartbeat."""
        kv = self._connector.statistics()
        return replace(
            self._published.load,
            kv_links=kv_links(kv),
            kv_unreachable=kv.unreachable,
            is_draining=self._drain.is_on,
            uptime_s=told_uptime_s(self._clock.now_s() - self._ready_at_s),
        )

    @property
    def refusals(self) -> Mapping[str, int]:
        """Reservations and prompts refused, by the error's code."""
        return self.service.refusals

    def start_step_thread(self, on_crash: Callable[[], object]) -> StepThread:
        """Start the step thread; `on_crash` is called on the event loop if it dies of an error."""
        return StepThread(
            inbox=self._inbox,
            flow=self._recording.of_flow(self._flow) if self._recording else self._flow,
            runner=self._model,
            perform=self._effects.perform_effect,
            publish=self._publish,
            flush=self._flush,
            on_crash=lambda: self._loop.call_soon_threadsafe(on_crash),
            clock=self._clock,
            is_async=self._is_async,
        )

    async def wait_for_hung_connector(self) -> None:
        """Return when the KV connector's thread hangs."""
        await wait_for_hang(self._connector)

    def end_streams(self, fault: str = "") -> None:
        """End every token stream after it has sent its outputs, with the node's `fault` if any.

        The step thread has already stopped.
        """
        self._streams.stop(fault)

    def close_recording(self) -> None:
        """End the recording, if there is one. The step thread has stopped before."""
        if self._recording is not None:
            self._recording.close()

    async def close_disk(self, grace_s: float) -> None:
        """Leave the files to the next process. The step thread has stopped before."""
        if self._disk is not None:
            await asyncio.to_thread(self._disk.close, grace_s)

    def _publish(self) -> None:
        """Replace, on the step thread, what other threads see of the node."""
        self._published = self._flow.snapshot()

    def _flush(self) -> None:
        """End a turn of the step thread: tokens leave first, then ended attempts are reported."""
        self._streams.add_news({tier: told.take_news() for tier, told in self._tiers.items()})
        self._streams.flush()
        self._watch.look()
