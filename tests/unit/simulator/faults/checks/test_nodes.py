"""What a node holds: each check is given a node that holds something wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from common.kv.blocks import BlockHash
from engine.core.blocks.block_pool import BlockUse
from engine.core.sequences.status import SequenceStatus
from node.control.block_reports import CachedBlocks
from simulator.faults.checks.fault_times import FaultTimes, fault_times
from simulator.faults.checks.nodes import (
    check_cache,
    check_files,
    check_node,
    right_blocks,
    why_busy,
)
from simulator.faults.checks.violation import Violation
from simulator.faults.contents import Numbers, prompt_of, right_answer
from simulator.faults.history import AskedRequest, Fault
from simulator.faults.kinds import FaultKind
from simulator.faults.node.faulty_node import FaultyNode
from tests.unit.simulator.faults.histories import a_history, a_shape, an_asked_request, run

LEASE, BLOCK, HOST_BLOCK, NUM_BLOCKS = 7, 3, 2, 10


def a_node(**other: Any) -> Any:
    """Return what `check_node` reads of a node that receives KV, and sends a block and a prefix."""
    ticket = SimpleNamespace(lease_token=LEASE, target_block_ids=(BLOCK,))
    waiting = SimpleNamespace(status=SequenceStatus.WAITING_FOR_KV, block_table=[BLOCK])
    given: dict[str, Any] = {
        "use": BlockUse.RECEIVING,
        "attempt": SimpleNamespace(sequence=waiting),
        "pulls": (),
        "sent": {8: {BLOCK}, 9: {NUM_BLOCKS + HOST_BLOCK}},
        "sent_ids": {NUM_BLOCKS + HOST_BLOCK},
        "readers": {HOST_BLOCK: 1},
        "sends": {9: SimpleNamespace(is_copied=True)},
        "disk": (),
        "wrong": "",
        **other,
    }
    attempt = given["attempt"]
    return SimpleNamespace(
        me="d#1",
        copies=SimpleNamespace(wrong=given["wrong"]),
        scheduler=SimpleNamespace(
            check=lambda: None,
            pool=SimpleNamespace(num_blocks=NUM_BLOCKS, use_of=lambda _: given["use"]),
            prefix_transfers=SimpleNamespace(sent_ids=given["sent_ids"]),
            host_pool=SimpleNamespace(_readers=given["readers"]),
        ),
        kv=SimpleNamespace(
            sent=given["sent"],
            sender=SimpleNamespace(is_sending=lambda token: token == 9),
            receiver=SimpleNamespace(
                landings=SimpleNamespace(all=lambda: [SimpleNamespace(ticket=ticket)])
            ),
        ),
        flow=SimpleNamespace(
            attempts=SimpleNamespace(
                of_lease=lambda _: attempt, all=lambda: [] if attempt is None else [attempt]
            ),
            pulls=given["pulls"],
            sends=SimpleNamespace(_sends=given["sends"]),
            _disk=given["disk"],
        ),
    )


SENT_PREFIX = {9: {NUM_BLOCKS + HOST_BLOCK}}
QUEUED = SimpleNamespace(
    sequence=SimpleNamespace(status=SequenceStatus.WAITING, block_table=[BLOCK])
)
PULLED: dict[str, Any] = {"attempt": None, "sent": SENT_PREFIX, "pulls": (LEASE,)}


@pytest.mark.parametrize(
    "other",
    [
        {},
        {"use": BlockUse.QUARANTINED},
        PULLED,
        {"sent": {8: {BLOCK}}, "disk": (9,)},
        {"sent": {}, "sends": {9: SimpleNamespace(is_copied=False)}},
        {"sent": {}, "sends": {8: SimpleNamespace(is_copied=True)}},
    ],
)
def test_a_node_that_holds_what_it_should_is_right(other: dict[str, Any]) -> None:
    check_node(a_node(**other))


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"wrong": "block 3 is written"}, "d#1: block 3 is written"),
        ({"use": BlockUse.RUNNING}, "has a landing on blocks that are used otherwise"),
        ({**PULLED, "pulls": ()}, "has a landing that nobody waits for"),
        ({"attempt": QUEUED}, "has a landing that nobody waits for"),
        ({"sent": {}}, "answers a pull, and nothing of it is on its way"),
        ({"sent": {8: {BLOCK + 1}, **SENT_PREFIX}}, "sends blocks that nobody holds for it"),
        ({"sent_ids": set()}, "sends blocks that nobody holds for it"),
        ({"readers": {}}, "sends a prefix that gives way in host memory"),
    ],
)
def test_a_node_that_holds_something_else_is_noticed(other: dict[str, Any], says: str) -> None:
    with pytest.raises(Violation, match=says):
        check_node(a_node(**other))


def test_the_books_of_the_scheduler_are_checked_too() -> None:
    def check() -> None:
        raise AssertionError("quarantined blocks miscounted")

    node = a_node()
    node.scheduler.check = check
    with pytest.raises(AssertionError, match="miscounted"):
        check_node(node)


@pytest.mark.parametrize(
    ("node", "router", "says"),
    [
        ({}, {}, ""),
        ({"is_empty": lambda: False}, {}, "d#1 holds something"),
        ({"kv": SimpleNamespace(is_idle=False)}, {}, "d#1 has a transfer or a landing"),
        ({"kv": SimpleNamespace(is_idle=True, holds_slots=True)}, {}, "d#1 holds slots of its"),
        ({}, {"num_calls": 1}, "router#1 waits for an answer"),
        ({}, {"why_held": lambda: "the router counts"}, "the router counts"),
    ],
)
def test_what_is_held_though_nothing_runs_is_noticed(
    node: dict[str, Any], router: dict[str, Any], says: str
) -> None:
    idle = SimpleNamespace(is_idle=True, holds_slots=False)
    nodes: Any = [SimpleNamespace(**{"me": "d#1", "is_empty": lambda: True, "kv": idle, **node})]
    routers: Any = [
        SimpleNamespace(**{"me": "router#1", "num_calls": 0, "why_held": lambda: "", **router})
    ]
    found = why_busy(nodes, routers)
    assert found.startswith(says)
    assert bool(found) is bool(says)


MANY = [
    replace(an_asked_request(0.1 + 0.2 * number, f"r{number}"), group=number % 6, num_shared=24)
    for number in range(24)
]


def text_of(asked: AskedRequest) -> tuple[str, tuple[int, ...]]:
    own = int(asked.name.removeprefix("r"))
    prompt = prompt_of(asked.group, asked.num_shared, asked.num_prompt, own)
    return asked.salt, (*prompt, *right_answer(prompt, asked.seed, asked.max_tokens))


def a_node_with_prefixes() -> tuple[FaultyNode, dict[BlockHash, Numbers]]:
    """Return a node with blocks in its pool and in host memory, and what is right in each."""
    shape = replace(a_shape(), num_blocks=12, num_host_blocks=60, keeps_prefixes=True, num_decode=1)
    node = run(a_history(shape, MANY)).nodes["prefill-0"]
    texts = map(text_of, MANY)
    return node, right_blocks(texts, shape.block_size, node.layout.fingerprint, 0)


def in_pool(node: FaultyNode) -> set[BlockHash]:
    cache = node.scheduler.pool.prefix_cache
    return set(map(cache.hash_of, cache.block_ids()))


def in_host_memory(node: FaultyNode, right: dict[BlockHash, Numbers]) -> set[BlockHash]:
    return {name for name in right if node.scheduler.host_pool.find(name) is not None}


def test_cached_blocks_hold_what_their_hashes_say() -> None:
    node, right = a_node_with_prefixes()
    check_cache(node, right)
    cached, kept = in_pool(node), in_host_memory(node, right)
    assert cached
    assert kept - cached


def tell_of_nothing(node: FaultyNode, right: dict[BlockHash, Numbers]) -> None:
    node.cached = CachedBlocks()


def spoil_a_block(node: FaultyNode, right: dict[BlockHash, Numbers]) -> None:
    node.memory.spoil([next(iter(node.scheduler.pool.prefix_cache.block_ids()))])


def spoil_a_prefix(node: FaultyNode, right: dict[BlockHash, Numbers]) -> None:
    found = map(node.scheduler.host_pool.find, right)
    node.memory.spoil_host([next(one for one in found if one is not None)])


def ask_for_nothing_in_the_pool(node: FaultyNode, right: dict[BlockHash, Numbers]) -> None:
    for name in in_pool(node):
        del right[name]


def ask_for_nothing_in_host_memory(node: FaultyNode, right: dict[BlockHash, Numbers]) -> None:
    for name in in_host_memory(node, right) - in_pool(node):
        del right[name]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (tell_of_nothing, "has told its routers of other blocks than it has cached"),
        (spoil_a_block, "has a cached block with something else in it"),
        (ask_for_nothing_in_the_pool, "has a cached block of tokens that nobody asked for"),
        (spoil_a_prefix, "has a prefix in host memory with something else in it"),
        (ask_for_nothing_in_host_memory, "has a prefix in host memory that nobody asked for"),
    ],
)
def test_a_block_that_is_wrong_is_noticed(
    change: Callable[[FaultyNode, dict[BlockHash, Numbers]], None], says: str
) -> None:
    node, right = a_node_with_prefixes()
    change(node, right)
    with pytest.raises(Violation, match=rf"prefill-0#\d+ {says}"):
        check_cache(node, right)


def test_a_file_that_is_wrong_is_noticed() -> None:
    right = right_blocks([text_of(MANY[0])], 4, "a layout", 0)
    name, values = next(iter(right.items()))
    check_files([(name, values)], right)
    for wrong in ((name, values[::-1]), (b"another", values)):
        with pytest.raises(Violation, match="a file of a prefix has something else in it"):
            check_files([(name, values), wrong], right)


def test_blocks_are_named_by_their_salts_and_their_layouts() -> None:
    _, tokens = text_of(MANY[0])
    texts = [("", tokens), ("s", tokens), ("", tokens[:20])]
    assert len(right_blocks(texts, 4, "a layout", 0)) == 2 * (len(tokens) // 4)
    one, other = (right_blocks(texts[:1], 4, name, number) for number, name in enumerate("ab"))
    assert not one.keys() & other.keys()
    assert list(one.values()) != list(other.values())


def test_times_are_those_of_the_first_and_the_last_faults() -> None:
    def fault(at_s: float, kind: FaultKind, span_s: float = 0.0) -> Fault:
        return Fault(at_s=at_s, kind=kind, target="decode-0", other="router", span_s=span_s)

    shape, inf = a_shape(), float("inf")
    assert fault_times(a_history(shape, [])) == FaultTimes(inf, inf, inf, 0.0)
    role = fault(1.0, FaultKind.ROLE)
    assert fault_times(a_history(shape, [], role)) == FaultTimes(inf, inf, inf, 1.0)
    faults = (
        fault(7.0, FaultKind.CRASH),
        fault(3.0, FaultKind.STEP, 9.0),
        fault(2.0, FaultKind.DISK),
    )
    assert fault_times(a_history(shape, [], role, *faults)) == FaultTimes(3.0, 3.0, inf, 12.0)
    drained = fault_times(a_history(shape, [], fault(4.0, FaultKind.UPGRADE, 2.0)))
    assert drained.first_drain_s == 4.0
    assert drained.first_broken_s == inf
    assert drained.end_s > 4.0 + 2.0 + shape.drain_s
