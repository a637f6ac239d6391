"""A prefill and a decode node answer like a single node, over any connector.

Flows, step threads and connectors are those of real nodes. The next token of their model depends on
every byte of a sequence's KV as the decode node holds it.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from contextlib import closing
from functools import partial
from itertools import count, cycle, product
from pathlib import Path
from typing import Any

import pytest

from common.ids import Incarnation
from common.kv.blocks import BlockHash, hash_full_blocks
from common.kv.prefix_source import PrefixSource
from common.observing.clock import MonotonicClock
from engine.core.blocks.disk_index import DiskIndex
from engine.core.planner_contract import StepLimits
from engine.core.scheduler import Scheduler
from engine.prefix_disk.block_folder import BlockFolder
from engine.prefix_disk.disk_threads import DiskThreads
from engine.step_loop import StepLoop, start_step_thread
from kv_transfer.shared.lanes import POOL_ONLY_LANES
from node.flow.flow_limits import FlowLimits
from node.flow.inbox import Inbox
from node.flow.landing_place import LandingPlace, Tickets
from node.flow.messages import (
    Answer,
    AskBlocks,
    Effect,
    Message,
    PullRefused,
    RefusePull,
    SendBlocks,
    SendOutput,
)
from node.flow.node_flow import NodeFlow
from node.flow.perform_effects import NodeEffects
from node.flow.pulls.pull_cost import PullCost
from tests.simulation.scripted_router import Asked, ScriptedRouter
from tests.support.clocks.waiting import wait_until
from tests.support.engine.build import BLOCK_SIZE, make_prompt, make_request
from tests.support.engine.hash_grammars import GRAMMARS
from tests.support.engine.hash_runner import EOS_TOKEN_ID, VOCAB_SIZE, HashRunner, expected_tokens
from tests.support.kv.kinds import KINDS
from tests.support.kv.kv_cluster import WAIT_S, Cluster, cluster_of
from tests.support.kv.kv_cluster import Node as KVNode

NUM_BLOCKS = 24
PEER_TIMEOUT_S = 20.0
ROUTER = Incarnation("r", 1)
LIMITS = StepLimits(
    max_num_seqs=4,
    # Longer prompts are computed, and leave, in several chunks.
    max_num_batched_tokens=16,
    block_size=BLOCK_SIZE,
    max_model_len=NUM_BLOCKS * BLOCK_SIZE,
    num_speculative_tokens=0,
)
LEASE_TOKENS = count(101)
"""No two nodes draw the same one."""
FLOW_LIMITS = FlowLimits(
    vocab_size=VOCAB_SIZE,
    max_model_len=LIMITS.max_model_len,
    max_queued_requests=100,
    has_grammars=True,
)

MakeFlow = Callable[[Scheduler, KVNode], NodeFlow]
OnRouter = Callable[[ScriptedRouter], None]


class Node:
    """A flow in its step thread over a connector; its messages wait for the router's turn.

    With a `disk` it has little memory, and files in that folder below it.
    """

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        make_flow: MakeFlow,
        said: Said,
        disk: Path | None = None,
    ) -> None:
        num_blocks, num_host_blocks = (NUM_BLOCKS, 0) if disk is None else (9, 10)
        runner = HashRunner(
            num_blocks=num_blocks, block_size=BLOCK_SIZE, num_host_blocks=num_host_blocks
        )
        self.inbox = Inbox(max_requests=100)
        self.kv = cluster.node(
            name,
            layout=runner.layout,
            num_blocks=num_blocks,
            num_host_blocks=num_host_blocks,
            peer_timeout_s=PEER_TIMEOUT_S,
            on_event=self.inbox.put,
        )
        runner.kv_bytes = self.kv.pool
        self.disk, index = None, None
        if disk is not None:
            assert self.kv.host is not None
            runner.host_cache = self.kv.host
            folder = BlockFolder(disk, runner.layout.fingerprint, self.kv.host)
            self.disk = DiskThreads(folder)
            index = DiskIndex(1 << 30, folder.file_bytes)
        self.scheduler = scheduler = Scheduler(
            limits=LIMITS,
            num_blocks=num_blocks,
            fingerprint=runner.layout.fingerprint,
            eos_token_ids=frozenset({EOS_TOKEN_ID}),
            enable_prefix_caching=True,
            num_host_blocks=num_host_blocks,
            keeps_prefixes=num_host_blocks > 0,
            disk_index=index,
            swaps_late=runner.needs_staging,
        )
        self.flow = make_flow(scheduler, self.kv)
        heard = said.by(self.kv.incarnation)
        effects = NodeEffects(
            self.kv.connector,
            heard,
            heard,
            runner,
            on_drained=lambda: None,
            on_copied=self.inbox.put,
            disk=self.disk,
        )
        loop: StepLoop[Message, Effect] = StepLoop(
            inbox=self.inbox,
            flow=self.flow,
            runner=runner,
            perform=effects.perform_effect,
            flush=lambda: None,
            clock=MonotonicClock(),
        )
        self._thread = start_step_thread(loop, said.that_it_crashed)

    def is_on_disk(self, block_hash: BlockHash) -> bool:
        index = self.scheduler.disk_prefixes.index
        return index is not None and index.find(block_hash) is not None

    def is_in_memory(self, block_hash: BlockHash) -> bool:
        pool, host_pool = self.scheduler.pool.prefix_cache, self.scheduler.host_pool
        return pool.find(block_hash) is not None or host_pool.find(block_hash) is not None

    def close(self) -> None:
        self.inbox.close()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        if self.disk is not None:
            self.disk.close(WAIT_S)


class Said:
    """The nodes' messages, in order, as calls on the router. Any thread may add."""

    def __init__(self) -> None:
        self._calls: queue.Queue[OnRouter] = queue.Queue()

    def by(self, node: Incarnation) -> Any:
        """Receives the answers and outputs of one node."""
        return _Ears(node, self._calls.put)

    def that_it_crashed(self) -> None:
        def fail(_: ScriptedRouter) -> None:
            raise AssertionError("a step thread died")

        self._calls.put(fail)

    def tell(self, router: ScriptedRouter) -> None:
        """Wait for the next message and deliver it."""
        self._calls.get(timeout=3 * WAIT_S)(router)


