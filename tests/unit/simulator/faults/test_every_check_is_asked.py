"""Each check is asked in a history in which it has something to look at."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from common.nodes import Role
from simulator.faults import cluster, router
from simulator.faults.books.choices import SessionBooks
from simulator.faults.books.requests import Legs, Unanswered
from simulator.faults.books.told import Placements
from simulator.faults.checks import nodes
from simulator.faults.checks.ends import Ends
from simulator.faults.demand import watched_router
from simulator.faults.demand.refusals import Refusals
from simulator.faults.demand.salts import Salts
from simulator.faults.demand.waiting import Passes
from simulator.faults.history import Fault, History
from simulator.faults.kinds import FaultKind
from simulator.faults.kv.moving import SentPieces
from simulator.faults.node import faulty_node
from simulator.faults.node.life import NodeLife
from simulator.faults.roles.cluster_roles import RolesByLoad
from simulator.faults.router import FaultyRouter
from simulator.faults.shape import ROUTER
from tests.unit.simulator.faults.histories import a_history, a_shape, an_asked_request, run

CHECKS: list[tuple[Any, str]] = [
    *((router, name) for name in ("check_views", "check_roles", "check_choice", "check_goes_on")),
    *((router, name) for name in ("check_kept", "check_counts", "check_blocks")),
    (SessionBooks, "check"),
    (Legs, "check"),
    (Unanswered, "check"),
    (Placements, "take"),
    (FaultyRouter, "check_blocks"),
    (FaultyRouter, "why_held"),
    *((cluster, name) for name in ("check_node", "check_cache", "check_files", "why_busy")),
    *((cluster, name) for name in ("check_logprobs", "check_time")),
    *((nodes, name) for name in ("_check_sent", "_check_sources")),
    *((Ends, name) for name in ("check", "check_answered", "check_roles")),
    *((RolesByLoad, name) for name in ("on_role", "why_unserved")),
    (Salts, "check"),
    (watched_router, "check_too_long"),
    (Refusals, "on_end"),
    *((faulty_node, name) for name in ("check_refusal", "check_waiting")),
    (Passes, "take"),
    (NodeLife, "check_output"),
    (SentPieces, "check"),
]


class AskedError(Exception):
    """A check was asked."""


@cache
def a_varied_history() -> History:
    """Return sessions, a request that no node holds, one that is refused for its grammar, a role
    that changes, and a step that hangs."""
    shape = replace(a_shape(), num_prefill=2, max_queued=4)
    asked = [
        replace(an_asked_request(1.1 + 0.02 * number, f"r{number}"), session="a", salt="s")
        for number in range(10)
    ]
    asked.append(an_asked_request(1.5, "r20", num_prompt=300))
    asked.append(replace(an_asked_request(1.5, "r21"), grammar="refused"))
    role = Fault(
        at_s=1.2, kind=FaultKind.ROLE, target="decode-1", other=ROUTER, how=Role.MIXED.value
    )
    hang = Fault(at_s=1.25, kind=FaultKind.HANG, target="decode-0", span_s=10.0)
    return a_history(shape, asked, role, hang)


@pytest.mark.parametrize(("owner", "name"), CHECKS, ids=lambda one: getattr(one, "__name__", one))
def test_it_is_asked(owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*_: Any, **__: Any) -> Any:
        raise AskedError

    monkeypatch.setattr(owner, name, asked)
    with pytest.raises(AskedError):
        run(a_varied_history())


def test_nothing_is_wrong_in_it() -> None:
    ended = {outcome for _, outcome, _ in run(a_varied_history()).outcomes()}
    assert {"length", "invalid_request"} <= ended
