"""A node in one life: the simulator's node on real blocks, with a stream to each router."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial

from common.errors import InternalError
from common.grammar import Grammar
from common.ids import Incarnation
from common.kv.kv_layout import KVLayout
from common.nodes import NodeRecord, Role
from common.settings.config import Config
from engine.core.blocks.cache_copy import CacheCopy, CopyUnderWay
from engine.core.blocks.disk_index import FILE_SYSTEM_BLOCK_BYTES, DiskIndex
from engine.core.runner_contract import StepCosts
from engine.core.scheduler import Scheduler
from kv_transfer.contract import OnEvent
from kv_transfer.shared.limits import Limits
from node.control.block_reports import CachedBlocks
from node.control.output_streams import MOST_OFFERS
from node.flow.messages import (
    Answer,
    AskBlocks,
    CallRefused,
    CheckCopies,
    Compiled,
    Effect,
    Message,
    OfferBlocks,
    RefusePull,
    SendOutput,
    Submit,
)
from node.flow.pulls.hand_over import HandOver
from node.flow.pulls.pull_cost import PullCost
from node.flow.step_progress import expected_step_s
from node.life.make_scheduler import make_scheduler
from node.life.possible_roles import NODE_ROLES, refused_roles
from node.life.request_path import WARM_WISH_S
from simulator.faults.contents import NUM_LAYERS, VOCAB_SIZE, KVMemory
from simulator.faults.demand.grammars import Compilations
from simulator.faults.demand.waiting import Passes, check_refusal, check_waiting
from simulator.faults.hosts import ProcessClock
from simulator.faults.kv.end import KVEnd
from simulator.faults.kv.wires import KVWires
from simulator.faults.node.copies import LateCopies
from simulator.faults.node.disk import Disk, NodeDisk
from simulator.faults.node.hanging import HungSteps
from simulator.faults.node.life import LifeStore, NodeLife
from simulator.faults.node.steps import TOKEN_S, ComputedExecution
from simulator.faults.shape import MODEL, Shape, config_of, is_on_device
from simulator.faults.streams import NodeLink
from simulator.node import NodeSaid, SimulatedNode, flow_of
from simulator.profile import ModelledFacts

_PIECES_PER_WINDOW = 12
_BLOCKS_PER_SLAB = 6
_IDLE_SHARE = 3
"""Connections without a transfer are closed sooner than really, for histories are short."""
COMPUTE_S = 20e-3
"""Seconds to compute a token of a prompt, as pulls expect: so long that pulls pay."""


def layout_of(block_size: int, revision: int = 0) -> KVLayout:
    """Return the layout of blocks whose slots hold a number, with a fingerprint per revision."""
    return KVLayout(
        model_digest=f"{MODEL}-{revision}" if revision else MODEL,
        num_layers=NUM_LAYERS,
        num_kv_heads=1,
        head_dim=4,
        block_size=block_size,
        dtype="float16",
    )


def facts_of(shape: Shape, revision: int = 0) -> ModelledFacts:
    """Return the facts of the model that a scheduler requires."""
    return ModelledFacts(
        layout=layout_of(shape.block_size, revision),
        num_blocks=shape.num_blocks,
        max_model_len=(shape.num_blocks - 1) * shape.block_size,
        pairs_per_token=64,
        step_costs=StepCosts((1, 65), (shape.step_s, shape.step_s + 64 * TOKEN_S)),
        num_host_blocks=shape.num_host_blocks,
        needs_staging=is_on_device(shape),
        can_go_on=shape.is_on_card,
    )


@dataclass(slots=True)
class _Wires:
    """Stands in for a `ModelledNetwork`: makes the connector of the node that joins."""

    wires: KVWires
    clock: ProcessClock
    memory: KVMemory
    scheduler: Scheduler
    layout: KVLayout
    shape: Shape
    end: list[KVEnd] = field(default_factory=list)

    def join(self, node: Incarnation, on_event: OnEvent) -> KVEnd:
        pool, layout = self.scheduler.pool, self.layout
        window = _PIECES_PER_WINDOW * 2 * layout.piece_bytes
        limits = Limits(
            window_bytes=window,
            max_frame_bytes=window // 2,
            idle_s=self.shape.kv_lease_s / _IDLE_SHARE,
            max_channels=self.shape.num_kv_lanes,
        )
        end = KVEnd(
            node,
            self.clock,
            self.wires,
            layout,
            self.memory,
            pool,
            limits,
            on_event,
            blocks_per_slab=_BLOCKS_PER_SLAB,
        )
        self.end.append(end)
        return end


def _memory_of(shape: Shape, revision: int) -> KVMemory:
    return KVMemory(
        shape.num_blocks,
        shape.num_host_blocks,
        shape.block_size,
        is_staged=shape.is_staged,
        revision=revision,
    )


def _moved_kv_cost() -> PullCost:
    """Return a new rule of when moving KV pays; each use corrects its own."""
    return PullCost(1.0, lambda num_tokens: num_tokens * COMPUTE_S)


class FaultyNode(SimulatedNode):
    """A node that can be stopped at any time.

    `on_turn` is called after each turn that changed something. Many turns only look whether a copy
    has ended or a time has passed: they change nothing that `on_turn` checks.

    `name` is that of its folder on `disk`. Nodes of one `revision` can use each other's KV.
    """

    def __init__(
        self,
        me: Incarnation,
        shape: Shape,
        role: Role,
        clock: ProcessClock,
        wires: KVWires,
        new_lease_token: Callable[[], int],
        store: LifeStore,
        disk: Disk,
        *,
        name: str,
        revision: int,
        on_turn: Callable[[FaultyNode], object],
    ) -> None:
        nature = nature_of(shape, role, revision)
        config, facts = nature.config, nature.facts
        index = None
        if shape.num_disk_blocks:
            index = DiskIndex(shape.num_disk_blocks * FILE_SYSTEM_BLOCK_BYTES, 1)
        scheduler = make_scheduler(config, facts, index)
        self.needs_staging = is_on_device(shape)
        flow = flow_of(
            config,
            facts,
            scheduler,
            me,
            vocab_size=VOCAB_SIZE,
            new_lease_token=new_lease_token,
            pull_cost=_moved_kv_cost(),
            disk_cost=None if index is None else _moved_kv_cost(),
            needs_staging=shape.is_staged,
            has_grammars=True,
            hand_over=HandOver(scheduler.prefix_transfers),
        )
        self.shape, self.clock, self._compilations = shape, clock, Compilations()
        self.memory = _memory_of(shape, revision)
        joining = _Wires(wires, clock, self.memory, scheduler, facts.layout, shape)
        most_tokens = scheduler.limits.max_num_batched_tokens
        self.steps = execution = ComputedExecution(
            clock, self.memory, shape.step_s, most_tokens, plans_ahead=is_on_device(shape)
        )
        super().__init__(
            me,
            clock,  # type: ignore[arg-type]
            flow,
            execution,  # type: ignore[arg-type]
            joining,  # type: ignore[arg-type]
            facts.layout,
            max_queued_requests=config.handoff.max_queued_requests,
            tell=self._say,
            disk=None if index is None else NodeDisk(disk, name, revision, clock, self.memory),
        )
        self.kv, self.copies = joining.end[0], LateCopies(clock, self.memory, shape.step_s)
        self._hung = HungSteps(clock, execution, expected_step_s(facts.step_costs, most_tokens))
        self.cached = CachedBlocks()
        self.streams: dict[Incarnation, NodeLink] = {}
        """The open streams by router, as far as this end knows."""
        self._said_to: dict[Incarnation, NodeSaid] = {}
        self.warm_from = config.handoff.warm_from
        clock.after(WARM_WISH_S, self._start_is_over)
        self.is_death_known = True
        self.restarts_in_s = 0.0
        """Seconds before a node that has drained starts again; 0: it does not."""
        self._on_turn, self._passes = on_turn, Passes()
        self._is_still = False
        """Whether the present turn has changed nothing."""
        self._checked: tuple[int, ...] = ()
        """The counts of the node when it was checked last."""
        self.life = NodeLife(self, nature.record_of(me), role, nature.refused, store)

    @property
    def role(self) -> Role:
        """The role that the node has now."""
        return self.life.role

    def put(self, message: Message) -> None:
        """Take a message. A grammar is compiled beside the steps, and its request waits for it."""
        grammar = message.request.sampling.grammar if isinstance(message, Submit) else None
        span_s = self._compilations.begin(grammar)
        if not isinstance(message, Submit) or grammar is None or span_s is None:
            super().put(message)
            return
        super().put(replace(message, is_compiling=True))
        self.clock.after(span_s, partial(self._on_compiled, message, grammar))

    @property
    def stuck_s(self) -> float:
        """How long its step has lasted, if it says that it makes no progress; 0 otherwise."""
        return self._hung.stuck_s

    def hang(self, span_s: float) -> None:
        """Delay the end of the step that runs, or of the next one, by `span_s`."""
        self._hung.hang(span_s)
        if self.execution.is_running:
            self._turn_at(self.execution.ends_at_s)

    def turn(self) -> bool:
        """Run one turn of the loop; return whether it changed something."""
        has_messages = self.inbox.has_messages
        is_busy = super().turn()
        self._is_still = self._is_still and not (has_messages or is_busy)
        return is_busy

    # What the loop and the effects call.

    def perform(self, effect: Effect) -> None:
        """Perform an effect. To look whether copies have ended changes nothing by itself."""
        self._is_still = self._is_still and isinstance(effect, CheckCopies)
        super().perform(effect)

    def resolve(self, reply_to: int, answer: Answer) -> None:
        """Answer a call; the stream of one that is forgotten has ended."""
        if isinstance(answer, CallRefused):
            error, num_waiting = answer.error, len(self.scheduler.waiting)
            check_refusal(self.shape, error, is_empty=self.is_empty(), num_waiting=num_waiting)
        self._answer(reply_to, answer)

    def _answer(self, reply_to: int, answer: Answer) -> None:
        for router, link in self.streams.items():
            if link.end_call(reply_to):
                self._for(router).answers.append((reply_to, answer))

    def add(self, sent: SendOutput) -> None:
        """Send an output, if its router listens."""
        self.life.check_output(sent.output)
        if sent.router in self.streams:
            self._for(sent.router).outputs.append(sent.output)

    def ask(self, wanted: AskBlocks) -> None:
        """Send a pull of another node's cached blocks."""
        if wanted.router in self.streams:
            self._for(wanted.router).pulls.append(wanted)

    def refuse(self, refused: RefusePull) -> None:
        """Refuse the pull of another node."""
        if refused.router in self.streams:
            self._for(refused.router).refused_pulls.append(refused)

    def offer(self, offered: OfferBlocks) -> None:
        """Offer cached blocks, through the router of a new node or any, if there is one."""
        router = next(iter(self.streams), None)
        if offered.new_node is not None:
            router = offered.new_node.router
        if router in self.streams and len(self._for(router).offers) < MOST_OFFERS:
            self._for(router).offers.append(offered)

    def on_drained(self) -> None:
        """Leave the cluster: no request, transfer or block is left here."""
        self.life.on_drained()

    def swap_out(self, block_ids: Sequence[int], host_block_ids: Sequence[int]) -> None:
        """Copy blocks to the host."""
        self.memory.swap_out(block_ids, host_block_ids)

    def swap_in(self, host_block_ids: Sequence[int], block_ids: Sequence[int]) -> None:
        """Copy blocks back from the host."""
        self.memory.swap_in(host_block_ids, block_ids)

    def begin_copy(self, copy: CacheCopy) -> CopyUnderWay:
        """Begin a copy beside the steps."""
        return self.copies.begin(copy)

    def wake(self) -> None:
        """Look at the time, which has jumped."""
        self.kv.wake()
        if not self.execution.is_running:
            self._turn_at(self.clock.now_s())

    def all_cached(self) -> NodeSaid:
        """Return the first message of a stream: all blocks that can be found here."""
        return NodeSaid(self.me, news=self.cached.all(), warm_from=self.warm_from)

    # Inside.

    def _on_compiled(self, message: Submit, grammar: Grammar) -> None:
        error = self._compilations.end(grammar)
        self.put(Compiled(message.request.id, message.reply_to, error))

    def _start_is_over(self) -> None:
        self.warm_from = ""

    def _for(self, router: Incarnation) -> NodeSaid:
        """Return the next message to a router, to which answers and outputs are added."""
        said = self._said_to.get(router)
        if said is None:
            said = self._said_to[router] = NodeSaid(self.me)
        return said

    def _say(self, said: NodeSaid) -> None:
        """Answer calls that were not even read: too many others were not read yet."""
        for reply_to, answer in said.answers:
            if not self.inbox.has_messages:
                raise InternalError(f"{self.me} has read all, and refuses a request as too many")
            self._answer(reply_to, answer)
        self._flush()

    def _flush(self) -> None:
        news = self.take_news()
        if news:
            self.cached.take(news)
            for router in self.streams:
                self._for(router).news = news
        if self._said_to:
            told, self._said_to = self._said_to, {}
            for router, said in told.items():
                if router in self.streams:
                    self.streams[router].say(said)

    def _turn(self, planned_for_s: float) -> None:
        self._is_still = True
        super()._turn(planned_for_s)
        scheduler = self.scheduler
        counted = len(scheduler.waiting), scheduler.pool.num_available, scheduler.host_pool.num_free
        if not self._is_still or counted != self._checked:
            self._checked = counted
            check_waiting(self.shape, self.flow.attempts.all())
            if not self.shape.has_priorities:
                seated = [*scheduler.running, *scheduler.receiving.values()]
                self._passes.take(scheduler.waiting, seated)
            self._on_turn(self)


