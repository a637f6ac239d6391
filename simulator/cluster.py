"""A whole cluster on one virtual clock: a router, nodes, their network and the store's listing."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import count

from common.errors import InternalError, InvalidRequest
from common.ids import Incarnation
from common.nodes import NodeLoad, NodeRecord, Role
from common.observing.latency import LatencyTargets
from common.settings.config import Config
from engine.core.scheduler import Scheduler
from node.flow.messages import RoleChanged
from node.flow.node_flow import NodeFlow
from node.flow.pulls.pull_cost import PullCost
from node.flow.step_progress import expected_step_s
from node.life.make_scheduler import make_scheduler
from node.life.possible_roles import NODE_ROLES, refused_roles
from placement.store import LiveNode
from router.core.scaling.moves import Move
from router.core.scaling.scaling import RoleScaling
from simulator.clients import ClientRequest
from simulator.execution import ModelledExecution
from simulator.kv_network import ModelledNetwork
from simulator.node import NodeSaid, SimulatedNode, flow_of
from simulator.profile import VOCAB_SIZE, DeviceProfile, facts_of
from simulator.profiles.shared_cores import SharedCores
from simulator.router import SimulatedRouter
from simulator.served import ServedRequest
from simulator.timeline import Timeline

_MESSAGES_TO_FIRST_TOKEN = 4
"""Messages before token 0 of a request that is handed off: to both of its nodes and back."""
RENEWALS_PER_LEASE = 4
"""Heartbeats of a node, and listings of a router, in the time of one lease."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSetup:
    """The number of nodes of each role, their device, and the settings of a decode node.

    A message between a router and a node takes `message_s`; the profile's `request_s` passes before
    a request is placed. Without `may_repeat` every step is planned by itself, which only makes the
    simulation slower. `told` are the indices of the requests whose story is kept. Where all nodes
    share a machine that runs `at_once` of them at full speed, steps of more nodes at once take
    longer; 0: each node has its own machine. With `targets` roles follow the load, as with
    `--auto-roles`.
    """

    profile: DeviceProfile
    num_nodes: dict[Role, int]
    config: Config = field(default_factory=lambda: Config(role=Role.DECODE))
    message_s: float = 0.5e-3
    seed: int = 0
    may_repeat: bool = True
    told: frozenset[int] = frozenset()
    at_once: int = 0
    targets: LatencyTargets | None = None


