"""What a router knows of its nodes: their views, and their blocks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from common.errors import InternalError
from common.ids import Incarnation
from common.kv.blocks import BlockHash, block_keys
from common.kv.tiers import Tier
from common.nodes import Role
from router.core.known.block_index import BlockIndex
from router.core.known.node_view import NodeView
from router.core.known.roster import Kind, Roster
from router.core.membership import Membership


def check_views(membership: Membership) -> None:
    """Check that nodes are chosen by what they are and hold now, as far as this router was told.

    Raises `InternalError`.
    """
    roster = membership.nodes()
    members = membership._members.items()
    wanted = {node: membership._view(one) for node, one in members if one.can_be_chosen}
    found = {view.incarnation: view for view in roster}
    if found != wanted:
        wrong = next(node for node in {**found, **wanted} if found.get(node) != wanted.get(node))
        raise InternalError(f"{wrong} is known as {found.get(wrong)}, and is {wanted.get(wrong)}")
    for kind in roster.kinds():
        _check_kind(roster, kind)
    used = {node for node, one in members if one.own.num_requests}
    if membership.used != used or not membership.suspects.keys() <= membership._members.keys():
        raise InternalError(f"{membership.used} count as used: {used} have requests")


def check_suspected(membership: Membership, node: Incarnation, why: str) -> None:
    """Check that a node that was just heard is suspected exactly if nothing is done on it.

    `why` says why nothing is; empty: the node works. Raises `InternalError`.
    """
    is_known = node in membership._members
    if is_known and (node in membership.suspects) is not bool(why):
        counts = f"working, and {why}" if why else "suspected, and works"
        raise InternalError(f"{node} counts as {counts}")


def check_roles(
    nodes: Iterable[NodeView],
    told: Mapping[Incarnation, Role],
) -> None:
    """Check that a node is known with the role that it has told, if none came after it.

    Raises `InternalError`.
    """
    for view in nodes:
        node, role = view.incarnation, told.get(view.incarnation)
        if role not in (None, view.record.role):
            raise InternalError(f"{node} counts as {view.record.role}, and has told {role}")


def _check_kind(roster: Roster, kind: Kind) -> None:
    """Check the lists of nodes that are alike."""
    alike = [one for one in roster if roster._standings[one.incarnation].kind is kind]
    staying = [one for one in alike if not one.load.is_draining]
    ready = [one for one in staying if not one.is_suspected]
    for name, views, nodes in (
        ("staying", staying, kind.staying),
        ("ready", ready, kind.ready),
        ("free", [one for one in ready if not one.is_full], kind.free),
    ):
        wanted = [one.incarnation for one in views]
        if nodes != wanted:
            raise InternalError(f"{nodes} count as {name}: {wanted} are")


def check_blocks(
    index: BlockIndex, node: Incarnation, told: Mapping[Tier, Iterable[BlockHash]]
) -> None:
    """Check that the blocks that are known of a node are those that it has told of.

    Raises `InternalError`.
    """
    slot = index._slots.get(node, -1)
    held = index._held.get(slot, {})
    names = {tier: set(block_keys(of_tier)) for tier, of_tier in told.items()}
    for tier, wanted in names.items():
        if held.get(tier, set()) != wanted:
            wrong = len(held.get(tier, set()) ^ wanted)
            raise InternalError(f"{wrong} blocks of {node} in {tier} are not those that it told of")
    found = {key for key, holders in index._holders.items() if slot >= 0 and holders >> slot & 1}
    if found != set().union(*names.values()):
        raise InternalError(f"{node} is looked up for other blocks than it told of")
