"""Runs one history: a cluster that is broken as the history says, and checked at every step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count

from common.errors import PlacementUnavailable
from common.ids import AttemptId, Incarnation
from common.kv.blocks import BlockHash
from common.nodes import Role
from common.request import GenerationRequest, SamplingParams
from router.core.membership import ENDED_BY_NODE
from simulator.clients import ClientRequest
from simulator.faults.checks.ends import LOST_WITH_ROUTER, Ends, check_logprobs, check_time
from simulator.faults.checks.fault_times import fault_times
from simulator.faults.checks.nodes import (
    check_cache,
    check_files,
    check_node,
    right_blocks,
    why_busy,
)
from simulator.faults.checks.violation import Violation
from simulator.faults.contents import REVISIONS, STOP_TOKEN_ID, Numbers, prompt_of, right_answer
from simulator.faults.demand.grammars import grammar_of
from simulator.faults.demand.salts import Salted, Salts
from simulator.faults.fault_events import begin
from simulator.faults.history import AskedRequest, History
from simulator.faults.hosts import Paths, ProcessClock
from simulator.faults.kv.wires import KVWires
from simulator.faults.node.disk import Disk
from simulator.faults.node.faulty_node import FaultyNode, layout_of
from simulator.faults.node.life import LifeStore
from simulator.faults.roles.cluster_roles import RolesByLoad
from simulator.faults.router import Answered, FaultyRouter
from simulator.faults.shape import node_names, router_names, shape_of
from simulator.faults.store.calls import StoreCalls
from simulator.faults.store.leases import Leases
from simulator.faults.streams import RESET, NodeLink
from simulator.timeline import Timeline
from simulator.trace_file import TraceRequest

LOOK_S = 0.5
"""Seconds between two looks whether all requests and faults have ended."""
PATIENCE_S = 40.0
"""Seconds for which a resource may be held after the last request and fault have ended."""
_RETRY_S = 0.5


@dataclass(slots=True, eq=False)
class _Request:
    asked: AskedRequest
    prompt: tuple[int, ...]
    right: tuple[int, ...]
    answered: Answered


class FaultyCluster:
    """One cluster for one history; `run` once."""

    def __init__(self, history: History) -> None:
        shape = history.shape
        self.history = history
        self.timeline = Timeline()
        self.paths = Paths()
        self.leases = Leases(shape.lease_s)
        self.wires = KVWires(
            *(self.timeline, self.paths, shape.kv_message_s), lane=shape.lane, seed=history.seed
        )
        self.disk = Disk()
        self.lives: dict[Incarnation, FaultyNode] = {}
        self.nodes: dict[str, FaultyNode] = {}
        """The life of each node that is alive, by the name that it began with."""
        self.revisions: dict[str, int] = {}
        """The revision with which a node starts from now on, by name; 0 without."""
        self._lease_tokens = count(1)
        self._router_epochs = count(1)
        self._requests = [_request(asked) for asked in history.requests]
        self._salts = Salts(
            map(_salted, self._requests),
            shape.block_size,
            [layout_of(shape.block_size, revision).fingerprint for revision in REVISIONS],
        )
        self._num_open = len(self._requests)
        self._ended_at_s = 0.0
        deadlines_s = (asked.at_s + asked.deadline_s for asked in history.requests)
        self._deadlines_end_s = max(deadlines_s, default=0.0)
        self._times, self._ends = fault_times(history), Ends(history)
        self.router_stood_s = 0.0
        self.roles = RolesByLoad(history, self.timeline, self.leases, self.nodes)
        self._store = LifeStore(
            leases=self.leases,
            timeline=self.timeline,
            lease_s=shape.lease_s,
            drain_s=shape.drain_s,
            on_left=self._on_left,
            on_replaced=self._on_replaced,
            on_role=self.roles.on_role,
        )
        self.routers: dict[str, FaultyRouter] = {}
        """The life of each router that was started last, by its name."""
        for name in node_names(shape):
            self.start_node(name, name)
        for name in router_names(shape):
            self.start_router(name)

    def run(self) -> None:
        """Run the history to its end. Raises `Violation`, or any error of a broken program."""
        for request in self._requests:
            at_s = request.asked.at_s
            self.timeline.at(at_s, partial(self._arrive, request))
        for fault in self.history.faults:
            self.timeline.at(fault.at_s, partial(begin, self, fault))
        self.timeline.at(LOOK_S, self._look)
        self.timeline.run()
        self._check_end()

    def outcomes(self) -> list[tuple[str, str, list[int]]]:
        """Return how each request ended: its name, how, and the tokens that its client has."""
        answers = [(one.asked.name, one.answered) for one in self._requests]
        return [(name, answered.outcome, answered.tokens) for name, answered in answers]

    def ended_s(self) -> list[float]:
        """Return when each request ended."""
        return [one.answered.ended_at_s for one in self._requests]

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
            shape_of(self.history.shape, name),
            role,
            ProcessClock(self.timeline),
            self.wires,
            self._lease_tokens.__next__,
            self._store,
            self.disk,
            name=name,
            revision=self.revisions.get(name, 0),
            on_turn=self._check_node,
        )
        self.lives[me] = self.nodes[name] = node
        node.life.keep_lease()

    def stop_node(self, name: str, *, is_known: bool, reason: str = RESET) -> None:
        """End a node's process; its host says so, and why, if that is known.

        One that leaves in order closes its connector, which refuses those that send to it.
        """
        node, is_closed = self.nodes.pop(name), reason == ENDED_BY_NODE
        if is_closed:
            node.kv.close()
        node.clock.kill()
        node.is_death_known = is_known
        self.wires.leave(node.kv, is_closed=is_closed)
        for link in self._links():
            if link.node is node:
                link.on_node_dead(is_known=is_known, reason=reason)

    def stop_router(self, name: str, *, is_known: bool) -> None:
        """End a router's process; its requests end with it."""
        router = self.routers[name]
        router.clock.kill()
        for link in router.links.values():
            link.on_router_dead(is_known=is_known)
        for request in self._requests:
            asked = request.asked
            is_there = asked.router == name and asked.at_s <= self.timeline.now_s()
            if is_there and not request.answered.outcome:
                self._lose(request)

    def start_router(self, name: str) -> None:
        """Start a router, in another life than before."""
        shape, clock = self.history.shape, ProcessClock(self.timeline)
        me = Incarnation(name, next(self._router_epochs))
        self.routers[name] = FaultyRouter(
            self.timeline,
            clock,
            me,
            self.paths,
            StoreCalls(
                *(me, clock, self.timeline, self.paths),
                *(self.leases, self.roles.leading, shape.message_s, self.history.seed),
            ),
            self.lives,
            policy=shape.placement_policy,
            session_ttl_s=shape.session_ttl_s,
            lease_s=shape.lease_s,
            latency_s=shape.message_s,
            seed=self.history.seed,
            on_end=self._on_end,
            is_wide=shape.is_wide,
        )
        self.roles.start(self.routers[name])

    def flush(self) -> None:
        """Deliver the messages that waited for a path that is open again."""
        self.wires.flush()
        for router in self.routers.values():
            router.store.flush()
        for link in self._links():
            link.flush()

    # Inside.

    def _links(self) -> Iterator[NodeLink]:
        """Yield the links of all routers. What they do may change a router's links."""
        for router in list(self.routers.values()):
            yield from list(router.links.values())

    def _on_left(self, me: Incarnation, is_empty: bool) -> None:
        """End the process of a node that leaves in order, and start it again where that is due."""
        node = self.lives[me]
        if not is_empty and self.timeline.now_s() < self._times.first_broken_s:
            raise Violation(f"{me} drains, is not empty in time, and nothing is in its way")
        name = self._name_of(node)
        self.stop_node(name, is_known=True, reason=ENDED_BY_NODE)
        if node.restarts_in_s:
            again = partial(self.start_node, name, me.node_id)
            self.timeline.after(node.restarts_in_s, again)

    def _on_replaced(self, me: Incarnation) -> None:
        self.stop_node(self._name_of(self.lives[me]), is_known=True)

    def _name_of(self, node: FaultyNode) -> str:
        return next(name for name, one in self.nodes.items() if one is node)

    def _arrive(self, request: _Request) -> None:
        asked = request.asked
        router = self.routers[asked.router]
        if not router.clock.is_alive:
            self._lose(request)
            return
        session = asked.session.encode()
        wanted, is_cut = _generation_request(request), asked.is_cut
        ask = partial(router.ask_for, wanted, request.answered, session, is_cut_to_fit=is_cut)
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
            if now_s > self._deadlines_end_s + PATIENCE_S:
                raise Violation(f"{self._num_open} requests wait, long after their deadlines")
        elif now_s > self._times.end_s:
            why = self._why_busy()
            since_s = max(self._ended_at_s, self._times.end_s)
            if why and now_s > since_s + PATIENCE_S:
                raise Violation(f"{why}, {PATIENCE_S:g} s after the last request has ended")
            if not why:
                self.timeline.stop()
                return
        self.timeline.after(LOOK_S, self._look)

    def _why_busy(self) -> str:
        routers = self.routers.values()
        busy = why_busy(self.nodes.values(), routers)
        return busy or self.roles.why_unserved(routers)

    def _check_node(self, node: FaultyNode) -> None:
        check_node(node)
        self._salts.check(node.flow.attempts.all(), node.scheduler.pool.prefix_cache)

    def _check_end(self) -> None:
        roles = {name: node.role for name, node in self.nodes.items()}
        for request in self._requests:
            asked, answered = request.asked, request.answered
            self._ends.check(asked, answered, request.right)
            check_logprobs(asked, answered, request.prompt)
            check_time(asked, answered, self.router_stood_s)
            self._ends.check_answered(asked, answered, roles)
        self._ends.check_roles(roles.values())
        size = self.history.shape.block_size
        texts = {(one.asked.salt, (*one.prompt, *one.right)) for one in self._requests}
        right: dict[BlockHash, Numbers] = {}
        # A node that was to have an earlier one again may not have left for that.
        for revision in REVISIONS if self.revisions else (0,):
            fingerprint = layout_of(size, revision).fingerprint
            right |= right_blocks(sorted(texts), size, fingerprint, revision)
        for node in self.nodes.values():
            self._check_node(node)
            check_cache(node, right)
        for router in self.routers.values():
            if router.clock.is_running:
                router.check_blocks()
        check_files(self.disk.files(), right)


