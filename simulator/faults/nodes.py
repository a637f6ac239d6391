"""A node in one life: the simulator's node on real blocks, with its leases and its streams."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from common.ids import Incarnation
from common.kv.blocks import BlockHash
from common.kv.kv_layout import KVLayout
from common.nodes import NodeRecord, Role
from common.request import RequestOutput
from common.settings.config import Config
from engine.core.runner_contract import StepCosts
from engine.core.scheduler import Scheduler
from kv_transfer.contract import OnEvent
from kv_transfer.shared.limits import Limits
from node.flow.messages import Answer, AskBlocks
from node.flow.pulls.pull_cost import PullCost
from node.life.make_scheduler import make_scheduler
from simulator.faults.contents import NUM_LAYERS, VOCAB_SIZE, KVMemory
from simulator.faults.hosts import ProcessClock
from simulator.faults.kv_wires import KVEnd, KVWires
from simulator.faults.shape import MODEL, Shape, config_of
from simulator.faults.steps import TOKEN_S, ComputedExecution
from simulator.node import NodeSaid, SimulatedNode, flow_of
from simulator.profile import ModelledFacts

if TYPE_CHECKING:
    from simulator.faults.streams import NodeLink

_PIECES_PER_WINDOW = 12
COMPUTE_S = 20e-3
"""Seconds that a token of a prompt is expected to take, where a pull is thought of: pulls pay."""


def layout_of(block_size: int) -> KVLayout:
    """Return the layout of blocks whose slots hold a number."""
    return KVLayout(
        model_digest=MODEL,
        num_layers=NUM_LAYERS,
        num_kv_heads=1,
        head_dim=4,
        block_size=block_size,
        dtype="float16",
    )


def facts_of(shape: Shape) -> ModelledFacts:
    """Return what a scheduler wants to know of the model."""
    return ModelledFacts(
        layout=layout_of(shape.block_size),
        num_blocks=shape.num_blocks,
        max_model_len=(shape.num_blocks - 1) * shape.block_size,
        pairs_per_token=64,
        step_costs=StepCosts((1, 65), (shape.step_s, shape.step_s + 64 * TOKEN_S)),
        num_host_blocks=shape.num_host_blocks,
    )


@dataclass(slots=True)
class _Wires:
    """Stands in for a `ModelledNetwork`: makes the connector of the node that joins."""

    wires: KVWires
    clock: ProcessClock
    memory: KVMemory
    scheduler: Scheduler
    end: list[KVEnd] = field(default_factory=list)

    def join(self, node: Incarnation, on_event: OnEvent) -> KVEnd:
        pool, layout = self.scheduler.pool, layout_of(self.scheduler.limits.block_size)
        window = _PIECES_PER_WINDOW * 2 * layout.piece_bytes
        limits = Limits(window_bytes=window, max_frame_bytes=window // 2)
        end = KVEnd(node, self.clock, self.wires, layout, self.memory, pool, limits, on_event)
        self.end.append(end)
        return end


class FaultyNode(SimulatedNode):
    """A node that can be stopped at any time. `on_turn` is called after each turn."""

    needs_staging = False

    def __init__(
        self,
        me: Incarnation,
        shape: Shape,
        role: Role,
        clock: ProcessClock,
        wires: KVWires,
        new_lease_token: Callable[[], int],
        *,
        on_turn: Callable[[FaultyNode], object],
    ) -> None:
        config, facts = config_of(shape, role), facts_of(shape)
        scheduler = make_scheduler(config, facts)
        flow = flow_of(
            config,
            facts,
            scheduler,
            me,
            vocab_size=VOCAB_SIZE,
            new_lease_token=new_lease_token,
            pull_cost=PullCost(1.0, lambda num_tokens: num_tokens * COMPUTE_S),
        )
        self.clock, self.role = clock, role
        self.memory = KVMemory(shape.num_blocks, shape.num_host_blocks, shape.block_size)
        joining = _Wires(wires, clock, self.memory, scheduler)
        most_tokens = scheduler.limits.max_num_batched_tokens
        execution = ComputedExecution(clock, self.memory, shape.step_s, most_tokens)
        super().__init__(
            me,
            clock,  # type: ignore[arg-type]
            flow,
            execution,  # type: ignore[arg-type]
            joining,  # type: ignore[arg-type]
            facts.layout,
            max_queued_requests=config.handoff.max_queued_requests,
            tell=self._say,
        )
        self.kv = joining.end[0]
        self.record = record_of(config, facts, me)
        self.cached: set[BlockHash] = set()
        self.link: NodeLink | None = None
        self.stream_number = 0
        self.open_calls: set[int] = set()
        self.is_death_known = True
        self._on_turn = on_turn

    # What the loop and the effects call.

    def resolve(self, reply_to: int, answer: Answer) -> None:
        """Answer a call; the stream of one that is forgotten has ended."""
        if reply_to in self.open_calls:
            self.open_calls.remove(reply_to)
            super().resolve(reply_to, answer)

    def add(self, router: Incarnation, output: RequestOutput) -> None:
        """Send an output, if its router listens."""
        if self._hears(router):
            super().add(router, output)

    def ask(self, wanted: AskBlocks) -> None:
        """Want cached blocks of another node."""
        if self._hears(wanted.router):
            super().ask(wanted)

    def swap_out(self, block_ids: Sequence[int], host_block_ids: Sequence[int]) -> None:
        """Copy blocks to the host."""
        self.memory.swap_out(block_ids, host_block_ids)

    def swap_in(self, host_block_ids: Sequence[int], block_ids: Sequence[int]) -> None:
        """Copy blocks back from the host."""
        self.memory.swap_in(host_block_ids, block_ids)

    def wake(self) -> None:
        """Look at the time, which has jumped."""
        self.kv.wake()
        if not self.execution.is_running:
            self._turn_at(self.clock.now_s())

    def _hears(self, router: Incarnation) -> bool:
        return self.link is not None and self.link.router == router

    def _say(self, said: NodeSaid) -> None:
        for name, is_there in said.news.items():
            (self.cached.add if is_there else self.cached.discard)(name)
        if self.link is not None:
            self.link.say(said)

    def _turn(self, planned_for_s: float) -> None:
        super()._turn(planned_for_s)
        self._on_turn(self)


def record_of(config: Config, facts: ModelledFacts, me: Incarnation) -> NodeRecord:
    """Return what a node says of itself in the store."""
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
    )
