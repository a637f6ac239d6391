"""Runs one history: a cluster that is broken as the history says, and checked at every step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import count

from common.ids import AttemptId, Incarnation
from common.nodes import Role
from common.request import GenerationRequest, SamplingParams
from placement.store import PlacementUnavailable
from simulator.clients import ClientRequest
from simulator.faults import checks
from simulator.faults.checks import LOST_WITH_ROUTER, Violation
from simulator.faults.contents import STOP_TOKEN_ID, prompt_of, right_answer
from simulator.faults.history import AskedRequest, Fault, History
from simulator.faults.hosts import Paths, ProcessClock
from simulator.faults.kv_wires import KVWires
from simulator.faults.leases import Leases
from simulator.faults.nodes import FaultyNode, layout_of
from simulator.faults.router import Answered, FaultyRouter
from simulator.faults.shape import node_names
from simulator.timeline import Timeline
from simulator.trace_file import TraceRequest

LOOK_S = 0.5
"""How often it is looked whether all has ended."""
PATIENCE_S = 20.0
"""How long something may be held after the last request and the last fault have ended."""
ENOUGH_S = 30.0
"""A request with so much time after the last fault must be answered, if a node can."""
_RETRY_S = 0.5


@dataclass(slots=True, eq=False)
class _Request:
    asked: AskedRequest
    prompt: tuple[int, ...]
    right: tuple[int, ...]
    answered: Answered


class FaultyCluster:
    """One cluster for one history; `run` once.

    With `is_wide` the router asks its nodes whether they live as one with many nodes does.
    """

    def __init__(self, history: History, *, is_wide: bool = False) -> None:
        shape = history.shape
        self.history = history
        self._is_wide = is_wide
        self.timeline = Timeline()
        self.paths = Paths()
        self.leases = Leases(shape.lease_s)
        self.wires = KVWires(self.timeline, self.paths, shape.kv_message_s)
        self.lives: dict[Incarnation, FaultyNode] = {}
        self.nodes: dict[str, FaultyNode] = {}
        """The life of each node that is alive, by the name that it began with."""
        self._lease_tokens = count(1)
        self._router_epochs = count(1)
        self._requests = [_request(asked) for asked in history.requests]
        self._num_open = len(self._requests)
        self._ended_at_s = 0.0
        self._faults_end_s = max((one.at_s + one.span_s for one in history.faults), default=0.0)
        self.router_stood_s = 0.0
        for name in node_names(shape):
            self.start_node(name, name)
        self.router = self._new_router()

    def run(self) -> None:
        """Run the history to its end. Raises `Violation`, or what a broken program raises."""
        for request in self._requests:
            at_s = request.asked.at_s
            self.timeline.at(at_s, partial(self._arrive, request))
        for fault in self.history.faults:
            self.timeline.at(fault.at_s, partial(self._break, fault))
        self.timeline.at(LOOK_S, self._look)
        self._is_over = False
        self.timeline.run(until=lambda: self._is_over)
        self._check_end()

    def outcomes(self) -> list[tuple[str, str, list[int]]]:
        """Return how each request ended: its name, how, and the tokens that its client has."""
        answers = [(one.asked.name, one.answered) for one in self._requests]
        return [(name, answered.outcome, answered.tokens) for name, answered in answers]

    # Processes.

    def start_node(self, name: str, node_id: str) -> None:
        """Start a node, in another life than before, when the store gives it an epoch."""
        if name in self.nodes:
            return
        try:
            epoch = self.leases.next_epoch()
        except PlacementUnavailable:
            self.timeline.after(_RETRY_S, partial(self.start_node, name, node_id))
            return
        me = Incarnation(node_id, epoch)
        role = Role(name.rpartition("-")[0])
        node = FaultyNode(
            me,
            self.history.shape,
            role,
            ProcessClock(self.timeline),
            self.wires,
            self._lease_tokens.__next__,
            on_turn=checks.check_node,
        )
        self.lives[me] = self.nodes[name] = node
        self._renew(name, node)

    def stop_node(self, name: str, *, is_known: bool) -> None:
        """End a node's process."""
        node = self.nodes.pop(name)
        node.clock.kill()
        node.is_death_known = is_known
        self.wires.leave(node.kv)
        for link in self.router.links.values():
            if link.node is node:
                link.on_node_dead(is_known=is_known)

    def stop_router(self, *, is_known: bool) -> None:
        """End the router's process; its requests end with it."""
        self.router.clock.kill()
        for link in self.router.links.values():
            link.on_router_dead(is_known=is_known)
        for request in self._requests:
            if request.asked.at_s <= self.timeline.now_s() and not request.answered.outcome:
                self._lose(request)

    def start_router(self) -> None:
        """Start another router."""
        self.router = self._new_router()

    def flush(self) -> None:
        """Let what waits go on: a path is open again."""
        self.wires.flush()
        for link in self.router.links.values():
            link.flush()

    # Inside.

    def _new_router(self) -> FaultyRouter:
        shape = self.history.shape
        return FaultyRouter(
            self.timeline,
            ProcessClock(self.timeline),
            next(self._router_epochs),
            self.paths,
            self.leases,
            self.lives,
            policy=shape.placement_policy,
            lease_s=shape.lease_s,
            latency_s=shape.message_s,
            seed=self.history.seed,
            on_end=self._on_end,
            is_wide=self._is_wide,
        )

    def _renew(self, name: str, node: FaultyNode) -> None:
        is_taken_over = False
        try:
            now_s = self.timeline.now_s()
            is_taken_over = not self.leases.heartbeat(node.record, node.flow.snapshot().load, now_s)
        except PlacementUnavailable:
            pass
        if is_taken_over:
            self.stop_node(name, is_known=True)
        else:
            renew = partial(self._renew, name, node)
            node.clock.after(self.history.shape.lease_s / 4, renew)

    def _break(self, fault: Fault) -> None:
        from simulator.faults.fault_events import begin

        begin(self, fault)

    def _arrive(self, request: _Request) -> None:
        router, asked = self.router, request.asked
        if not router.clock.is_alive:
            self._lose(request)
            return
        ask = partial(router.ask_for, _generation_request(request), request.answered)
        router.clock.run(ask)
        if asked.leaves_at_s is not None:
            leave = partial(self._leave, router, request)
            self.timeline.at(max(asked.leaves_at_s, asked.at_s), leave)

    def _leave(self, router: FaultyRouter, request: _Request) -> None:
        router.clock.run(partial(router.on_client_gone, request.asked.name))

    def _lose(self, request: _Request) -> None:
        request.answered.outcome = LOST_WITH_ROUTER
        request.answered.ended_at_s = self.timeline.now_s()
        self._on_end()

    def _on_end(self) -> None:
        self._num_open -= 1
        self._ended_at_s = self.timeline.now_s()

    def _look(self) -> None:
        now_s = self.timeline.now_s()
        if self._num_open:
            latest_s = max(one.asked.at_s + one.asked.deadline_s for one in self._requests)
            if now_s > latest_s + PATIENCE_S:
                raise Violation(f"{self._num_open} requests wait, long after their deadlines")
        elif now_s > self._faults_end_s:
            why = self._why_busy()
            since_s = max(self._ended_at_s, self._faults_end_s)
            if why and now_s > since_s + PATIENCE_S:
                raise Violation(f"{why}, {PATIENCE_S:g} s after the last request has ended")
            if not why:
                self._is_over = True
                return
        self.timeline.after(LOOK_S, self._look)

    def _why_busy(self) -> str:
        return checks.why_busy(self.nodes.values(), self.router)

    def _check_end(self) -> None:
        first_s = min((one.at_s for one in self.history.faults), default=float("inf"))
        for request in self._requests:
            asked, answered = request.asked, request.answered
            has_faults = first_s <= answered.ended_at_s
            checks.check_end(asked, answered, request.right, has_faults=has_faults)
            checks.check_time(asked, answered, self.router_stood_s)
            self._check_answered(request)
        shape = self.history.shape
        texts = {(*one.prompt, *one.right) for one in self._requests}
        fingerprint = layout_of(shape.block_size).fingerprint
        right = checks.right_blocks(sorted(texts), shape.block_size, fingerprint)
        for node in self.nodes.values():
            checks.check_node(node)
            checks.check_cache(node, right)

    def _check_answered(self, request: _Request) -> None:
        """Check that a request with enough time after the last fault was answered in it."""
        asked, outcome = request.asked, request.answered.outcome
        began_s = max(asked.at_s, self._faults_end_s)
        has_time = asked.at_s + asked.deadline_s > began_s + ENOUGH_S
        is_late = outcome.startswith("deadline")
        can_decode = any(node.role is not Role.PREFILL for node in self.nodes.values())
        if is_late and has_time and can_decode:
            raise Violation(f"{asked.name} waited until its deadline, and nothing was in its way")


def _request(asked: AskedRequest) -> _Request:
    own = int(asked.name.lstrip("r") or 0) if asked.name.lstrip("r").isdigit() else 0
    prompt = prompt_of(asked.group, asked.num_shared, asked.num_prompt, own)
    right = right_answer(prompt, asked.seed, asked.max_tokens)
    trace = TraceRequest(asked.at_s, asked.num_prompt, len(right))
    client = ClientRequest(trace, own, asked.max_tokens, asked.priority)
    return _Request(asked, prompt, right, Answered(client, asked.at_s))


def _generation_request(request: _Request) -> GenerationRequest:
    asked = request.asked
    return GenerationRequest(
        id=AttemptId(asked.name, 1),
        prompt_token_ids=request.prompt,
        sampling=SamplingParams(
            max_tokens=asked.max_tokens,
            seed=asked.seed,
            stop_token_ids=(STOP_TOKEN_ID,),
            ignore_eos=True,
        ),
        deadline_s=asked.deadline_s,
        priority=asked.priority,
    )


def run_history(history: History) -> str:
    """Run a history; return what went wrong in it, empty if nothing did."""
    try:
        FaultyCluster(history).run()
    except Exception as wrong:
        return f"{type(wrong).__name__}: {wrong}"
    return ""
