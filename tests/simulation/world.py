"""A prefill and a decode node, or a mixed one, on a manual clock, joined by a fake KV network.

Nodes are real flows in real step loops; what is fake is the runner, the connector, the router and
time. Nothing happens unless the test says so: messages wait in `to_nodes` and `to_router`, frames
in `network.frames`. After every turn all books are checked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from common.errors import Draining, Overloaded
from common.ids import Incarnation
from common.kv.blocks import BlockHash
from common.kv.token_budget import num_speculative_tokens
from common.request import GenerationRequest, RequestOutput
from common.settings.config import SchedulingConfig, SpeculationConfig
from engine.core.blocks.block_pool import BlockUse
from engine.core.blocks.disk_index import DiskIndex, bytes_taken
from engine.core.planner_contract import StepLimits
from engine.core.runner_contract import OnLayer, OnQueued, Runner
from engine.core.scheduler import Scheduler
from engine.core.sequences.status import SequenceStatus
from engine.core.speculation.speculation import make_speculation
from engine.prefix_disk.block_file import HEADER_BYTES
from engine.prefix_disk.block_folder import BlockFolder
from engine.step_loop import StepLoop
from node.flow.flow_limits import FlowLimits
from node.flow.inbox import Inbox
from node.flow.landing_place import LandingPlace, Tickets
from node.flow.messages import (
    Answer,
    AskBlocks,
    CallRefused,
    Effect,
    FetchBlocks,
    Message,
    OfferBlocks,
    PullRefused,
    RefusePull,
    SendBlocks,
    SendOutput,
    Submit,
)
from node.flow.node_flow import NodeFlow
from node.flow.perform_effects import NodeEffects
from node.flow.pulls.hand_over import HandOver
from node.flow.pulls.pull_cost import PullCost
from router.dispatch.between_nodes import PassedPulls
from tests.simulation.scripted_router import Asked, ScriptedRouter
from tests.support.clocks.manual_clock import ManualClock
from tests.support.disk.faulty_files import FaultyCalls
from tests.support.disk.played_disk import PlayedDisk
from tests.support.engine.build import check_books, check_idle, make_request
from tests.support.engine.hash_runner import EOS_TOKEN_ID, VOCAB_SIZE, HashRunner, expected_tokens
from tests.support.kv.fake_kv_network import FakeConnector, FakeKVNetwork

BLOCK_SIZE = 4
EVERY_PROMPT = 1 << 30
"""A threshold below which every prompt is."""
LEASE_S = 10.0
PREFILL, DECODE, ROUTER = Incarnation("p", 1), Incarnation("d", 1), Incarnation("r", 1)


@dataclass(frozen=True, slots=True)
class ReplyToRouter:
    """The answer to a call, on its way."""

    node: Incarnation
    reply_to: int
    answer: Answer


@dataclass(frozen=True, slots=True)
class OutputToRouter:
    """One output in a node's stream, on its way; streams keep their order."""

    node: Incarnation
    output: RequestOutput


@dataclass(frozen=True, slots=True)
class AskToRouter:
    """What a node wants of another one's cache, on its way."""

    node: Incarnation
    wanted: AskBlocks


ToRouter = ReplyToRouter | OutputToRouter | AskToRouter | RefusePull


