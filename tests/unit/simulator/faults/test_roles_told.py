"""Which roles a router was told by nodes: those that they have not changed since."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from common.errors import InternalError
from common.ids import Incarnation
from common.nodes import Role
from router.core.known.member_effects import MembershipEffect
from router.core.membership import Membership
from simulator.faults.history import Fault
from simulator.faults.kinds import FaultKind
from simulator.faults.shape import ROUTER
from tests.unit.simulator.faults.histories import a_history, a_shape, an_asked_request, run

OTHER = "router-2"
SHAPE = replace(a_shape(), num_routers=2, lease_s=20.0)
"""Routers ask the store every five seconds, unless a node has told them something."""
ASKED = [an_asked_request(3.4 + 1e-3 * number, f"r{number}") for number in range(20)]


def a_role(at_s: float, router: str, role: Role) -> Fault:
    kind = FaultKind.ROLE
    return Fault(at_s=at_s, kind=kind, target="decode-1", other=router, how=role.value)


def roles_told(*roles: Fault) -> dict[str, list[Role]]:
    """Return the roles that each router was told at the end."""
    cluster = run(a_history(SHAPE, ASKED, *roles))
    return {name: list(one.beside.roles_told().values()) for name, one in cluster.routers.items()}


def test_a_role_that_another_router_has_given_since_was_not_told_here() -> None:
    first = a_role(1.5, ROUTER, Role.PREFILL)
    assert roles_told(first) == {ROUTER: [Role.PREFILL], OTHER: []}
    second = a_role(2.5, OTHER, Role.MIXED)
    assert roles_told(first, second) == {ROUTER: [], OTHER: [Role.MIXED]}
    back = a_role(3.0, OTHER, Role.PREFILL)
    assert roles_told(first, second, back) == {ROUTER: [], OTHER: [Role.PREFILL]}


def test_a_role_that_is_given_again_was_told_last() -> None:
    again = a_role(1.5, ROUTER, Role.PREFILL), a_role(2.5, ROUTER, Role.DECODE)
    assert roles_told(*again) == {ROUTER: [Role.DECODE], OTHER: []}
    same = a_role(1.5, ROUTER, Role.PREFILL), a_role(2.5, OTHER, Role.PREFILL)
    assert roles_told(*same) == {ROUTER: [Role.PREFILL], OTHER: [Role.PREFILL]}


def test_a_router_that_does_not_know_the_role_that_it_was_told_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forget(_: Membership, node: Incarnation, role: Role) -> Sequence[MembershipEffect]:
        return ()

    monkeypatch.setattr(Membership, "on_role", forget)
    # Others do not hear of the role before they have asked the store.
    roles_told(a_role(3.4, OTHER, Role.PREFILL))
    with pytest.raises(InternalError, match=r"decode-1#\d+ counts as Role.DECODE, and has told"):
        roles_told(a_role(3.4, ROUTER, Role.PREFILL))
