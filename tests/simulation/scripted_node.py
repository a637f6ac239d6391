"""A node of a simulated world: the simulator's, on a model that notices every mistake with KV."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from common.ids import Incarnation
from common.kv.token_budget import tokens_per_seq
from common.nodes import Role
from common.settings.config import (
    Config,
    EngineConfig,
    HandoffConfig,
    SchedulingConfig,
    SpeculationConfig,
)
from engine.core.blocks.block_pool import BlockUse
from engine.core.blocks.cache_copy import CacheCopy
from engine.core.blocks.disk_index import DiskIndex, bytes_taken
from engine.core.scheduler import Scheduler
from engine.core.sequences.status import SequenceStatus
from engine.execution import ExecutionHere
from engine.prefix_disk.block_file import HEADER_BYTES
from engine.prefix_disk.block_folder import BlockFolder
from node.flow.messages import CheckCopies, Effect, Message, OfferBlocks
from node.flow.pulls.hand_over import HandOver
from node.life.make_scheduler import make_scheduler
from simulator.faults.hosts import ProcessClock
from simulator.node import SimulatedNode, flow_of
from tests.simulation.scripted_steps import StepsBeside
from tests.simulation.scripted_wires import ScriptedEnd, ScriptedWires
from tests.support.disk.faulty_files import FaultyCalls
from tests.support.disk.played_disk import PlayedDisk
from tests.support.engine.build import check_books, check_idle
from tests.support.engine.hash_runner import VOCAB_SIZE, HashRunner, LateCopy

if TYPE_CHECKING:
    from tests.simulation.world import World

BLOCK_SIZE = 4
LEASE_S = 10.0
EVERY_PROMPT = 1 << 30
"""A threshold below which every prompt is."""
_ROOM_IN_INBOX = 1000


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

    def config(self, threshold: int | None) -> Config:
        """Return the settings of a node that computes prompts up to `threshold` itself; None: all.

        A router alone gives a simulated node its role, so each may do everything.
        """
        least_budget = self.seats * tokens_per_seq(self.method, self.num_drafts)
        return Config(
            role=Role.MIXED,
            engine=EngineConfig(
                block_size=BLOCK_SIZE,
                max_num_seqs=self.seats,
                max_num_batched_tokens=max(self.budget, least_budget),
                enable_prefix_caching=self.caching,
                prefix_host_memory=int(self.keeps_prefixes),
            ),
            scheduling=self.scheduling,
            speculation=SpeculationConfig(
                speculative_method=self.method, num_speculative_tokens=self.num_drafts
            ),
            handoff=HandoffConfig(
                local_prefill_threshold=EVERY_PROMPT if threshold is None else threshold,
                lease_s=LEASE_S,
                max_queued_requests=self.max_queued,
            ),
        )

    def runner(self) -> HashRunner:
        """Return a model with this memory."""
        return HashRunner(
            num_blocks=self.num_blocks,
            block_size=BLOCK_SIZE,
            max_model_len=self.max_model_len,
            num_host_blocks=self.num_host_blocks,
        )

    def disk_index(self, runner: HashRunner) -> DiskIndex | None:
        """Return the index of the node's files, if it has any."""
        if self.disk_path is None:
            return None
        file_bytes = HEADER_BYTES + runner.layout.block_bytes
        return DiskIndex(self.num_disk_blocks * bytes_taken(file_bytes), file_bytes)


class _StepsHere(ExecutionHere):
    """Steps that begin and end in one turn."""

    is_running = False
    ended_s: Sequence[float] = ()


