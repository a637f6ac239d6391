"""The placement of a router, replayed: the same calls of a new membership and a new chooser."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from common.errors import (
    ConfigError,
    DeadlineUnreachable,
    InternalError,
    InvalidRequest,
    Overloaded,
)
from common.ids import Incarnation
from common.kv.tiers import Tier
from common.nodes import KVLink, NodeLoad, NodeRecord, Role
from common.recording.file import read_recording
from common.recording.values import ValueReader, as_json
from placement.store import LiveNode
from router.core.effects import Choose
from router.core.known.block_reports import BlockReport
from router.core.known.roster import Roster
from router.core.placement import Placing
from router.dispatch.placing_recording import (
    CHOOSER,
    CHOOSER_CALLS,
    MEMBERSHIP,
    MEMBERSHIP_CALLS,
    NodesThen,
    RecordedQuery,
)
from simulator.replays.compared import Compared, Difference

_ARGUMENTS = ValueReader(
    BlockReport,
    Choose,
    DeadlineUnreachable,
    Incarnation,
    InternalError,
    InvalidRequest,
    KVLink,
    LiveNode,
    NodeLoad,
    NodeRecord,
    NodesThen,
    Overloaded,
    RecordedQuery,
    Role,
    Tier,
)


def replay_placing(path: Path) -> Compared:
    """Make the recorded calls; compare the result of each.

    Raises `ConfigError`, which names the line, for one that cannot be made.
    """
    header, lines = read_recording(path)
    try:
        membership, chooser = Placing(**header["placing"]).machines()
    except (KeyError, TypeError) as error:
        raise ConfigError(f"line 1: no placement is made of it: {error!r}") from error
    machines = {
        MEMBERSHIP: {name: getattr(membership, name) for name in MEMBERSHIP_CALLS},
        CHOOSER: {name: getattr(chooser, name) for name in CHOOSER_CALLS},
    }
    compared, nodes = Compared(), membership.nodes()
    for number, line in lines:
        try:
            call = _call_of(line, machines, nodes)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise ConfigError(f"line {number}: no call is made of it: {error!r}") from error
        replayed, recorded = _gave(call), line.get("gave")
        compared.num_decisions += line["call"] == "choose"
        if replayed != recorded:
            compared.difference = Difference(
                line=number,
                at_s=line.get("at_s", 0.0),
                what=f"{line['to']}.{line['call']}",
                recorded=json.dumps(recorded),
                replayed=json.dumps(replayed),
            )
            break
    return compared


def _call_of(
    line: dict[str, Any], machines: dict[str, dict[str, Callable[..., Any]]], nodes: Roster
) -> Callable[[], Any]:
    """Return the call of a line. Raises the errors of a malformed line."""

    def argument(found: Any) -> Any:
        value = _ARGUMENTS.read(found)
        if isinstance(value, RecordedQuery):
            return value.query()
        return nodes if isinstance(value, NodesThen) else value

    given = map(argument, line.get("with", ()))
    named = {name: argument(found) for name, found in line.get("by", {}).items()}
    return partial(machines[line["to"]][line["call"]], *given, **named)


def _gave(call: Callable[[], Any]) -> Any:
    """Make a call; return its result as JSON values, or the error that it raises."""
    try:
        found = call()
    except Exception as error:
        return as_json(error)
    return None if isinstance(found, Roster) else as_json(found)
