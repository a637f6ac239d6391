"""Each check is asked in a history in which it has something to look at, and none where what it
looks at need not hold."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from common.ids import Incarnation
from common.nodes import Role
from router.core.known.roster import Roster
from router.core.placement import Chooser
from router.core.request_flow import RequestFlow
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
from simulator.faults.kinds import STORE, FaultKind
from simulator.faults.kv import end
from simulator.faults.kv.moving import SentPieces
from simulator.faults.node import faulty_node
from simulator.faults.node.life import NodeLife
from simulator.faults.roles.cluster_roles import RolesByLoad
from simulator.faults.router import FaultyRouter
from simulator.faults.shape import ROUTER
from tests.unit.simulator.faults.histories import a_history, a_shape, an_asked_request, run
from tests.unit.tree import name_of, python_files

CHECKS: list[tuple[Any, str]] = [
    *((router, name) for name in ("check_views", "check_roles", "check_choice", "check_goes_on")),
    *((router, name) for name in ("check_kept", "check_counts", "check_blocks")),
    (router, "check_suspected"),
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
    (end, "check_pieces"),
    (end.KVEnd, "_check_woken"),
]


HANG = Fault(at_s=1.25, kind=FaultKind.HANG, target="decode-0", span_s=10.0)


class AskedError(Exception):
    """A check was asked."""


def asked(*_: Any, **__: Any) -> Any:
    raise AskedError


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
    return a_history(shape, asked, role, HANG)


@pytest.mark.parametrize(("owner", "name"), CHECKS, ids=lambda one: getattr(one, "__name__", one))
def test_it_is_asked(owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, name, asked)
    with pytest.raises(AskedError):
        run(a_varied_history())


def test_every_check_is_in_the_list() -> None:
    found = [
        name
        for path in python_files()
        if name_of(path).startswith("simulator/faults/")
        for name in re.findall(r"def (check_\w+)\(", path.read_text())
    ]
    # One says that there is nothing to look at.
    assert set(found) - {"check_none"} <= {name for _, name in CHECKS}


def test_nothing_is_wrong_in_it() -> None:
    ended = {outcome for _, outcome, _ in run(a_varied_history()).outcomes()}
    assert {"length", "invalid_request"} <= ended


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        pytest.param(Chooser, "has_failed_pairs", True, id="a handoff has failed"),
        pytest.param(
            *(Roster, "unreachable", frozenset({(Incarnation("p", 1), Incarnation("d", 1))})),
            id="a node does not reach another one",
        ),
    ],
)
def test_a_session_may_leave_its_node_where_pairs_are_avoided(
    owner: type, name: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router, "check_kept", asked)
    monkeypatch.setattr(owner, name, property(lambda _: value))
    run(a_varied_history())


def test_a_role_may_be_unknown_where_the_store_was_away_when_it_was_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checks: list[object] = []
    monkeypatch.setattr(router, "check_roles", lambda *given: checks.append(given))
    away = Fault(at_s=1.3, kind=FaultKind.STORE, target=STORE, span_s=1.0, how="away")
    history = a_history(
        a_shape(), [an_asked_request(1.2 + 0.2 * number, f"r{number}") for number in range(20)]
    )
    run(history)
    assert len(checks) >= 20
    checks.clear()
    run(replace(history, faults=(away,)))
    assert 0 < len(checks) < 10, "nor when the store answers again"


def test_a_request_whose_grammar_no_node_follows_may_wait_for_a_suspected_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: set[str] = set()

    def check(
        _: Unanswered, suspects: Mapping[Incarnation, bool], flows: Sequence[RequestFlow], *__: Any
    ) -> None:
        seen.update(flow.attempt.choice_id for flow in flows)

    monkeypatch.setattr(Unanswered, "check", check)
    requests = [
        replace(an_asked_request(1.2, name), grammar=grammar)
        for name, grammar in (("r1", ""), ("r2", "slower"), ("r3", "refused"))
    ]
    run(a_history(a_shape(), requests, replace(HANG, at_s=1.21)))
    assert {name.partition("/")[0] for name in seen} == {"r1", "r2"}
