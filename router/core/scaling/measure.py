"""What nodes report, made into rates over the last seconds. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from common.ids import Incarnation
from common.nodes import NodeLoad, Role
from router.core.known.node_view import NodeView

WINDOW_S = 10.0
"""What rates and means are taken over: several reports of each node, which come some seconds
late."""
HELD_S = 5.0
"""What means of what nodes hold are taken over."""
LEARNED_BUSY_S = 1.0
"""Seconds of steps from which a speed counts as learned. The first prompts of a node are slow: what
they tell counts only until that many seconds were seen."""
ROLES = (Role.PREFILL, Role.DECODE, Role.MIXED)
ROLES_BY_PROMPTS = (Role.PREFILL, Role.MIXED, Role.DECODE)
"""Whose steps tell best what a node computes of prompts: those that compute nothing else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One role over the window. Tokens are those of prompts; times are seconds.

    There are `num_nodes` now, and were `mean_nodes` in the mean. `tokens_per_s` were computed, and
    `queued_per_s` were added to the queues, or taken off. `node_tokens_per_s` is what one node
    computes while it computes prompts; 0: not known yet. `queued_tokens` wait now. `num_running`
    requests had a seat and `num_waiting` had none, in the mean of `HELD_S`, as blocks are means
    too, of all nodes together. `step_s` is a step's mean time while there were steps, and
    `least_step_s` the least one of any window.
    """

    num_nodes: int = 0
    mean_nodes: float = 0.0
    tokens_per_s: float = 0.0
    queued_per_s: float = 0.0
    node_tokens_per_s: float = 0.0
    queued_tokens: int = 0
    used_blocks: float = 0.0
    waiting_blocks: float = 0.0
    num_running: float = 0.0
    num_waiting: float = 0.0
    node_blocks: float = 0.0
    node_seats: float = 0.0
    step_s: float = 0.0
    least_step_s: float = 0.0

    @property
    def arriving_per_s(self) -> float:
        """Tokens of prompts that arrive in a second."""
        return max(0.0, self.tokens_per_s + self.queued_per_s)


@dataclass(slots=True)
class _Totals:
    """What the nodes of a role have done, added up while they had it."""

    num_tokens: int = 0
    prompt_ms: int = 0
    step_ms: int = 0
    num_steps: int = 0

    def copy(self) -> _Totals:
        return _Totals(self.num_tokens, self.prompt_ms, self.step_ms, self.num_steps)

    def add(self, before: NodeLoad, now: NodeLoad) -> None:
        """Add what a node did between two reports; a counter that went back adds nothing."""
        prompt_ms = max(0, now.prompt_steps_ms - before.prompt_steps_ms)
        self.num_tokens += max(0, now.num_prompt_tokens - before.num_prompt_tokens)
        self.prompt_ms += prompt_ms
        self.step_ms += prompt_ms + max(0, now.decode_steps_ms - before.decode_steps_ms)
        self.num_steps += max(0, now.num_steps - before.num_steps)


@dataclass(slots=True)
class _Held:
    """What the nodes of a role hold at one moment."""

    num_nodes: int = 0
    queued_tokens: int = 0
    waiting_tokens: int = 0
    found_tokens: int = 0
    used_blocks: float = 0.0
    coming_blocks: int = 0
    waiting_blocks: float = 0.0
    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_seats: int = 0

    def add(self, node: NodeView) -> None:
        record, load = node.record, node.load
        # Each running answer has one token that is not computed yet.
        queued_tokens = max(0, load.queued_tokens - load.num_running)
        waiting_tokens = queued_tokens if load.num_waiting else 0
        self.num_nodes += 1
        self.queued_tokens += queued_tokens
        self.found_tokens += load.num_found_tokens
        self.waiting_tokens += waiting_tokens
        self.used_blocks += max(0, record.num_blocks - load.free_blocks)
        self.coming_blocks += load.num_reserved_blocks + load.num_receiving_blocks
        # What is cached takes a waiting request's blocks as well.
        self.waiting_blocks += (waiting_tokens + load.num_found_tokens) / record.block_size
        self.num_running += load.num_running
        self.num_waiting += load.num_waiting
        self.num_blocks += record.num_blocks
        self.num_seats += record.max_num_seqs

    def leave_out_queue_of(self, prefill: _Held, block_size: int) -> None:
        """Leave out what is reserved here for prompts that wait in the queues of prefill nodes.

        A short prefill role fills the seats of decode nodes with reservations: more decode nodes
        would have more of them.
        """
        self.num_running -= min(self.num_running, prefill.num_waiting)
        num_waiting = prefill.queued_tokens + prefill.found_tokens
        self.used_blocks -= min(self.coming_blocks, num_waiting / block_size)


@dataclass(slots=True)
class _Reading:
    at_s: float
    totals: dict[Role, _Totals]
    held: dict[Role, _Held]


@dataclass(slots=True)
class Meter:
    """Takes readings of all nodes; nodes that drain, are suspected or have no lease do not count.

    A node's work counts for the role that it has when it reports it.
    """

    _last: dict[Incarnation, NodeLoad] = field(default_factory=dict)
    _totals: dict[Role, _Totals] = field(default_factory=lambda: {r: _Totals() for r in ROLES})
    _readings: deque[_Reading] = field(default_factory=deque)
    _learned: dict[Role, _Totals] = field(default_factory=lambda: {r: _Totals() for r in ROLES})
    """What the nodes of a role had done when their speed was learned last."""
    _is_learned: bool = False
    _node_tokens_per_s: float = 0.0
    _least_step_s: float = 0.0

    def read(self, nodes: Sequence[NodeView], now_s: float) -> dict[Role, Measured]:
        """Read the present reports of the nodes; return the measurements, by role."""
        held = {role: _Held() for role in ROLES}
        last, self._last = self._last, {}
        for node in nodes:
            if node.is_listed:
                # What one has done that was not, for a time, is no work of these seconds.
                self._last[node.incarnation] = node.load
            if not counts(node):
                continue
            role, before = node.record.role, last.get(node.incarnation)
            held[role].add(node)
            if before is not None and before is not node.load:
                self._totals[role].add(before, node.load)
        block_size = max((node.record.block_size for node in nodes), default=1)
        held[Role.DECODE].leave_out_queue_of(held[Role.PREFILL], block_size)
        totals = {role: one.copy() for role, one in self._totals.items()}
        readings = self._readings
        while len(readings) > 1 and readings[1].at_s <= now_s - WINDOW_S:
            readings.popleft()
        readings.append(_Reading(now_s, totals, held))
        self._learn()
        return {role: self._measured(role) for role in ROLES}

    def _learn(self) -> None:
        """Keep the speed of prefill, and the least time of a step, as they were last seen."""
        began, now = self._readings[0], self._readings[-1]
        done = {role: _between(began.totals[role], now.totals[role]) for role in ROLES}
        computing = next((role for role in ROLES_BY_PROMPTS if done[role].prompt_ms), None)
        if computing is not None:
            self._learn_speed(computing, done[computing], now.totals[computing])
        for one in (done[Role.DECODE], done[Role.MIXED]):
            if one.num_steps and one.step_ms:
                step_s = one.step_ms / 1000 / one.num_steps
                self._least_step_s = min(step_s, self._least_step_s or step_s)

    def _learn_speed(self, role: Role, in_window: _Totals, totals: _Totals) -> None:
        """Take the window, or where that has too little, all since a speed was learned."""
        done = in_window
        if done.prompt_ms < 1000 * LEARNED_BUSY_S:
            done = _between(self._learned[role], totals)
        is_enough = done.prompt_ms >= 1000 * LEARNED_BUSY_S
        if is_enough:
            self._learned[role], self._is_learned = totals, True
        if is_enough or not self._is_learned:
            self._node_tokens_per_s = 1000 * done.num_tokens / done.prompt_ms

    def _measured(self, role: Role) -> Measured:
        readings = self._readings
        began, now = readings[0], readings[-1]
        span_s = now.at_s - began.at_s
        done = _between(began.totals[role], now.totals[role])
        held = now.held[role]
        queued = _queued(now, role)
        num = max(1, held.num_nodes)

        recent = [one.held[role] for one in readings if one.at_s > now.at_s - HELD_S]

        def mean(name: str) -> float:
            return float(sum(getattr(one, name) for one in recent) / len(recent))

        return Measured(
            num_nodes=held.num_nodes,
            mean_nodes=mean("num_nodes"),
            tokens_per_s=done.num_tokens / span_s if span_s else 0.0,
            queued_per_s=(queued - _queued(began, role)) / span_s if span_s else 0.0,
            node_tokens_per_s=self._node_tokens_per_s,
            queued_tokens=queued,
            used_blocks=mean("used_blocks"),
            waiting_blocks=mean("waiting_blocks"),
            num_running=mean("num_running"),
            num_waiting=mean("num_waiting"),
            node_blocks=held.num_blocks / num,
            node_seats=held.num_seats / num,
            step_s=done.step_ms / 1000 / done.num_steps if done.num_steps else 0.0,
            least_step_s=self._least_step_s,
        )


def counts(node: NodeView) -> bool:
    """Return whether a node counts: it takes work, and what it reports is not old."""
    is_there = node.is_listed and not node.is_suspected and not node.load.is_draining
    return is_there and node.record.role in ROLES


def _between(before: _Totals, now: _Totals) -> _Totals:
    names = [one.name for one in fields(_Totals)]
    return _Totals(*(getattr(now, name) - getattr(before, name) for name in names))


def _queued(reading: _Reading, role: Role) -> int:
    """Return the tokens that wait for a role; prompts that wait for seats come to prefill nodes."""
    queued = reading.held[role].queued_tokens
    if role is Role.PREFILL:
        queued += reading.held[Role.DECODE].waiting_tokens
    return queued
