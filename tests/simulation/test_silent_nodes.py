"""Routers that are cut off by all nodes at once, nodes that fall silent or get nothing: at random.

Two prefill and two decode nodes under a router that decides as the real one does. Whatever the
moment, every answer ends with the right tokens, and nothing stays held.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from common.ids import Incarnation
from common.prompt_logprobs import PromptLogprobs
from node.flow.messages import RouterGone
from router.core.candidates import WAIT_S
from tests.simulation.drained_cluster import Cluster
from tests.simulation.scripted_node import NodeSize
from tests.simulation.world import ROUTER
from tests.support.engine.build import check_idle
from tests.support.engine.hash_runner import expected_prompt_logprobs
from tests.support.examples import everyday

NUM_RUNS = everyday(12, of=120)


class Disturbed(Cluster):
    """A cluster whose router does not hear its nodes for a while."""

    def cut_off(self) -> tuple[list[Incarnation], list[Incarnation]]:
        """Every node gave the router up, which stood still; return who is to be heard again."""
        router: Any = self.router
        known = list(router.decoders), list(router.prefillers)
        for node in self.nodes.values():
            node.inbox.put(RouterGone(ROUTER))
        router.on_cut_off()
        self.to_nodes, self.to_router = [], []  # also what was sent on streams that had ended
        return known

    def hear_again(self, decoders: list[Incarnation], prefillers: list[Incarnation]) -> None:
        router: Any = self.router
        for node in decoders:
            router.on_node_heard(node, is_prefill=False)
        for node in prefillers:
            router.on_node_heard(node, is_prefill=True)


def random_event(
    world: Disturbed, rng: random.Random, silent: set[Incarnation], unreached: set[Incarnation]
) -> None:
    """One thing that can happen next; what a silent node says, and what an unreached one is told,
    stays on its way."""
    heard = [item for item in world.to_router if item.node not in silent]
    told = [item for item in world.to_nodes if item[0] not in unreached]
    match rng.choice(["turn", "turn", "message", "said", "frame", "frame", "time"]):
        case "turn":
            world.turn(rng.choice(list(world.nodes.values())))
        case "message" if told:
            world.to_nodes.remove(told[0])
            world.to_the_node(*told[0])
        case "said" if heard:
            world.to_router.remove(heard[0])
            world.to_the_router(heard[0])
        case "frame" if world.network.frames:
            world.network.deliver(world.network.frames[0])
        case "time":
            world.advance(0.05)


def run(seed: int) -> Counter[str]:
    """One random run: a node is silent for a while, and once all nodes cut the router off."""
    rng = random.Random(seed)
    size = NodeSize(
        budget=rng.randint(5, 20),
        num_blocks=rng.randint(16, 24),
        seats=rng.randint(2, 4),
        method=rng.choice(["none", "ngram", "mtp"]),
        num_drafts=2,
    )
    world = Disturbed(threshold=rng.choice([0, 6, None]), size=size)
    router: Any = world.router
    clients: list[Any] = []
    silent: set[Incarnation] = set()
    unreached: set[Incarnation] = set()
    silence, cut = sorted(rng.sample(range(20, 180), 2))
    happened: Counter[str] = Counter()
    for number in range(260):
        if len(clients) < 6 and rng.random() < 0.2:
            length, name = rng.randint(1, 16), f"c{len(clients)}"
            num_top = (None, 0, 2)[number % 3]
            asked = {"max_tokens": rng.randint(1, 14), "prompt_logprobs": num_top}
            clients.append(world.ask(length, name=name, seed=number, **asked))
        if number == silence:
            suspected, is_heard = {rng.choice(list(world.nodes))}, rng.random() < 0.5
            silent, unreached = (set(), suspected) if is_heard else (suspected, set())
            router.on_node_suspected(*suspected, is_heard=is_heard)
        if number == silence + 25 and silent | unreached:
            (node,), silent, unreached = silent | unreached, set(), set()
            router.on_node_trusted(node)
        if number == cut:
            silent = unreached = set()
            known = world.cut_off()
        if number == cut + 10:
            world.hear_again(*known)
            world.advance(WAIT_S)
        random_event(world, rng, silent, unreached)
    world.settle()
    world.advance(WAIT_S)
    world.end(*clients)
    for one in world.nodes.values():
        check_idle(one.scheduler)
    for client in clients:
        happened["continued"] += any(known > 0 for _, known in client.asked)
        happened["attempts"] += client.num_attempts
        happened["answers"] += 1
        right = right_prompt_logprobs(client)
        assert client.prompt_logprobs == right, "they are lost, doubled or wrong"
        happened["scored"] += len(right)
        happened["scored and continued"] += bool(right) and any(n > 0 for _, n in client.asked)
    assert not any(item.outputs for item in world.to_router)
    return happened


def right_prompt_logprobs(client: Any) -> list[PromptLogprobs]:
    """What the client must have got of its prompt, at most once."""
    prompt, num_top = client.request.prompt_token_ids, client.request.sampling.prompt_logprobs
    if num_top is None or len(prompt) == 1:
        return []
    return [expected_prompt_logprobs(prompt, num_top)]


def test_a_router_that_is_cut_off_and_silent_nodes_cost_no_answer() -> None:
    happened: Counter[str] = Counter()
    for seed in range(NUM_RUNS):
        try:
            happened += run(seed)
        except AssertionError as wrong:
            raise AssertionError(f"seed {seed}: {wrong}") from wrong
    assert happened["continued"] > NUM_RUNS // 2, happened
    assert happened["scored and continued"] > NUM_RUNS // 4, happened
    assert happened["attempts"] > happened["answers"] + NUM_RUNS, happened