class Node:
    """One simulated node: a flow in a step loop. `fail_next_step` breaks the runner once,
    `fail_after_layer` does so in the middle of a step, when that layer is computed and told of."""

    def __init__(self, world: World, me: Incarnation, size: NodeSize, make_flow: MakeFlow) -> None:
        self.me = me
        self.world = world
        self.inbox = Inbox(max_requests=1000)
        self.runner = HashRunner(
            num_blocks=size.num_blocks,
            block_size=BLOCK_SIZE,
            num_host_blocks=size.num_host_blocks,
        )
        self.runner.goes_on = world.goes_on
        self.scheduler = size.make_scheduler(self.runner)
        self.connector = world.network.join(
            me, self.runner.kv_bytes, self.inbox.put, self.runner.host_kv
        )
        self.flow = make_flow(self.scheduler, size)
        self.publish: Callable[[], None] = lambda: None
        self.fail_next_step = False
        self.fail_after_layer: int | None = None
        answers: Any = self
        self.num_drained = 0
        self.calls = FaultyCalls()
        self.disk: PlayedDisk | None = None
        if size.disk_path is not None:
            fingerprint, host_kv = self.runner.layout.fingerprint, self.runner.host_kv
            self.disk = PlayedDisk(BlockFolder(size.disk_path, fingerprint, host_kv, self.calls))
        effects = NodeEffects(
            self.connector,
            answers,
            answers,
            self.runner,
            on_drained=self._on_drained,
            on_copied=self.inbox.put,
            disk=self.disk,
        )
        self.loop: StepLoop[Message, Effect] = StepLoop(
            inbox=self.inbox,
            flow=self.flow,
            runner=self,
            perform=effects.perform_effect,
            publish=lambda: self.publish(),
            flush=lambda: None,
            clock=world.clock,
            is_async=world.is_async,
        )

    # Called by the effects and the loop.

    def _on_drained(self) -> None:
        assert self.flow.is_empty
        self.num_drained += 1

    def resolve(self, reply_to: int, answer: Answer) -> None:
        self.world.to_router.append(ReplyToRouter(self.me, reply_to, answer))

    def add(self, sent: SendOutput) -> None:
        assert sent.router == ROUTER
        self.world.to_router.append(OutputToRouter(self.me, sent.output))

    def offer(self, offered: OfferBlocks) -> None:
        self.world.offered.append((self.me, offered.block_hashes))
        if offered.new_node is not None:
            fetch = FetchBlocks(ROUTER, self.me, offered.block_hashes)
            self.world.to_nodes.append((offered.new_node.node, fetch))

    def ask(self, wanted: AskBlocks) -> None:
        assert wanted.router == ROUTER
        self.world.to_router.append(AskToRouter(self.me, wanted))

    def refuse(self, refused: RefusePull) -> None:
        assert refused.router == ROUTER
        self.world.to_router.append(refused)

    def execute(
        self, batch: Any, on_layer: OnLayer | None = None, on_queued: OnQueued | None = None
    ) -> Any:
        if self.fail_next_step:
            self.fail_next_step = False
            raise RuntimeError("the device is out of memory")

        def on_layer_or_fail(layer: int) -> None:
            if on_layer is not None:
                on_layer(layer)
            if layer == self.fail_after_layer:
                self.fail_after_layer = None
                raise RuntimeError("the device is out of memory")

        has_hook = on_layer is not None or self.fail_after_layer is not None
        return self.runner.execute(batch, on_layer_or_fail if has_hook else None, on_queued)

    def swap_out(self, block_ids: Sequence[int], host_block_ids: Sequence[int]) -> None:
        self.runner.swap_out(block_ids, host_block_ids)

    def swap_in(self, host_block_ids: Sequence[int], block_ids: Sequence[int]) -> None:
        self.runner.swap_in(host_block_ids, block_ids)

    @property
    def num_steps(self) -> int:
        """Batches that were computed."""
        return len(self.runner.batches)

    def turn(self) -> bool:
        """One turn of the loop, with all books checked after it."""
        if self.disk is not None:
            self.disk.turn()
        is_busy = self.loop.turn()
        check_books(self.scheduler)
        self._check_kv_in_use()
        return is_busy

    def _check_kv_in_use(self) -> None:
        """Blocks that a transfer may read or write are held for it, and for nobody else."""
        for token in self.connector.transfers:
            attempt = self.flow.attempts.of_lease(token)
            transfer = self.connector.transfers[token]
            if attempt is not None:
                assert set(transfer.pieces.values()) <= set(attempt.sequence.block_table)
            elif token in self.flow.sends:
                assert set(transfer.pieces.values()) <= self.scheduler.prefix_transfers.sent_ids
            else:
                assert not transfer.pieces, "a transfer reads blocks that nobody holds"
        self.connector.check_pushed()
        for ticket in self.connector.quarantined.values():
            for block in ticket.target_block_ids:
                use = self.scheduler.pool._use.get(block)
                assert use in (BlockUse.RECEIVING, BlockUse.QUARANTINED), "reused under a writer"
        for token, landing in self.connector.landings.items():
            attempt = self.flow.attempts.of_lease(token)
            if token in self.flow.pulls:
                held = self.scheduler.prefix_transfers.held_block_ids
                assert set(landing.ticket.target_block_ids) <= held
                continue
            assert attempt is not None, "a landing is open and nobody waits for it"
            assert attempt.sequence.status is SequenceStatus.WAITING_FOR_KV
            assert set(landing.ticket.target_block_ids) <= set(attempt.sequence.block_table)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSize:
    """How large a simulated node is, and how it schedules and drafts."""

    num_blocks: int = 24
    seats: int = 4
    budget: int = 64
    max_model_len: int | None = None
    caching: bool = True
    max_queued: int = 100
    method: str = "none"
    num_drafts: int = 0
    num_host_blocks: int = 0
    keeps_prefixes: bool = False
    disk_path: Path | None = None
    num_disk_blocks: int = 1000
    scheduling: SchedulingConfig = field(default_factory=SchedulingConfig)

    def make_scheduler(self, runner: HashRunner) -> Scheduler:
        speculation = SpeculationConfig(
            speculative_method=self.method, num_speculative_tokens=self.num_drafts
        )
        most_drafts = num_speculative_tokens(self.method, self.num_drafts)
        return Scheduler(
            limits=StepLimits(
                max_num_seqs=self.seats,
                max_num_batched_tokens=max(self.budget, self.seats * (1 + most_drafts)),
                block_size=BLOCK_SIZE,
                max_model_len=self.max_model_len or runner.max_model_len,
                num_speculative_tokens=most_drafts,
                pairs_per_token=runner.pairs_per_token,
            ),
            num_blocks=self.num_blocks,
            fingerprint=runner.layout.fingerprint,
            eos_token_ids=frozenset({EOS_TOKEN_ID}),
            enable_prefix_caching=self.caching,
            config=self.scheduling,
            speculation=make_speculation(speculation, runner.step_costs),
            num_host_blocks=self.num_host_blocks,
            keeps_prefixes=self.keeps_prefixes,
            disk_index=self._disk_index(runner),
            swaps_late=runner.needs_staging,
            can_go_on=runner.can_go_on,
        )

    def _disk_index(self, runner: HashRunner) -> DiskIndex | None:
        if self.disk_path is None:
            return None
        file_bytes = HEADER_BYTES + runner.layout.block_bytes
        return DiskIndex(self.num_disk_blocks * bytes_taken(file_bytes), file_bytes)


