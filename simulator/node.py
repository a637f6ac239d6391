"""One node: the real step loop, flow and scheduler, on modelled steps and a modelled network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from common.errors import Draining, Overloaded
from common.ids import Incarnation
from common.kv.kv_layout import KVLayout
from common.request import RequestOutput
from common.settings.config import Config
from engine.core.blocks.cache_copy import CacheCopy, CopyUnderWay
from engine.core.runner_contract import OnLayer, OnQueued, RunnerResult
from engine.core.scheduler import Scheduler
from engine.core.step.step_batch import StepBatch
from engine.step_loop import StepLoop
from node.control.block_reports import News, tiers_of
from node.flow.flow_limits import FlowLimits
from node.flow.inbox import Inbox
from node.flow.landing_place import LandingPlace, Tickets
from node.flow.messages import (
    Answer,
    AskBlocks,
    CallRefused,
    Effect,
    Message,
    OfferBlocks,
    RefusePull,
    SendOutput,
    Submit,
)
from node.flow.node_flow import NodeFlow
from node.flow.perform_effects import BlockDisk, NodeEffects
from node.flow.pulls.hand_over import HandOver
from node.flow.pulls.pull_cost import PullCost
from node.life.make_scheduler import SchedulableModel
from simulator.execution import ModelledExecution
from simulator.kv_network import ModelledNetwork
from simulator.timeline import Timeline


@dataclass(slots=True)
class NodeSaid:
    """One message of a node to its router: answers come before outputs.

    `step_ends_s` are the times at which the tokens of each output of several tokens were drawn.
    `news` are blocks that entered (true) or left a tier.
    """

    node: Incarnation
    answers: list[tuple[int, Answer]] = field(default_factory=list)
    outputs: list[RequestOutput] = field(default_factory=list)
    step_ends_s: Sequence[float] = ()
    pulls: list[AskBlocks] = field(default_factory=list)
    refused_pulls: list[RefusePull] = field(default_factory=list)
    """Its pulls of other nodes' caches."""
    offers: list[OfferBlocks] = field(default_factory=list)
    """Its cached blocks that other nodes may pull."""
    warm_from: str = ""
    """The node whose blocks it pulls after its start; empty: none."""
    news: News = field(default_factory=dict)