class SimulatedCluster:
    """Serves clients' requests; `run` once."""

    def __init__(self, setup: ClusterSetup) -> None:
        self._setup = setup
        self.timeline = Timeline()
        self._lease_tokens = count(1)
        config, profile = setup.config, setup.profile
        facts = facts_of(profile, config.engine.block_size)
        num_host_blocks = config.engine.prefix_host_memory // facts.layout.block_bytes
        self._facts = replace(facts, num_host_blocks=num_host_blocks)
        self.network = ModelledNetwork(
            self.timeline,
            self._facts.layout,
            bytes_per_s=profile.network_bytes_per_s,
            latency_s=profile.network_latency_s,
        )
        lease_s = config.placement.node_lease_s
        self.router = SimulatedRouter(
            self.timeline,
            policy=config.placement.placement_policy,
            session_ttl_s=config.placement.session_ttl_s,
            model=profile.model,
            lease_s=lease_s,
            latency_s=setup.message_s,
            seed=setup.seed,
            on_end=self._on_end,
        )
        self._cores = None
        if setup.at_once:
            self._cores = SharedCores(setup.at_once, profile.beside.slowdowns)
        self._records: dict[Incarnation, NodeRecord] = {}
        self.nodes = [
            self._node(Incarnation(f"{role.value}-{number}", 1), role)
            for role, num in setup.num_nodes.items()
            for number in range(num)
        ]
        self.router.connect({node.me: node.put for node in self.nodes})
        self._loads: dict[Incarnation, NodeLoad] = {n.me: n.flow.load() for n in self.nodes}
        self._renewal_s = lease_s / RENEWALS_PER_LEASE
        in_messages_s = _MESSAGES_TO_FIRST_TOKEN * setup.message_s
        self._edge_s = max(0.0, profile.beside.request_s - in_messages_s)
        self._num_open = 0
        """Requests that have not ended, and one more as long as others will come."""
        self._on_served: Callable[[ServedRequest], object] | None = None
        self.served: list[ServedRequest] = []
        self._scaling = None if setup.targets is None else RoleScaling(setup.targets)
        self.moves: list[tuple[float, Move]] = []
        """The changes of roles that followed the load, with their times."""

    @property
    def max_model_len(self) -> int:
        """Return the longest prompt and answer together that a node takes, in tokens."""
        return self._facts.max_model_len

    def run(
        self,
        clients: Sequence[ClientRequest],
        has_to_stop: Callable[[Sequence[ServedRequest], float], bool] | None = None,
    ) -> list[ServedRequest]:
        """Serve all requests to their ends; check that the nodes hold nothing afterwards.

        `has_to_stop` is called after each event, with all requests and the time; where it is true,
        the requests are returned as they are then.

        Raises `InternalError` when a request does not end, or a node is not empty afterwards.
        """
        told = self._setup.told
        self.served = [
            ServedRequest(one, one.trace.arrival_s, story=[] if one.index in told else None)
            for one in clients
        ]
        self._begin(iter(self.served))
        is_stopped = False

        def until() -> bool:
            nonlocal is_stopped
            assert has_to_stop is not None, "it is asked only if there is one"
            is_stopped = has_to_stop(self.served, self.timeline.present_s)
            return is_stopped

        self.timeline.run(None if has_to_stop is None else until)
        if not is_stopped:
            self._end()
        return self.served

    def serve_each(
        self, clients: Iterable[ClientRequest], on_served: Callable[[ServedRequest], object]
    ) -> None:
        """Serve requests as they come, ordered by arrival, and keep none: each goes to `on_served`
        when it has ended.

        Raises `InternalError` as `run` does.
        """
        self._on_served = on_served
        self._begin(ServedRequest(one, one.trace.arrival_s) for one in clients)
        self.timeline.run()
        self._end()

    def role_of(self, node: Incarnation) -> Role:
        """Return the role that a node has now."""
        return self._records[node].role

    def set_role(self, node: Incarnation, role: Role) -> None:
        """Give a node another role for new work from now on, as `NodePool.set_role` does.

        To be called by an event of the timeline, while the simulation runs. Raises
        `InvalidRequest` where the node cannot have the role.
        """
        record = self._records[node]
        if role is record.role:
            return
        if not record.can_become(role):
            raise InvalidRequest(f"{node} cannot become {role.value}", param="role")
        moved = next(one for one in self.nodes if one.me == node)
        moved.put(RoleChanged())
        self._records[node] = replace(record, role=role)
        self.timeline.after(self._setup.message_s, partial(self.router.on_role, node, role))

    def check_empty(self) -> None:
        """Raise `InternalError` unless all books are balanced and nothing is held anywhere."""
        for node in self.nodes:
            node.scheduler.check()
            if not node.is_empty():
                raise InternalError(f"{node.me} holds something after the last request")
        if not self.network.is_idle:
            raise InternalError("a transfer or a landing is open after the last request")

    # Inside: periodic events.

    def _begin(self, coming: Iterator[ServedRequest]) -> None:
        self._num_open = 1
        self._list()
        rng = random.Random(self._setup.seed)
        for node in self.nodes:
            first_s = rng.random() * self._renewal_s
            self.timeline.at(first_s, partial(self._renew, node))
        self._admit(coming)

    def _close_one(self) -> None:
        self._num_open -= 1
        if not self._num_open:
            self.timeline.stop()

    def _end(self) -> None:
        if self._num_open:
            raise InternalError(f"{self._num_open} requests wait, and nothing happens any more")
        self.timeline.run()
        self.check_empty()

    def _admit(self, coming: Iterator[ServedRequest]) -> None:
        """Schedule the arrival of the next request, which schedules the one after it."""
        served = next(coming, None)
        if served is None:
            self._close_one()
            return
        at_s = max(served.arrived_at_s, self.timeline.present_s)
        self.timeline.at(at_s, partial(self._arrive, served, coming))

    def _arrive(self, served: ServedRequest, coming: Iterator[ServedRequest]) -> None:
        self._num_open += 1
        self._admit(coming)
        if self._edge_s:
            self.timeline.after(self._edge_s, partial(self._ask, served))
        else:
            self._ask(served)

    def _ask(self, served: ServedRequest) -> None:
        self.router.ask(served.client.generation_request(), served)

    def _on_end(self, served: ServedRequest) -> None:
        self._close_one()
        if self._on_served is not None:
            self._on_served(served)

    def _tell(self, said: NodeSaid) -> None:
        self.timeline.after(self._setup.message_s, partial(self.router.on_said, said))

    def _renew(self, node: SimulatedNode) -> None:
        if self._num_open:
            self._loads[node.me] = node.flow.load()
            self.timeline.after(self._renewal_s, partial(self._renew, node))

    def _list(self) -> None:
        if self._num_open:
            live = [
                LiveNode(record=self._records[n.me], load=self._loads[n.me]) for n in self.nodes
            ]
            self.router.on_listing(live)
            self._follow_load()
            self.timeline.after(self._renewal_s, self._list)

    def _follow_load(self) -> None:
        now_s = self.timeline.present_s
        if self._scaling is None:
            return
        move = self._scaling.decide(self.router.nodes(), now_s).choice.move
        if move is not None:
            self._scaling.moves.on_moved(move.role, now_s)
            self.moves.append((now_s, move))
            self.timeline.after(self._setup.message_s, partial(self.set_role, move.node, move.role))

    # Inside: how nodes are made.

    def _node(self, me: Incarnation, role: Role) -> SimulatedNode:
        setup, facts = self._setup, self._facts
        config = replace(setup.config, role=role)
        scheduler = make_scheduler(config, facts)
        flow = self._flow(config, scheduler, me)
        execution = ModelledExecution(
            self.timeline,
            setup.profile.step,
            scheduler,
            num_layers=facts.layout.num_layers,
            may_repeat=setup.may_repeat,
            next_due_s=flow.next_deadline_s,
            cores=self._cores,
            push_s=setup.profile.beside.push_s,
        )
        self._records[me] = self._record(config, me)
        return SimulatedNode(
            me,
            self.timeline,
            flow,
            execution,
            self.network,
            facts.layout,
            max_queued_requests=config.handoff.max_queued_requests,
            tell=self._tell,
        )

    def _record(self, config: Config, me: Incarnation) -> NodeRecord:
        facts = self._facts
        return NodeRecord(
            node_id=me.node_id,
            epoch=me.epoch,
            role=config.role,
            control_address=f"{me.node_id}:1",
            model=self._setup.profile.model,
            fingerprint=facts.layout.fingerprint,
            block_size=config.engine.block_size,
            num_blocks=facts.num_blocks,
            num_host_blocks=facts.num_host_blocks,
            max_num_seqs=config.engine.max_num_seqs,
            max_model_len=facts.max_model_len,
            sends_blocks=True,
            device=self._setup.profile.device,
            roles=self._possible_roles(config.role),
        )

    @cache  # noqa: B019 (a cluster of thousands of nodes asks it for each of them)
    def _possible_roles(self, role: Role) -> tuple[Role, ...]:
        refused = refused_roles(replace(self._setup.config, role=role))
        return tuple(one for one in NODE_ROLES if one not in refused)

    def _flow(self, config: Config, scheduler: Scheduler, me: Incarnation) -> NodeFlow:
        facts = self._facts
        token_bytes = facts.layout.block_bytes / facts.layout.block_size
        return flow_of(
            config,
            facts,
            scheduler,
            me,
            vocab_size=VOCAB_SIZE,
            new_lease_token=self._lease_tokens.__next__,
            pull_cost=PullCost(token_bytes, partial(expected_step_s, facts.step_costs)),
        )