@dataclass(frozen=True, slots=True)
class Nature:
    """Settings and facts that all nodes of one cluster and role share, in all their lives."""

    config: Config
    facts: ModelledFacts
    refused: Mapping[Role, str]
    """The roles that they cannot be given, each with why."""

    def record_of(self, me: Incarnation) -> NodeRecord:
        """Return the record of a node in the store."""
        config, facts = self.config, self.facts
        return NodeRecord(
            node_id=me.node_id,
            epoch=me.epoch,
            role=config.role,
            control_address=f"{me.node_id}:1",
            model=MODEL,
            fingerprint=facts.layout.fingerprint,
            block_size=config.engine.block_size,
            num_blocks=facts.num_blocks,
            max_num_seqs=config.engine.max_num_seqs,
            max_model_len=facts.max_model_len,
            sends_blocks=True,
            has_token_rules=True,
            has_grammars=True,
            has_prompt_logprobs=True,
            num_host_blocks=facts.num_host_blocks,
            roles=tuple(one for one in NODE_ROLES if one not in self.refused),
        )


@lru_cache(maxsize=64)
def nature_of(shape: Shape, role: Role, revision: int = 0) -> Nature:
    """Return the nature of nodes, cached: nodes start often, and rules about settings take long."""
    config = config_of(shape, role)
    return Nature(config, facts_of(shape, revision), refused_roles(config))