class SimulatedNode:
    """Reads its messages, and runs turns of its loop when one is due.

    `tell` is called with the messages of the node, once or twice for each turn.
    """

    needs_staging = False

    def __init__(
        self,
        me: Incarnation,
        timeline: Timeline,
        flow: NodeFlow,
        execution: ModelledExecution,
        network: ModelledNetwork,
        layout: KVLayout,
        *,
        max_queued_requests: int,
        tell: Callable[[NodeSaid], object],
        disk: BlockDisk | None = None,
    ) -> None:
        self.me = me
        self.flow, self.scheduler, self.execution = flow, flow.scheduler, execution
        self.layout = layout
        execution.on_moved = lambda: self._turn_at(execution.ends_at_s)
        self._timeline = timeline
        self._tell = tell
        self._said = NodeSaid(self.me)
        self._turn_at_s = -1.0
        self.inbox = Inbox(max_requests=max_queued_requests)
        self.tiers = tiers_of(self.scheduler)
        for told in self.tiers.values():
            told.keep_news()
        self._effects = NodeEffects(
            network.join(self.me, self.put),
            self,
            self,
            self,
            on_drained=self.on_drained,
            on_copied=self.put,
            disk=disk,
        )
        self.loop: StepLoop[Message, Effect] = StepLoop(
            inbox=self.inbox,
            flow=flow,
            runner=self,
            perform=self.perform,
            flush=self._flush,
            publish=self.publish,
            clock=timeline,
            execution=execution,
        )

    def put(self, message: Message) -> None:
        """Take a message: it is read when the step that runs has ended, or at once."""
        try:
            self.inbox.put(message)
        except (Draining, Overloaded) as error:
            assert isinstance(message, Submit), "only requests are refused"
            refused = NodeSaid(self.me, [(message.reply_to, CallRefused(error))])
            self._tell(refused)
            return
        if not self.execution.is_running:
            self._turn_at(self._timeline.present_s)
        elif self.execution.interrupt():
            self._turn_at(self.execution.ends_at_s)

    def turn(self) -> bool:
        """Run one turn of the loop; return whether it changed something."""
        return self.loop.turn()

    def is_empty(self) -> bool:
        """Return whether the node holds no attempt, no block, no seat and no message."""
        scheduler = self.scheduler
        held = scheduler.running, scheduler.waiting, scheduler.receiving, scheduler.exporting
        has_all = scheduler.pool.num_available == scheduler.pool.num_blocks
        return self.flow.is_empty and has_all and not any(map(len, held))

    # Called by the loop and for effects.

    def perform(self, effect: Effect) -> None:
        """Perform an effect."""
        self._effects.perform_effect(effect)

    def publish(self) -> None:
        """Do nothing: there are no metrics."""

    def resolve(self, reply_to: int, answer: Answer) -> None:
        """Answer a call."""
        self._said.answers.append((reply_to, answer))

    def add(self, sent: SendOutput) -> None:
        """Send an output."""
        self._said.outputs.append(sent.output)

    def ask(self, wanted: AskBlocks) -> None:
        """Send a pull of another node's cached blocks."""
        self._said.pulls.append(wanted)

    def refuse(self, refused: RefusePull) -> None:
        """Refuse the pull of another node."""
        self._said.refused_pulls.append(refused)

    def offer(self, offered: OfferBlocks) -> None:
        """Raise `RuntimeError`: no simulated node leaves."""
        raise RuntimeError("a node that does not leave offers its blocks")

    def on_drained(self) -> None:
        """Raise `RuntimeError`: no simulated node leaves."""
        raise RuntimeError("a node that does not leave has drained")

    def execute(
        self,
        batch: StepBatch,
        on_layer: OnLayer | None = None,
        on_queued: OnQueued | None = None,
    ) -> RunnerResult:
        """Raise `RuntimeError`: steps are executed by `ModelledExecution`."""
        raise RuntimeError("a simulated node has no runner")

    def swap_out(self, block_ids: Sequence[int], host_block_ids: Sequence[int]) -> None:
        """Copy blocks to the host, in the time of the next step."""
        self.execution.copy(len(block_ids))

    def swap_in(self, host_block_ids: Sequence[int], block_ids: Sequence[int]) -> None:
        """Copy blocks back from the host, in the time of the next step."""
        self.execution.copy(len(block_ids))

    def begin_copy(self, copy: CacheCopy) -> CopyUnderWay:
        """Raise `RuntimeError`: steps read the memory that KV lands in."""
        raise RuntimeError("a simulated node stages nothing")

    # Inside.

    def _turn_at(self, at_s: float) -> None:
        """Run a turn at this time, instead of any later one."""
        if at_s != self._turn_at_s:
            self._turn_at_s = at_s
            self._timeline.at(at_s, partial(self._turn, at_s), last=True)

    def _turn(self, planned_for_s: float) -> None:
        if planned_for_s != self._turn_at_s:
            return  # another turn was planned since
        self._turn_at_s = -1.0
        if self.execution.is_running and not self.inbox.has_messages and self.execution.go_on():
            self._flush()
            self._turn_at(self.execution.ends_at_s)
            return
        is_busy = self.turn()
        if self.execution.is_running:
            self._turn_at(self.execution.ends_at_s)
        elif is_busy and self._has_more():
            self._turn_at(self._timeline.present_s)
        elif self._turn_at_s < 0:  # otherwise a message came in this turn, which is read next
            due_s = self.flow.next_deadline_s()
            if due_s is not None and due_s < float("inf"):
                self._turn_at(max(due_s, self._timeline.present_s))

    def _has_more(self) -> bool:
        scheduler = self.scheduler
        return bool(scheduler.waiting or scheduler.running or self.flow.pulls.wait_for_room)

    def take_news(self) -> News:
        """Return the blocks that entered and left each tier that changed since the last call."""
        news = {}
        for tier, told in self.tiers.items():
            if changed := told.take_news():
                news[tier] = changed
        return news

    def _flush(self) -> None:
        said = self._said
        said.news = self.take_news()
        is_asking = said.pulls or said.refused_pulls or said.offers
        if said.answers or said.outputs or is_asking or said.news:
            said.step_ends_s = self.execution.ended_s
            self._said = NodeSaid(self.me)
            self._tell(said)


def flow_of(
    config: Config,
    model: SchedulableModel,
    scheduler: Scheduler,
    me: Incarnation,
    *,
    vocab_size: int,
    new_lease_token: Callable[[], int],
    pull_cost: PullCost,
    disk_cost: PullCost | None = None,
    needs_staging: bool = False,
    has_grammars: bool = False,
    hand_over: HandOver | None = None,
) -> NodeFlow:
    """Return the flow of the node `me`, whose KV is reached by its name."""
    limits = FlowLimits(
        vocab_size=vocab_size,
        max_model_len=model.max_model_len,
        max_queued_requests=config.handoff.max_queued_requests,
        sheds=config.scheduling.shed,
        has_grammars=has_grammars,
    )
    place = LandingPlace(
        node=me,
        kv_endpoint=me.node_id,
        fingerprint=model.layout.fingerprint,
        kv_description=model.layout.description,
        layer_bytes=tuple(one.num_bytes for one in model.layout.layers),
        lease_s=config.handoff.lease_s,
    )
    return NodeFlow(
        scheduler,
        limits,
        tickets=Tickets(place, new_lease_token),
        needs_staging=needs_staging,
        local_prefill_threshold=config.handoff.local_prefill_threshold,
        pull_cost=pull_cost,
        disk_cost=disk_cost,
        hand_over=hand_over,
    )