class _Ears:
    def __init__(self, node: Incarnation, put: Callable[[OnRouter], None]) -> None:
        self._node = node
        self._put = put

    def resolve(self, reply_to: int, answer: Answer) -> None:
        self._put(lambda router: router.on_reply(self._node, reply_to, answer))

    def add(self, sent: SendOutput) -> None:
        self._put(lambda router: router.on_output(self._node, sent.output))

    def ask(self, wanted: AskBlocks) -> None:
        message = SendBlocks(wanted.router, wanted.ticket, wanted.block_hashes)
        self._put(lambda router: router.send(wanted.source, message))

    def refuse(self, refused: RefusePull) -> None:
        message = PullRefused(refused.lease_token)
        self._put(lambda router: router.send(refused.node, message))


def make_flow(scheduler: Scheduler, node: KVNode) -> NodeFlow:
    return NodeFlow(
        scheduler,
        FLOW_LIMITS,
        tickets=Tickets(landing_place(node), partial(next, LEASE_TOKENS)),
        needs_staging=True,
        local_prefill_threshold=0,
        pull_cost=PullCost(1.0, float),
        disk_cost=PullCost(1.0, float) if scheduler.disk_prefixes.index is not None else None,
    )


def landing_place(node: KVNode) -> LandingPlace:
    return LandingPlace(
        node=node.incarnation,
        kv_endpoint=node.connector.endpoint,
        fingerprint=node.layout.fingerprint,
        kv_description="hashes",
        layer_bytes=tuple(one.num_bytes for one in node.layout.layers),
        lease_s=60.0,
    )


def questions(router: ScriptedRouter) -> list[Asked]:
    """Return prompts of every length that matters to blocks and chunks, greedy and sampled.

    Answers follow a grammar or none, by turns.
    """
    lengths = (2, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 16, 17, 41)
    grammars = cycle((None, *GRAMMARS))
    return [
        router.ask(
            make_request(
                length, name=f"r{seed}-{length}", seed=seed, temperature=float(seed % 2),
                max_tokens=8 if grammar else 4, grammar=grammar,
            ),
            may_wait=True,
        )
        for (seed, length), grammar in zip(product((0, 1, 3), lengths), grammars, strict=False)
    ]  # fmt: skip


@pytest.mark.covers("F41", "F44")
def test_two_nodes_answer_as_one(cluster: Cluster) -> None:
    """Chunks, batches, prefix hits on either side, one lane or another, grammars."""
    said = Said()
    nodes = [
        Node(cluster, "p", make_flow, said),
        Node(cluster, "d", make_flow, said),
    ]
    prefill, decode = nodes
    inbox_of = {node.kv.incarnation: node.inbox for node in nodes}
    router = ScriptedRouter(
        ROUTER,
        lambda node, message: inbox_of[node].put(message),
        decode=decode.kv.incarnation,
        prefill=prefill.kv.incarnation,
        clock=MonotonicClock(),
    )
    try:
        asked = questions(router)
        while not all(one.is_done for one in asked):
            said.tell(router)
    finally:
        for node in nodes:
            node.close()
    for one in asked:
        assert one.outcomes == ["finished"], one.error
        assert one.answer() == expected_tokens(one.request.prompt_token_ids, one.request.sampling)
        assert not one.is_local
    # More blocks than a node has were handed off: early ones are known to be over.
    ended = prefill.kv.connector.statistics().measured.ended
    assert {lane for (lane, outcome), n in ended.items() if n and outcome == "committed"} == {
        cluster.lane
    }


