"""A cluster as water: prompts and answers flow through nodes at set speeds, and nodes report it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from common.nodes import NodeLoad, NodeRecord, Role
from common.observing.latency import LatencyTargets
from router.core.known.node_view import NodeView
from router.core.scaling.scaling import Decision, RoleScaling
from tests.support.nodes.node_records import record

PREFILL_SPEED = 10_000.0
NUM_BLOCKS, BLOCK_SIZE, NUM_SEATS = 1000, 64, 100
FIXED_STEP_S, STEP_S_PER_ANSWER = 0.010, 0.0003
READ_S = 1.25
TARGETS = LatencyTargets(ttft_s=2.0, tpot_s=0.05)
BOTH = (Role.PREFILL, Role.DECODE)


@dataclass
class FluidNode:
    """One node: its record, and exact counters that its reports round."""

    record: NodeRecord
    queued_tokens: float = 0.0
    answers: float = 0.0
    num_prompt_tokens: float = 0.0
    prompt_ms: float = 0.0
    decode_ms: float = 0.0
    num_steps: float = 0.0
    is_draining: bool = False
    is_suspected: bool = False
    is_listed: bool = True
    _told: NodeLoad | None = None
    """What it reported last."""

    def view(self, *, is_told: bool = True) -> NodeView:
        """Return the node with a new report, or with its last one if it cannot tell another."""
        if self._told is None or (is_told and self.is_listed):
            self._told = self._load()
        return NodeView(
            record=self.record,
            load=self._told,
            num_requests=self._told.num_running,
            is_suspected=self.is_suspected,
            is_listed=self.is_listed,
        )

    def _load(self) -> NodeLoad:
        running = round(min(self.answers, NUM_SEATS))
        waiting = round(max(0.0, self.answers - NUM_SEATS))
        return NodeLoad(
            free_blocks=max(0, NUM_BLOCKS - 4 * running),
            free_seats=NUM_SEATS - running,
            num_running=running,
            num_waiting=waiting,
            queued_tokens=round(self.queued_tokens) + running + 100 * waiting,
            is_draining=self.is_draining,
            num_steps=round(self.num_steps),
            num_prompt_tokens=round(self.num_prompt_tokens),
            prompt_steps_ms=round(self.prompt_ms),
            decode_steps_ms=round(self.decode_ms),
        )


@dataclass
class FluidCluster:
    """`prompts_per_s` are tokens that arrive a second, `answers` run or wait at once."""

    num_prefill: int
    num_decode: int
    num_mixed: int = 0
    now_s: float = 0.0
    moves: list[tuple[float, Role]] = field(default_factory=list)
    follows: bool = True
    """Whether moves are made as they are decided."""
    is_store_away: bool = False
    """Whether nobody hears what nodes report."""

    def __post_init__(self) -> None:
        numbers = ((Role.PREFILL, self.num_prefill), (Role.DECODE, self.num_decode))
        roles = [r for r, num in (*numbers, (Role.MIXED, self.num_mixed)) for _ in range(num)]
        self.nodes = [FluidNode(_record(f"n{i}", role)) for i, role in enumerate(roles)]
        self.scaling = RoleScaling(TARGETS)

    def of(self, role: Role) -> list[FluidNode]:
        return [node for node in self.nodes if node.record.role is role]

    def run(self, span_s: float, *, prompts_per_s: float, answers: float) -> list[Decision]:
        """Let a load last so long; return what was decided."""
        decisions = []
        end_s = self.now_s + span_s
        while self.now_s < end_s:
            self.now_s += READ_S
            self.flow(prompts_per_s, answers)
            decisions.append(self.decide())
        return decisions

    def decide(self) -> Decision:
        is_told = not self.is_store_away
        views = [node.view(is_told=is_told) for node in self.nodes]
        decision = self.scaling.decide(views, self.now_s, is_store_away=self.is_store_away)
        move = decision.choice.move
        if move is not None:
            self.moves.append((self.now_s, move.role))
            if self.follows:
                (node,) = (n for n in self.nodes if n.record.incarnation == move.node)
                assert node.record.role is move.role_before
                node.record = replace(node.record, role=move.role)
                self.scaling.moves.on_moved(move.role, self.now_s)
        return decision

    def flow(self, prompts_per_s: float, answers: float) -> None:
        """Let the time of one reading pass."""
        computing = self.of(Role.PREFILL) or self.of(Role.MIXED) or self.of(Role.DECODE)
        for node in computing:
            node.queued_tokens += READ_S * prompts_per_s / len(computing)
        for node in self.nodes:
            done = min(node.queued_tokens, READ_S * PREFILL_SPEED)
            node.queued_tokens -= done
            node.num_prompt_tokens += done
            node.prompt_ms += 1000 * done / PREFILL_SPEED
        decoding = self.of(Role.DECODE) or self.of(Role.MIXED)
        for node in self.nodes:
            node.answers = answers / len(decoding) if node in decoding else 0.0
            if node.answers:
                step_s = FIXED_STEP_S + STEP_S_PER_ANSWER * min(node.answers, NUM_SEATS)
                node.decode_ms += 1000 * READ_S
                node.num_steps += READ_S / step_s


def _record(node_id: str, role: Role) -> NodeRecord:
    return record(
        node_id,
        role,
        block_size=BLOCK_SIZE,
        num_blocks=NUM_BLOCKS,
        max_num_seqs=NUM_SEATS,
        roles=() if role is Role.MIXED else BOTH,
    )
