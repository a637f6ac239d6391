"""A prefill and a decode node of the simulator, or a mixed one, in which a test makes every step.

Nodes, what they say, and their KV plane are the simulator's; the runner computes hashes, and the
router does as the test says. Nothing happens by itself: messages wait in `to_nodes` and
`to_router`, what nodes ask of their connectors in `network.frames`, and nodes take turns when they
are told to. After every turn in which anything was done all books are checked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import count
from typing import Any

from common.ids import Incarnation
from common.kv.blocks import BlockHash
from common.request import GenerationRequest
from node.flow.messages import Message
from node.flow.pulls.pull_cost import PullCost
from router.core.membership import Membership
from simulator.faults.between import NodesInContact
from simulator.node import NodeSaid
from tests.simulation.scripted_node import Node, NodeSize
from tests.simulation.scripted_router import Asked, ScriptedRouter
from tests.simulation.scripted_wires import ScriptedTimeline, ScriptedWires
from tests.support.engine.build import make_request
from tests.support.engine.hash_runner import expected_tokens

PREFILL, DECODE, ROUTER = Incarnation("p", 1), Incarnation("d", 1), Incarnation("r", 1)


class World:
    """One router and its nodes. `threshold` None makes the decode node a mixed one, alone.

    With `is_async`, a step that a turn begins ends in the node's next turn, and what of it is
    computed before follows from calls of `Node.compute_on`. With `goes_on`, runners begin steps by
    themselves (`HashRunner.goes_on`).
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
        self.clock = ScriptedTimeline()
        self.network = ScriptedWires(self.clock)
        self.to_nodes: list[tuple[Incarnation, Message]] = []
        self.to_router: list[NodeSaid] = []
        """What nodes say, each thing by itself, on its way."""
        self.nodes: dict[Incarnation, Node] = {}
        self.listed: set[Incarnation] = set()
        """The nodes that the router knows, until it notices that they are gone."""
        members = Membership(model="", lease_s=1.0)
        self.between = NodesInContact(ROUTER, self._pass_on, members, self.clock)
        self.offered: list[tuple[Incarnation, tuple[BlockHash, ...]]] = []
        """What draining nodes have."""
        self.token_s = 1.0
        """What computing a token is expected to take, where a pull is thought of."""
        self.pull_cost = self.new_cost()
        self.new_lease_token = count(101).__next__
        self.d = self.join(DECODE, decode or NodeSize(), threshold)
        if threshold is not None:
            self.p = self.join(PREFILL, prefill or NodeSize())
        self.router = ScriptedRouter(
            ROUTER,
            lambda node, message: self.to_nodes.append((node, message)),
            decode=DECODE,
            prefill=None if threshold is None else PREFILL,
            clock=self.clock,
        )

    def new_cost(self) -> PullCost:
        """Return the rule by which moving KV pays."""
        return PullCost(1.0, lambda num_tokens: num_tokens * self.token_s)

    def join(self, me: Incarnation, size: NodeSize, threshold: int | None = 0) -> Node:
        """Add a node, which computes prompts up to `threshold` itself; None: all."""
        node = self.nodes[me] = Node(self, me, size, threshold)
        self.listed.add(me)
        return node

    # --- what happens -------------------------------------------------------------------------

    def ask(self, prompt: int | tuple[int, ...], **given: Any) -> Asked:
        """A request at the router; see `make_request`."""
        may_wait = given.pop("may_wait", False)
        name = given.pop("name", f"r{len(self.router.asked)}")
        return self.router.ask(make_request(prompt, name=name, **given), may_wait=may_wait)

    def outlast_faults(self) -> None:
        """What was quarantined is fenced, and patience ends."""
        for _ in range(3):
            self.settle()
            self.fence_all()
            self.advance(6.0)

    def fence_all(self) -> int:
        """Fence the blocks of all landings in quarantine; return how many landings these are."""
        held = [
            (node, token) for node in self.nodes.values() for token in node.connector.quarantined
        ]
        for node, token in held:
            node.connector.fence(token)
        return len(held)

    def hear(self, said: NodeSaid) -> None:
        """A node says something: each thing is on its way by itself."""
        self.offered += [(said.node, one.block_hashes) for one in said.offers]
        for name in ("answers", "outputs", "pulls", "refused_pulls", "offers"):
            for one in getattr(said, name):
                part = NodeSaid(said.node)
                getattr(part, name).append(one)
                self.to_router.append(part)

    def messages_arrive(self) -> None:
        """Everything between router and nodes that is on its way now, in order."""
        to_nodes, self.to_nodes = self.to_nodes, []
        for node, message in to_nodes:
            self.to_the_node(node, message)
        to_router, self.to_router = self.to_router, []
        for said in to_router:
            self.to_the_router(said)

    def to_the_node(self, node: Incarnation, message: Message) -> None:
        """One message arrives; at a node that stops, a request is refused at the door."""
        if node in self.nodes:
            self.nodes[node].put(message)

    def to_the_router(self, said: NodeSaid) -> None:
        """One answer, output or wish arrives; a wish is passed on."""
        for reply_to, answer in said.answers:
            self.router.on_reply(said.node, reply_to, answer)
        for output in said.outputs:
            self.router.on_output(said.node, output)
        self.between.take(said.node, said)

    def _pass_on(self, node: Incarnation, message: Message) -> bool:
        """Send on what a node has for another one, if the router knows that one."""
        if node in self.listed:
            self.to_nodes.append((node, message))
        return node in self.listed

    def notice(self, node: Incarnation) -> None:
        """The router notices that a node is gone, and says so to those that pull from it."""
        self.listed.discard(node)
        self.between.on_lost(node)

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
        self.clock.run_due()
        has_more = self.to_nodes or self.to_router
        return bool(
            was_busy or is_busy or has_more or any(node.is_busy for node in self.nodes.values())
        )

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
        """Time passes, and connectors and the router do what is due; nodes take no turn."""
        self.clock.pass_time(by_s)

    def stop(self, node: Node) -> None:
        """A node stops in good order; what its connector still says is read too."""
        node.inbox.close()
        node.loop.run()
        node.connector.close()
        self.clock.run_due()
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
            node.check_empty()
        for attempt, asked in self.router.asked.items():
            assert len(asked.outcomes) == 1, f"{attempt} has outcomes {asked.outcomes}"
            request = asked.request
            most = self.d.scheduler.limits.max_model_len - len(request.prompt_token_ids)
            right = right_answer(request)[:most]
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


def ask_until_reserved(world: World, **given: object) -> Asked:
    asked = world.ask(9, **given)
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
