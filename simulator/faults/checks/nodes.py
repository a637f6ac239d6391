"""What a node holds: its books after each turn, and its blocks and files at the end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from common.kv.blocks import BlockHash, hash_full_blocks
from common.kv.tiers import Tier
from engine.core.blocks.block_pool import BlockUse
from engine.core.sequences.status import SequenceStatus
from simulator.faults.checks.violation import Violation
from simulator.faults.contents import Numbers, states_of, values_of
from simulator.faults.node.faulty_node import FaultyNode
from simulator.faults.router import FaultyRouter


def check_node(node: FaultyNode) -> None:
    """Check the books of a node after a turn. Raises `Violation`, or what its own checks raise."""
    node.scheduler.check()
    if node.copies.wrong:
        raise Violation(f"{node.me}: {node.copies.wrong}")
    _check_sent(node)
    flow, pool = node.flow, node.scheduler.pool
    for landing in node.kv.receiver.landings.all():
        token = landing.ticket.lease_token
        targets = set(landing.ticket.target_block_ids)
        uses = {pool.use_of(block) for block in targets}
        if uses - {BlockUse.RECEIVING, BlockUse.QUARANTINED}:
            raise Violation(f"{node.me} has a landing on blocks that are used otherwise")
        attempt = flow.attempts.of_lease(token)
        waiting = SequenceStatus.WAITING_FOR_KV
        is_awaited = attempt is not None and attempt.sequence.status is waiting
        is_awaited = is_awaited or token in flow.pulls
        if not is_awaited:
            raise Violation(f"{node.me} has a landing that nobody waits for")


def _check_sent(node: FaultyNode) -> None:
    if node.kv.sent:
        _check_sources(node)
    flow = node.flow
    for token, send in flow.sends._sends.items():
        is_busy = token in node.kv.sent or token in flow._disk or not send.is_copied
        if node.kv.sender.is_sending(token) and not is_busy:
            raise Violation(f"{node.me} answers a pull, and nothing of it is on its way")


def _check_sources(node: FaultyNode) -> None:
    """Check that the blocks of every transfer have an owner."""
    flow, num_blocks = node.flow, node.scheduler.pool.num_blocks
    sent = node.scheduler.prefix_transfers.sent_ids
    owned = {block for one in flow.attempts.all() for block in one.sequence.block_table}
    kept = {num_blocks + one for one in node.scheduler.host_pool._readers}
    for blocks in node.kv.sent.values():
        if not blocks <= owned | sent:
            raise Violation(f"{node.me} sends blocks that nobody holds for it")
        if not kept.issuperset(one for one in blocks if one >= num_blocks):
            raise Violation(f"{node.me} sends a prefix that gives way in host memory")


def why_busy(nodes: Iterable[FaultyNode], routers: Iterable[FaultyRouter]) -> str:
    """Return the resources that are held although nothing runs any more; empty: none."""
    for node in nodes:
        if not node.is_empty():
            return f"{node.me} holds something"
        if not node.kv.is_idle:
            return f"{node.me} has a transfer or a landing"
        if node.kv.holds_slots:
            return f"{node.me} holds slots of its ring"
    for router in routers:
        if router.num_calls:
            return f"{router.me} waits for an answer"
        if router.why_held():
            return router.why_held()
    return ""


def check_cache(node: FaultyNode, right: Mapping[BlockHash, Numbers]) -> None:
    """Check that every cached block holds what its hash says. Raises `Violation`."""
    pool = node.scheduler.pool
    findable = set(map(pool.prefix_cache.hash_of, pool.prefix_cache.block_ids()))
    if node.all_cached().news[Tier.POOL].keys() != findable:
        raise Violation(f"{node.me} has told its routers of other blocks than it has cached")
    for block in filter(pool.prefix_cache.holds, range(pool.num_blocks)):
        found = right.get(pool.prefix_cache.hash_of(block))
        if found is None:
            raise Violation(f"{node.me} has a cached block of tokens that nobody asked for")
        if node.memory.of_block(block) != found:
            raise Violation(f"{node.me} has a cached block with something else in it")
    host_pool, num_found = node.scheduler.host_pool, 0
    for name, values in right.items():
        host_block = host_pool.find(name)
        if host_block is not None:
            num_found += 1
            if node.memory.of_host_block(host_block) != values:
                raise Violation(f"{node.me} has a prefix in host memory with something else in it")
    if num_found < host_pool.num_prefixes:
        raise Violation(f"{node.me} has a prefix in host memory that nobody asked for")


def check_files(
    files: Iterable[tuple[BlockHash, Numbers]], right: Mapping[BlockHash, Numbers]
) -> None:
    """Check that every file holds what its hash says. Raises `Violation`."""
    for name, values in files:
        if right.get(name) != values:
            raise Violation("a file of a prefix has something else in it")


def right_blocks(
    texts: Iterable[tuple[str, tuple[int, ...]]], block_size: int, fingerprint: str, revision: int
) -> dict[BlockHash, Numbers]:
    """Return what every full block of these texts, each with its salt, holds in each layer, by its
    hash, on nodes of a revision, which has this fingerprint."""
    found: dict[BlockHash, Numbers] = {}
    for salt, text in texts:
        names = hash_full_blocks(text, block_size, fingerprint, salt)
        if all(name in found for name in names):
            continue
        values = values_of(states_of(text), revision)
        for index, name in enumerate(names):
            part = slice(index * block_size, (index + 1) * block_size)
            found[name] = [of_layer[part] for of_layer in values]
    return found
