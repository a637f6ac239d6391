"""Which of a router's clients are ticked, and which rest."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from common.ids import Incarnation
from router.dispatch.liveness.pace import WIDE_NODES
from router.dispatch.node_pool import tick_all

NODES = [Incarnation(f"d{number:03}", 1) for number in range(WIDE_NODES)]
NONE: frozenset[Incarnation] = frozenset()
USED = {"is_wide": True, "is_used": True, "is_alarm": False}
MISSED = {"is_wide": True, "is_used": False, "is_alarm": True}
WOKEN = {"is_wide": True, "is_used": False, "is_alarm": False}
OF_FEW = {"is_wide": False, "is_used": True, "is_alarm": False}


def clients(num_nodes: int = WIDE_NODES, *, can_rest: bool = True) -> dict[Incarnation, Mock]:
    """Return one client for each of the first nodes."""
    found = {node: Mock() for node in NODES[:num_nodes]}
    for client in found.values():
        client.liveness.rest.return_value = can_rest
    return found


def asked(found: dict[Incarnation, Mock]) -> dict[Incarnation, dict[str, bool]]:
    """Return how each client was ticked that was."""
    return {node: one.tick.call_args.kwargs for node, one in found.items() if one.tick.called}


def test_idle_nodes_rest_and_those_with_requests_and_without_a_lease_do_not() -> None:
    found = clients()
    tick_all(found, {NODES[1]}, {NODES[2]}, is_alarm=False)
    assert asked(found) == {NODES[1]: USED, NODES[2]: MISSED}
    resting = [node for node, one in found.items() if one.liveness.rest.called]
    assert resting == [NODES[0], *NODES[3:]], "a tick is counted once"


def test_a_node_with_something_to_do_does_not_rest() -> None:
    found = clients(can_rest=False)
    tick_all(found, NONE, NONE, is_alarm=False)
    assert asked(found) == dict.fromkeys(NODES, WOKEN)


@pytest.mark.parametrize("can_rest", [False, True])
def test_when_one_falls_silent_none_rests(can_rest: bool) -> None:
    found = clients(can_rest=can_rest)
    tick_all(found, {NODES[1]}, NONE, is_alarm=True)
    assert asked(found) == dict.fromkeys(NODES, MISSED) | {NODES[1]: MISSED | {"is_used": True}}
    assert not any(one.liveness.rest.called for one in found.values())


def test_of_few_nodes_none_rests() -> None:
    found = clients(WIDE_NODES - 1)
    tick_all(found, NONE, NONE, is_alarm=False)
    assert asked(found) == dict.fromkeys(NODES[:-1], OF_FEW)
    assert not any(one.liveness.rest.called for one in found.values())


def test_a_node_without_a_client_is_left_out() -> None:
    tick_all(dict.fromkeys(NODES, None), set(NODES), NONE, is_alarm=False)