def _request(asked: AskedRequest) -> _Request:
    number = asked.name.lstrip("r")
    own = int(number) if number.isdigit() else 0
    prompt = prompt_of(asked.group, asked.num_shared, asked.num_prompt, own)
    has_grammar = bool(asked.grammar)
    right = right_answer(prompt, asked.seed, asked.max_tokens, has_grammar=has_grammar)
    trace = TraceRequest(asked.at_s, asked.num_prompt, len(right))
    client = ClientRequest(trace, own, asked.max_tokens, asked.priority)
    return _Request(asked, prompt, right, Answered(client, asked.at_s))


def _salted(request: _Request) -> Salted:
    return Salted(request.asked.name, request.asked.salt, (*request.prompt, *request.right))


def _generation_request(request: _Request) -> GenerationRequest:
    asked = request.asked
    return GenerationRequest(
        id=AttemptId(asked.name, 1),
        prompt_token_ids=request.prompt,
        sampling=SamplingParams(
            max_tokens=asked.max_tokens,
            seed=asked.seed,
            stop_token_ids=(STOP_TOKEN_ID,),
            ignore_eos=not asked.grammar,
            grammar=grammar_of(asked.grammar),
            logprobs=0 if asked.has_logprobs else None,
            prompt_logprobs=0 if asked.has_prompt_logprobs else None,
        ),
        deadline_s=asked.deadline_s,
        priority=asked.priority,
        cache_salt=asked.salt,
    )


def run_history(history: History) -> str:
    """Run a history; return what went wrong in it, empty if nothing did."""
    try:
        FaultyCluster(history).run()
    except Exception as wrong:
        return f"{type(wrong).__name__}: {wrong}"
    return ""
