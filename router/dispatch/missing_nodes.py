"""Why no node can finish an answer: for `/ready`, and for requests that end because of it."""

from __future__ import annotations

from collections.abc import Sequence

from common.nodes import Role
from router.core.known.node_view import NodeView
from router.core.membership import Membership


def what_is_missing(heard: Sequence[NodeView], membership: Membership) -> str:
    """Return why no node can finish an answer, with what is heard and what the store lists."""
    finishers = [node for node in heard if node.record.role is not Role.PREFILL]
    if finishers:
        return "every decode or mixed node is draining"
    others = membership.other_models
    facts = ["no decode or mixed node is heard"]
    if heard:
        facts.append(counted(len(heard), "prefill node is", "prefill nodes are"))
    if membership.is_store_away:
        facts.append("the placement store is away")
    elif membership.num_listed:
        nodes = counted(membership.num_listed, "node", "nodes")
        facts.append(f"the placement store lists {nodes} of this model")
    elif membership.num_other_versions:
        nodes = counted(membership.num_other_versions, "node", "nodes")
        facts.append(f"the placement store lists {nodes} of another protocol version")
    elif membership.num_other_tokenizers:
        nodes = counted(membership.num_other_tokenizers, "node", "nodes")
        facts.append(f"the placement store lists {nodes} with another tokenizer")
    elif not others:
        facts.append("the placement store lists none")
    if others:
        facts.append(f"nodes serve {', '.join(others)}, this router {membership.model}")
    return ", ".join(facts)


def counted(number: int, one: str, many: str) -> str:
    """Return a number with its noun."""
    return f"{number} {one if number == 1 else many}"
