"""Warnings about a cluster: nodes that are missing, or whose KV no node can take."""

from __future__ import annotations

from collections.abc import Sequence

from common.nodes import NodeRecord, Role
from router.core.known.node_view import NodeView
from router.core.membership import Membership

MAX_WARNINGS = 8
MAX_NAMED = 8


def what_is_missing(
    heard: Sequence[NodeView], membership: Membership, *, model: str, others: Sequence[str]
) -> str:
    """Return why no node can finish an answer, with what is heard and what the store lists.

    `others`: the models of listed nodes that do not serve this router's `model`.
    """
    finishers = [node for node in heard if node.record.role is not Role.PREFILL]
    if finishers:
        return "every decode or mixed node is draining"
    facts = ["no decode or mixed node is heard"]
    if heard:
        facts.append(_counted(len(heard), "prefill node is", "prefill nodes are"))
    if membership.is_store_away:
        facts.append("the placement store is away")
    elif membership.num_listed:
        nodes = _counted(membership.num_listed, "node", "nodes")
        facts.append(f"the placement store lists {nodes} of this model")
    elif membership.num_other_versions:
        nodes = _counted(membership.num_other_versions, "node", "nodes")
        facts.append(f"the placement store lists {nodes} of another protocol version")
    elif membership.num_other_tokenizers:
        nodes = _counted(membership.num_other_tokenizers, "node", "nodes")
        facts.append(f"the placement store lists {nodes} with another tokenizer")
    elif not others:
        facts.append("the placement store lists none")
    if others:
        facts.append(f"nodes serve {', '.join(others)}, this router {model}")
    return ", ".join(facts)


def unlisted_nodes(membership: Membership) -> list[str]:
    """Return a sentence when the store lacks the leases of nodes that are heard, else nothing."""
    unlisted = membership.unlisted()
    if not unlisted:
        return []
    named = ", ".join(str(node) for node in unlisted[:MAX_NAMED])
    more = f" and {len(unlisted) - MAX_NAMED} more" if len(unlisted) > MAX_NAMED else ""
    heard = _counted(len(unlisted), "node is heard", "nodes are heard")
    return [f"{heard} that the placement store does not list ({named}{more}): it takes no leases"]


def unpaired_prefill_nodes(records: Sequence[NodeRecord]) -> list[str]:
    """Return a sentence for each prefill node whose KV no decode node can take.

    At most `MAX_WARNINGS`, with both sides' values. Without a decode node there is nothing to
    compare.
    """
    decoders = [record for record in records if record.role is Role.DECODE]
    if not decoders:
        return []
    return [
        f"{record.node_id} can hand nothing off: its KV cache "
        f"({described(record)}) is not that of {_those_of(decoders)}"
        for record in records
        if record.role is Role.PREFILL and not any(map(record.can_exchange_kv, decoders))
    ][:MAX_WARNINGS]


def described(record: NodeRecord) -> str:
    """Return a readable description of a node's KV cache and of how it is carried."""
    layout = record.kv_description or f"fingerprint {record.fingerprint}"
    return f"{layout}, KV protocol {record.kv_protocol}"


def _those_of(decoders: Sequence[NodeRecord]) -> str:
    """Describe one decode node for each layout."""
    by_layout = {(r.fingerprint, r.kv_protocol): r for r in reversed(decoders)}
    return ", ".join(
        f"{record.node_id} ({described(record)})"
        for record in list(by_layout.values())[::-1][:MAX_WARNINGS]
    )


def _counted(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"