class Node(SimulatedNode):
    """Takes a turn when the test says so; after each in which anything was done books are checked.

    Most turns only look whether a copy has ended or a time has passed: the books are as they were.

    `on_publish` is called when statistics are shown.
    """

    needs_staging = True

    def __init__(
        self, world: World, me: Incarnation, size: NodeSize, threshold: int | None
    ) -> None:
        config, self.runner = size.config(threshold), size.runner()
        self.runner.goes_on = world.goes_on
        self.on_publish: Callable[[], object] = lambda: None
        self.num_drained = 0
        self.has_unread = False
        self._is_still = False
        """Whether nothing was done in the present turn."""
        self._checked: tuple[int, ...] = ()
        """What was counted when the books were checked last."""
        self.calls = FaultyCalls()
        self.disk: PlayedDisk | None = None
        if size.disk_path is not None:
            fingerprint, host_kv = self.runner.layout.fingerprint, self.runner.host_kv
            self.disk = PlayedDisk(BlockFolder(size.disk_path, fingerprint, host_kv, self.calls))
        scheduler = make_scheduler(config, self.runner, size.disk_index(self.runner))
        flow = flow_of(
            config,
            self.runner,
            scheduler,
            me,
            vocab_size=VOCAB_SIZE,
            new_lease_token=world.new_lease_token,
            pull_cost=world.pull_cost,
            disk_cost=None if self.disk is None else world.new_cost(),
            needs_staging=True,
            has_grammars=True,
            hand_over=HandOver(scheduler.prefix_transfers) if world.hands_over else None,
        )
        flow.attempts.keep_ended()
        self.clock = ProcessClock(world.clock)
        timeline: Any = self.clock
        beside = self._steps_beside = StepsBeside(self.runner, self.clock)
        steps: Any = beside if world.is_async else _StepsHere(self.runner, self.clock)
        super().__init__(
            me,
            timeline,
            flow,
            steps,
            self._joining(world.network, scheduler),
            self.runner.layout,
            max_queued_requests=_ROOM_IN_INBOX,
            tell=world.hear,
            disk=self.disk,
        )
        self.connector = world.network.connectors[me]

    def _joining(self, wires: ScriptedWires, scheduler: Scheduler) -> Any:
        """Return what makes the connector of a node that joins."""
        layout, pool = self.runner.layout, scheduler.pool
        return SimpleNamespace(
            join=lambda me, on_event: ScriptedEnd(
                me, self.clock, wires, layout, self.runner, pool, on_event
            )
        )

    @property
    def num_steps(self) -> int:
        """Batches that were computed."""
        return len(self.runner.batches)

    @property
    def is_busy(self) -> bool:
        """Whether a message is unread, or a turn will end a copy or a job of the disk."""
        has_job = self.disk is not None and self.disk.is_busy
        return bool(self.has_unread or self.runner.copies or has_job)

    def num_computed(self) -> int:
        """Return how many tokens of prompts it has computed."""
        return self.scheduler.statistics().counters.num_chunk_tokens

    def pulls(self) -> dict[str, int]:
        """Return what became of its pulls; what did not happen is left out."""
        counted = self.scheduler.statistics().counters.pulls
        return {outcome: count for outcome, count in counted.items() if count}

    def sent(self) -> dict[str, int]:
        """Return the blocks that it has sent to nodes that pulled them, by tier."""
        return self.scheduler.statistics().counters.prefix_blocks_sent

    def put(self, message: Message) -> None:
        """Take a message: it is read in the next turn."""
        self.has_unread = True
        super().put(message)

    def compute_on(self) -> None:
        """Compute the next part of a step that goes on beside the turns."""
        self._steps_beside.compute_on()

    def turn(self) -> bool:
        """Take one turn, and check what it has changed; return whether it changed something."""
        if self.disk is not None:
            self.disk.turn()
        self.has_unread = False
        self._is_still = not self.inbox.has_messages
        is_busy = super().turn()
        scheduler = self.scheduler
        held = scheduler.waiting, scheduler.running, scheduler.receiving, scheduler.exporting
        pools = scheduler.pool.num_available, scheduler.host_pool.num_free
        counted = (*map(len, held), *pools)
        if is_busy or not self._is_still or counted != self._checked:
            self._checked = counted
            check_books(scheduler)
        self._check_kv_in_use()
        return is_busy

    def check_empty(self) -> None:
        """All blocks are free or cached, all books are empty, nothing of KV is on its way, and of
        each attempt it is known how it ended."""
        check_idle(self.scheduler)
        flow, connector = self.flow, self.connector
        held = {
            "attempts": len(flow.attempts),
            "leases": flow.attempts.num_leases,
            "tickets": len(flow.prompts),
            "reservations": len(flow.reservations),
            "pulls that it answers": len(flow.sends),
            "pulls": len(flow.pulls),
            "transfers": len(connector.transfers),
            "landings": len(connector.landings),
            "landings in quarantine": len(connector.quarantined),
        }
        assert not any(held.values()), f"{self.me} still holds {held}"
        unexplained = [one.id for one in flow.attempts.take_ended() if not one.outcome]
        assert not unexplained, f"{self.me} does not say how {unexplained} ended"

    # Called by the loop and the effects.

    def perform(self, effect: Effect) -> None:
        """Perform an effect. To look whether copies have ended changes nothing by itself."""
        self._is_still = self._is_still and isinstance(effect, CheckCopies)
        super().perform(effect)

    def publish(self) -> None:
        self.on_publish()

    def offer(self, offered: OfferBlocks) -> None:
        self._said.offers.append(offered)

    def on_drained(self) -> None:
        assert self.flow.is_empty
        self.num_drained += 1

    def swap_out(self, block_ids: Sequence[int], host_block_ids: Sequence[int]) -> None:
        self.runner.swap_out(block_ids, host_block_ids)

    def swap_in(self, host_block_ids: Sequence[int], block_ids: Sequence[int]) -> None:
        self.runner.swap_in(host_block_ids, block_ids)

    def begin_copy(self, copy: CacheCopy) -> LateCopy:
        return self.runner.begin_copy(copy)

    def _turn_at(self, at_s: float) -> None:
        """Plan no turn: the test takes it."""

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
                use = self.scheduler.pool.use_of(block)
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