MakeFlow = Callable[[Scheduler, NodeSize], NodeFlow]
_: type[Runner] = HashRunner


class World:
    """One router and its nodes. `threshold` None makes the decode node a mixed one, alone.

    With `is_async`, a step that a turn begins ends in the node's next turn. With `goes_on`, runners
    begin steps by themselves (`HashRunner.goes_on`).
    """

    hands_over = False
    """Whether nodes that drain stay until others have what they have cached."""

    def __init__(
        self,
        *,
        threshold: int | None = 0,
        prefill: NodeSize | None = None,
        decode: NodeSize | None = None,
        is_async: bool = False,
        goes_on: str = "",
    ) -> None:
        self.is_async = is_async
        self.goes_on = goes_on
        self.clock = ManualClock()
        self.network = FakeKVNetwork(self.clock)
        self.to_nodes: list[tuple[Incarnation, Message]] = []
        self.to_router: list[ToRouter] = []
        self.nodes: dict[Incarnation, Node] = {}
        self.listed: set[Incarnation] = set()
        """The nodes that the router knows, until it notices that they are gone."""
        self.passed_pulls = PassedPulls()
        self.offered: list[tuple[Incarnation, tuple[BlockHash, ...]]] = []
        """What draining nodes have, and nobody has passed on."""
        self.token_s = 1.0
        """What computing a token is expected to take, where a pull is thought of."""
        self.pull_cost = PullCost(1.0, lambda num_tokens: num_tokens * self.token_s)
        self._lease_tokens = count(101)
        self.d = self._add(DECODE, decode or NodeSize(), self._flow(threshold))
        if threshold is not None:
            self.p = self._add(PREFILL, prefill or NodeSize(), self._flow(me=PREFILL))
        self.router = ScriptedRouter(
            ROUTER,
            lambda node, message: self.to_nodes.append((node, message)),
            decode=DECODE,
            prefill=None if threshold is None else PREFILL,
            clock=self.clock,
        )

    def _add(self, me: Incarnation, size: NodeSize, make_flow: MakeFlow) -> Node:
        node = Node(self, me, size, make_flow)
        self.nodes[me] = node
        self.listed.add(me)
        return node

    def join(self, me: Incarnation, size: NodeSize) -> Node:
        """Another prefill node."""
        return self._add(me, size, self._flow(me=me))

    def _flow(self, threshold: int | None = 0, me: Incarnation = DECODE) -> MakeFlow:
        def make(scheduler: Scheduler, size: NodeSize) -> NodeFlow:
            runner = HashRunner(num_blocks=size.num_blocks, block_size=BLOCK_SIZE)
            return NodeFlow(
                scheduler,
                _limits(size, runner),
                tickets=Tickets(_landing_place(me, runner), lambda: next(self._lease_tokens)),
                needs_staging=True,
                local_prefill_threshold=EVERY_PROMPT if threshold is None else threshold,
                pull_cost=self.pull_cost,
                disk_cost=self._disk_cost(size),
                hand_over=HandOver(scheduler.prefix_transfers) if self.hands_over else None,
            )

        return make

    def _disk_cost(self, size: NodeSize) -> PullCost | None:
        if size.disk_path is None:
            return None
        return PullCost(1.0, lambda num_tokens: num_tokens * self.token_s)

    # --- what happens -------------------------------------------------------------------------

    def ask(self, prompt: int | tuple[int, ...], **given: Any) -> Asked:
        """A request at the router; see `make_request`."""
        may_wait = given.pop("may_wait", False)
        name = given.pop("name", f"r{len(self.router.asked)}")
        return self.router.ask(make_request(prompt, name=name, **given), may_wait=may_wait)

    def outlast_faults(self) -> None:
        """What was lost is sent again, what was quarantined is fenced, and patience ends."""
        for _ in range(3):
            self.network.send_again()
            self.settle()
            for node in self.nodes.values():
                for token in list(node.connector.quarantined):
                    node.connector.fence(token)
            self.advance(6.0)

    def messages_arrive(self) -> None:
        """Everything between router and nodes that is on its way now, in order."""
        to_nodes, self.to_nodes = self.to_nodes, []
        for node, message in to_nodes:
            self.to_the_node(node, message)
        to_router, self.to_router = self.to_router, []
        for item in to_router:
            self.to_the_router(item)

    def to_the_node(self, node: Incarnation, message: Message) -> None:
        """One message arrives; at a node that stops, a request is refused at the door."""
        if node not in self.nodes:
            return
        try:
            self.nodes[node].inbox.put(message)
        except (Draining, Overloaded) as error:
            assert isinstance(message, Submit)
            self.to_router.append(ReplyToRouter(node, message.reply_to, CallRefused(error)))

    def to_the_router(self, item: ToRouter) -> None:
        """One answer, output or wish arrives; a wish is passed on."""
        match item:
            case ReplyToRouter(node, reply_to, answer):
                self.router.on_reply(node, reply_to, answer)
            case OutputToRouter(node, output):
                self.router.on_output(node, output)
            case AskToRouter(node, wanted) if wanted.source not in self.listed:
                self.to_nodes.append((node, PullRefused(wanted.ticket.lease_token)))
            case AskToRouter(node, wanted):
                self.passed_pulls.add(wanted.source, node, wanted.ticket.lease_token)
                message = SendBlocks(wanted.router, wanted.ticket, wanted.block_hashes)
                self.to_nodes.append((wanted.source, message))
            case RefusePull(_, node, lease_token):
                self.to_nodes.append((node, PullRefused(lease_token)))

    def notice(self, node: Incarnation) -> None:
        """The router notices that a node is gone, and says so to those that pull from it."""
        self.listed.discard(node)
        for asker, lease_token in self.passed_pulls.take(node):
            self.to_nodes.append((asker, PullRefused(lease_token)))

    def turn(self, node: Node | None = None) -> bool:
        """Each node (or one) takes a turn."""
        if node is not None:
            return node.turn()
        turns = [node.turn() for node in list(self.nodes.values())]
        return any(turns)

    def step(self, *, frames: bool = True) -> bool:
        """Everything that can happen now, once; says whether something did."""
        was_busy = bool(self.to_nodes or self.to_router or (frames and self.network.frames))
        self.messages_arrive()
        is_busy = self.turn()
        if frames:
            self.network.deliver_all()
        is_read = not any(node.inbox._messages for node in self.nodes.values())
        is_said = not (self.to_nodes or self.to_router)
        is_busy |= any(node.runner.copies for node in self.nodes.values())
        is_busy |= any(node.disk.is_busy for node in self.nodes.values() if node.disk is not None)
        return was_busy or is_busy or not (is_read and is_said)

    def settle(self, *, frames: bool = True) -> None:
        """Go on until nothing happens any more."""
        for _ in range(500):
            if not self.step(frames=frames):
                return
        raise AssertionError("the world does not come to rest")

    def step_until(self, condition: Callable[[], bool], *, frames: bool = True) -> None:
        """Go on until something is so."""
        for _ in range(500):
            if condition():
                return
            self.step(frames=frames)
        raise AssertionError("it never came to that")

    def advance(self, by_s: float) -> None:
        """Time passes: connectors and nodes look at the clock."""
        self.clock.advance(by_s)
        self.network.on_time()

    def stop(self, node: Node) -> None:
        """A node stops in good order; what its connector still says is read too."""
        node.inbox.close()
        node.loop.run()
        node.connector.close()
        node.turn()

    def kill(self, node: Node, *, is_noticed: bool) -> None:
        """A process dies. When it is noticed, peers and router hear of it; else time tells."""
        del self.nodes[node.me]
        self.network.kill(node.me)
        self.to_nodes = [(to, message) for to, message in self.to_nodes if to != node.me]
        if is_noticed:
            for connector in self.network.connectors.values():
                connector.on_peer_lost(node.me)
            self.notice(node.me)
            self.router.on_node_lost(node.me)

    # --- the closing checks -------------------------------------------------------------------

    def check_closed(self) -> None:
        """All blocks free or cached, all books empty, one outcome each, no token wrong."""
        for node in self.nodes.values():
            check_idle(node.scheduler)
            assert len(node.flow.attempts) == 0, f"{node.me} still holds attempts"
            assert node.flow.attempts.num_leases == 0
            assert not node.flow.prompts, "a ticket is left"
            assert not node.flow.sends, "a pull is still answered"
            assert not node.flow.pulls, "a pull is waited for"
            assert not node.connector.transfers, f"{node.me} has open transfers"
            assert not node.connector.landings, f"{node.me} has open landings"
            assert not node.connector.quarantined, f"{node.me} has blocks in quarantine"
            assert not node.flow.reservations, "a landing is waited for in vain"
        for attempt, asked in self.router.asked.items():
            assert len(asked.outcomes) == 1, f"{attempt} has outcomes {asked.outcomes}"
            request = asked.request
            most = self.d.scheduler.limits.max_model_len - len(request.prompt_token_ids)
            right = expected_tokens(request.prompt_token_ids, request.sampling)[:most]
            found = asked.answer()
            if asked.outcomes == ["finished"]:
                assert found == right, f"{attempt} was answered wrong"
            else:
                assert found == right[: len(found)], f"{attempt} was answered wrong"

    def outcomes(self) -> Counter[str]:
        """How the requests ended."""
        return Counter(outcome for a in self.router.asked.values() for outcome in a.outcomes)


