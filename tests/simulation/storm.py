"""Random runs of a simulated world: each seed is one order of events, with faults in it."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

from common.ids import Incarnation
from common.settings.config import SchedulingConfig
from node.flow.messages import AbortAttempt, RouterGone
from tests.simulation.scripted_node import Node, NodeSize
from tests.simulation.scripted_router import Asked
from tests.simulation.world import ROUTER, World
from tests.support.engine.build import make_prompt
from tests.support.engine.choices import METHODS, MODES, ORDERS, REQUEUES, RESERVATIONS
from tests.support.engine.hash_runner import NUM_LAYERS
from tests.support.engine.tool_grammars import GRAMMARS

MOST_ACTIONS = 400
COMPUTES_ON_SHARE = 0.2
"""The share of actions before which a step that goes on beside the turns computes on."""
FAULTS = [
    "abort",
    "abort one leg",
    "ask again",
    "fail copy",
    "fail step",
    "fail within step",
    "fence",
    "router gone",
    "spoil commit",
    "time passes",
    "kill prefill",
    "peer lost",
]


class Storm:
    """One random run. Each action is one thing that the world can do next."""

    thresholds: tuple[int | None, ...] = (0, 0, 6, None)
    """Those of the decode node that are drawn; None: it is a mixed one, alone."""

    def __init__(self, seed: int, faults: list[str], *, is_async: bool = False) -> None:
        self.rng = random.Random(seed)
        self.rng_of_steps = random.Random(f"steps of {seed}")
        self.seed = seed
        self.faults = faults
        self.happened: Counter[str] = Counter()
        self.num_fenced = 0
        """Landings in quarantine that were fenced, by a fault or at the end."""
        rng = self.rng
        method = rng.choice(METHODS)
        self.world = World(
            threshold=rng.choice(self.thresholds),
            prefill=self._size(method),
            decode=self._size(method),
            is_async=is_async,
            goes_on=("", "early", "late")[seed // 2 % 3] if is_async else "",
        )
        self.world.network.is_one_sided = seed % 3 == 0
        for node in self.world.nodes.values():
            node.runner.num_copy_polls = seed % 4
        self.num_to_ask = rng.randint(1, 8)
        self.num_actions = MOST_ACTIONS
        self.ask_share, self.fault_share = 0.05, 0.06
        self.share_while_written = 0.3

    def _size(self, method: str) -> NodeSize:
        rng = self.rng
        return NodeSize(
            method=method,
            num_drafts=rng.randint(1, 4),
            num_host_blocks=rng.choice([4, 20]),
            keeps_prefixes=self.seed % 4 > 0,
            scheduling=SchedulingConfig(
                reservation_policy=rng.choice(RESERVATIONS),
                preemption_policy=rng.choice(ORDERS),
                preemption_mode=rng.choice(MODES),
                requeue=rng.choice(REQUEUES),
                retract_decode_steps=rng.choice([0, 4, 20]),
                enable_priority_scheduling=rng.random() < 0.5,
                skip_ahead_window=rng.choice([0, 4]),
            ),
            num_blocks=rng.randint(8, 20),
            seats=rng.randint(1, 4),
            budget=rng.randint(4, 30),
            caching=rng.random() < 0.7,
            max_queued=rng.choice([2, 100]),
        )

    def run(self) -> None:
        """Random actions, then peace: what is left must end by itself and in time."""
        for _ in range(self.num_actions):
            self._act()
        world = self.world
        for _ in range(4):
            world.settle()
            self.num_fenced += world.fence_all()
            world.advance(30.0)
        world.settle()

    # --- actions ------------------------------------------------------------------------------

    def _act(self) -> None:
        rng, world = self.rng, self.world
        if world.is_async and self.rng_of_steps.random() < COMPUTES_ON_SHARE:
            self.rng_of_steps.choice(list(world.nodes.values())).compute_on()
        share = self.share_while_written if self._written() else self.fault_share
        if rng.random() < share and self.faults:
            fault = rng.choice(self.faults)
            if getattr(self, f"_{fault.replace(' ', '_')}")():
                self.happened[fault] += 1
            return
        if rng.random() < self.ask_share and len(world.router.asked) < self.num_to_ask:
            self._ask()
            return
        rng.choice([self._node_turn, self._message, self._said, self._frame, self._frame])()

    def _written(self) -> list[tuple[Node, Incarnation]]:
        """The nodes into whose blocks others may write now, and who may."""
        return [
            (node, landing.sender)
            for node in self.world.nodes.values()
            for landing in node.connector.landings.values()
            if landing.may_be_written and landing.sender is not None
        ]

    def _ask(self) -> None:
        rng = self.rng
        length = rng.choice([1, 3, 4, 5, 8, 9, 12, rng.randint(1, 24)])
        long = rng.randint(8, 24)
        self.world.ask(
            self._prompt(length),
            seed=rng.randint(0, 3),
            max_tokens=rng.choice([1, 2, rng.randint(1, 7), long, long]),
            may_wait=rng.random() < 0.7,
            deadline_s=rng.choice([3.0, 20.0, 100.0]),
            priority=rng.randint(-2, 2),
            grammar=rng.choice([*[None] * len(GRAMMARS), *GRAMMARS]),
        )

    def _prompt(self, length: int) -> int | tuple[int, ...]:
        return length

    def _node_turn(self) -> None:
        self.world.turn(self.rng.choice(list(self.world.nodes.values())))

    def _message(self) -> None:
        """Calls overtake each other on their way to a node."""
        if self.world.to_nodes:
            index = self.rng.randrange(len(self.world.to_nodes))
            self.world.to_the_node(*self.world.to_nodes.pop(index))

    def _said(self) -> None:
        """A reply may overtake anything; outputs of one node keep their order."""
        waiting = self.world.to_router
        if not waiting:
            return
        item = self.rng.choice(waiting)
        if item.outputs:
            item = next(one for one in waiting if one.outputs and one.node == item.node)
        waiting.remove(item)
        self.world.to_the_router(item)

    def _frame(self) -> None:
        if self.world.network.frames:
            self.world.network.deliver(self.world.network.frames[0])

    # --- faults; each says whether it happened ------------------------------------------------

    def _one_asked(self) -> Asked | None:
        open_ones = [a for a in self.world.router.asked.values() if not a.is_done]
        return self.rng.choice(open_ones) if open_ones else None

    def _abort(self) -> bool:
        asked = self._one_asked()
        if asked is not None:
            self.world.router.abort(asked)
        return asked is not None

    def _abort_one_leg(self) -> bool:
        asked = self._one_asked()
        if asked is None or not asked.legs:
            return False
        node = self.rng.choice(list(asked.legs))
        self.world.to_the_node(node, AbortAttempt(ROUTER, (asked.request.id,)))
        return True

    def _ask_again(self) -> bool:
        asked = self._one_asked()
        if asked is None or self.world.router.decode not in asked.legs:
            return False
        self.world.router.send_reserve(asked)
        if asked.ticket is not None:
            self.world.router.send_prefill(asked)
        return True

    def _spoil_commit(self) -> bool:
        frames = [frame for frame in self.world.network.frames if frame.commit is not None]
        if not frames:
            return False
        frame = self.rng.choice(frames)
        assert frame.commit is not None
        frame.commit = replace(frame.commit, num_tokens=frame.commit.num_tokens + 1)
        return True

    def _fail_copy(self) -> bool:
        self.rng.choice(list(self.world.nodes.values())).runner.fail_next_copy = True
        return True

    def _fail_step(self) -> bool:
        self.rng.choice(list(self.world.nodes.values())).runner.fail_next_step = True
        return True

    def _fail_within_step(self) -> bool:
        node = self.rng.choice(list(self.world.nodes.values()))
        node.runner.fail_after_layer = self.rng.randrange(NUM_LAYERS)
        return True

    def _fence(self) -> bool:
        tokens = list(self.world.d.connector.quarantined)
        if tokens:
            self.world.d.connector.fence(self.rng.choice(tokens))
            self.num_fenced += 1
        return bool(tokens)

    def _time_passes(self) -> bool:
        self.world.advance(self.rng.choice([0.5, 2.0, 11.0]))
        return True

    def _peer_lost(self) -> bool:
        for node, sender in self._written():
            node.connector.on_peer_lost(sender)
            return True
        if len(self.world.nodes) < 2:
            return False
        one, other = self.rng.sample(list(self.world.nodes.values()), 2)
        one.connector.on_peer_lost(other.me)
        return True

    def _kill_prefill(self) -> bool:
        """Kill it, always while it may write: few landings were left for a fence otherwise."""
        may_write = any(sender == self.world.p.me for _, sender in self._written())
        if len(self.world.nodes) < 2 or (not may_write and self.rng.random() < 0.8):
            return False
        self.world.kill(self.world.p, is_noticed=self.rng.random() < 0.5)
        return True

    def _router_gone(self) -> bool:
        if self.rng.random() < 0.8:
            return False
        world = self.world
        for node in world.nodes:
            world.to_the_node(node, RouterGone(ROUTER))
        world.to_router = [said for said in world.to_router if not said.outputs]
        for asked in world.router.asked.values():
            world.router.abort(asked)
            for leg in asked.legs.values():
                leg.is_cut = True
        return True


class Conversations(Storm):
    """Most prompts continue an answer, so that prefill nodes pull what the decode node has."""

    thresholds = (0, 0, 6)

    def __init__(self, seed: int, faults: list[str], *, is_async: bool) -> None:
        super().__init__(seed, faults, is_async=is_async)
        self.num_to_ask, self.num_actions = 16, 4 * MOST_ACTIONS
        self.ask_share = self.fault_share = self.share_while_written = 0.01
        self.world.router.may_pull = True

    def _size(self, method: str) -> NodeSize:
        size = super()._size(method)
        return replace(size, caching=True, num_blocks=size.num_blocks + 16)

    def _prompt(self, length: int) -> int | tuple[int, ...]:
        answered = [one for one in self.world.router.asked.values() if one.answer()]
        if not answered or self.rng.random() < 0.2:
            return length
        before = self.rng.choice(answered)
        said = (*before.request.prompt_token_ids, *before.answer())
        return (*said, *make_prompt(1 + length % 4, length))[:64]


def end_what_nobody_answered(storm: Storm) -> None:
    """The router's own deadline, for requests whose node died or was told to drop them."""
    for asked in storm.world.router.asked.values():
        storm.world.router.abort(asked)
    storm.world.settle()


def run_to_the_end(storm: Storm, seed: int) -> None:
    """Run it, let what is open end, and hold the closing checks."""
    storm.run()
    end_what_nobody_answered(storm)
    try:
        storm.world.check_closed()
    except AssertionError as wrong:
        raise AssertionError(f"seed {seed}, after {dict(storm.happened)}: {wrong}") from wrong