def test_a_prefill_node_pulls_from_another_one(cluster: Cluster) -> None:
    """Over every lane; and what is not there any more is said, not waited for."""
    said = Said()
    nodes = [
        Node(cluster, "p", make_flow, said),
        Node(cluster, "q", make_flow, said),
        Node(cluster, "d", make_flow, said),
    ]
    first, second, decode = nodes
    router = router_of(nodes, decode=decode, prefill=first)

    def answer(prompt: tuple[int, ...], name: str, **way: Any) -> None:
        asked = router.ask(make_request(prompt, name=name, max_tokens=3, **way), may_wait=True)
        while not asked.is_done:
            said.tell(router)
        assert asked.outcomes == ["finished"], asked.error
        assert asked.answer() == expected_tokens(prompt, asked.request.sampling)

    prompt = make_prompt(5 * BLOCK_SIZE + 1, 3)
    try:
        answer(prompt, "first")
        router.prefill = second.kv.incarnation
        router.source = PrefixSource(first.kv.incarnation, 5 * BLOCK_SIZE)
        answer((*prompt, 1), "greedy")
        router.source = PrefixSource(first.kv.incarnation, 7 * BLOCK_SIZE)
        answer((*prompt, *make_prompt(9, 4)), "sampled", temperature=1.0, seed=5)
    finally:
        for node in nodes:
            node.close()
    counted = second.scheduler.statistics().counters
    assert (counted.pulls["landed"], counted.pulls["missed"]) == (1, 1)
    assert counted.num_pulled_tokens == 5 * BLOCK_SIZE


@pytest.mark.parametrize("kind", [one for one in KINDS if one != "fake-late"])
def test_a_prefill_node_pulls_what_another_one_has_on_disk_alone(kind: str, tmp_path: Path) -> None:
    """Over every lane that sends host memory; over the others it is computed."""
    with closing(cluster_of(kind)) as cluster:
        check_a_pull_from_disk(cluster, tmp_path / "prefixes")


def router_of(nodes: list[Node], *, decode: Node, prefill: Node) -> ScriptedRouter:
    inbox_of = {node.kv.incarnation: node.inbox for node in nodes}
    return ScriptedRouter(
        ROUTER,
        lambda node, message: inbox_of[node].put(message),
        decode=decode.kv.incarnation,
        prefill=prefill.kv.incarnation,
        clock=MonotonicClock(),
    )


def check_a_pull_from_disk(cluster: Cluster, disk: Path) -> None:
    said = Said()
    nodes = [
        Node(cluster, "p", make_flow, said, disk),
        Node(cluster, "q", make_flow, said),
        Node(cluster, "d", make_flow, said),
    ]
    first, second, decode = nodes
    router = router_of(nodes, decode=decode, prefill=first)

    numbers = count()

    def answer(family: int) -> None:
        number = next(numbers)
        prompt = (*make_prompt(4 * BLOCK_SIZE, family), number)
        asked = router.ask(make_request(prompt, name=f"r{number}", max_tokens=3), may_wait=True)
        while not asked.is_done:
            said.tell(router)
        assert asked.outcomes == ["finished"], asked.error
        assert asked.answer() == expected_tokens(prompt, asked.request.sampling)

    sends_host = cluster.lane not in POOL_ONLY_LANES
    fingerprint = first.kv.layout.fingerprint
    shared = hash_full_blocks(make_prompt(4 * BLOCK_SIZE, 0), BLOCK_SIZE, fingerprint)
    try:
        for family in range(1, 200):
            # Used until it is written, and then no more until all memory has lost it.
            if not all(map(first.is_on_disk, shared)):
                answer(0)
            elif not any(map(first.is_in_memory, shared)):
                break
            answer(family)
            answer(family)
        router.prefill = second.kv.incarnation
        router.source = PrefixSource(first.kv.incarnation, 4 * BLOCK_SIZE, 4 * BLOCK_SIZE)
        answer(0)
        if sends_host:
            sent = first.scheduler.counters.prefix_blocks_sent
            wait_until(lambda: any(sent.values()), "the source knows that its blocks landed")
    finally:
        for node in nodes:
            node.close()
    pulls = second.scheduler.statistics().counters.pulls
    assert pulls["landed" if sends_host else "missed"] == 1
    sent = first.scheduler.statistics().counters.prefix_blocks_sent
    assert sent == {"pool": 0, "host": 0, "disk": 4 if sends_host else 0}