def right_answer(request: GenerationRequest) -> list[int]:
    """What the model answers."""
    return expected_tokens(request.prompt_token_ids, request.sampling)


def ask_until_reserved(world: World, length: int = 9, **given: object) -> Asked:
    asked = world.ask(length, **given)
    world.messages_arrive()
    world.d.turn()
    return asked


def ask_until_committed(world: World, length: int = 9, **given: object) -> Asked:
    """Everything is computed and on the wire; nothing was delivered."""
    asked = world.ask(length, **given)
    world.step_until(lambda: 0 in asked.tokens, frames=False)
    assert [f.kind for f in world.network.frames][-1] == "commit"
    return asked


def assert_finished(world: World, *asked: Asked) -> None:
    world.settle()
    world.check_closed()
    for one in asked:
        assert one.outcomes == ["finished"]
        assert one.answer() == right_answer(one.request)


def _landing_place(me: Incarnation, runner: HashRunner) -> LandingPlace:
    return LandingPlace(
        node=me,
        kv_endpoint=FakeConnector.endpoint,
        fingerprint=runner.layout.fingerprint,
        kv_description="hashes",
        lease_s=LEASE_S,
    )


def _limits(size: NodeSize, runner: HashRunner) -> FlowLimits:
    return FlowLimits(
        vocab_size=VOCAB_SIZE,
        max_model_len=size.max_model_len or runner.max_model_len,
        max_queued_requests=size.max_queued,
        sheds=size.scheduling.shed,
        has_grammars=True,
    )
