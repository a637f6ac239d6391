"""A running cluster as its router describes it in `/v1/cluster`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from common.ids import Incarnation
from pdserve.commands.http_client import RouterUnreachable, fetch_json
from placement.records import known_facts

PATH = "/v1/cluster"
TIMEOUT_S = 5.0
_INCARNATION = TypeAdapter(Incarnation)

Facts = Mapping[str, Any]
"""Facts about one node: fields of `NodeRecord` and `NodeLoad` by their names, and `is_suspected`.

`node_id` is always present. A router of another version may send fewer: a field that it did not
send is absent, and is shown as a dash.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterStatus:
    """The router that was asked and the nodes it knows, ordered by role and name."""

    url: str
    router_id: str
    not_ready: str
    """Why requests have nowhere to run; '' where they have, or the router does not say."""
    is_store_away: bool
    store_error: str
    """Why the placement store is away; '' where it is not, or the router does not say."""
    warnings: tuple[str, ...]
    nodes: tuple[Facts, ...]
    scaling: str
    """How many nodes of each role the load needs, as a sentence; '' where the router sends none."""
    serving: Mapping[str, float]
    """Numbers of `serving` in the answer, by name; those that it does not have are left out."""


def fetch_cluster(url: str, *, api_key: str = "") -> ClusterStatus:
    """Ask the router at `url`. Raises `RouterUnreachable` or `RouterRefused`."""
    url = url.rstrip("/")
    reply = fetch_json(url, PATH, api_key=api_key, timeout_s=TIMEOUT_S)
    if not isinstance(reply, dict) or not isinstance(reply.get("nodes"), list):
        raise RouterUnreachable(f"{url}{PATH}: the answer lists no nodes: no pdserve router?")
    told = reply.get("router")
    router = told if isinstance(told, dict) else {}
    nodes = [_facts(url, node) for node in reply["nodes"]]
    warnings = reply.get("warnings")
    return ClusterStatus(
        url=url,
        router_id=str(router.get("router_id") or ""),
        not_ready=str(router.get("not_ready") or ""),
        is_store_away=reply.get("placement_store") == "away",
        store_error=str(reply.get("placement_store_error") or ""),
        warnings=tuple(map(str, warnings)) if isinstance(warnings, list) else (),
        scaling=_scaling(reply.get("scaling")),
        serving=_numbers(reply.get("serving")),
        nodes=tuple(sorted(nodes, key=lambda node: (role_of(node), node["node_id"]))),
    )


def role_of(node: Facts) -> str:
    """Return the role's name; '' where the router did not send it."""
    return node["role"].value if "role" in node else ""


def _scaling(told: Any) -> str:
    roles = told.get("roles") if isinstance(told, dict) else None
    if not isinstance(roles, dict):
        return ""
    parts = [
        f"{role} {found['desired']} ({found['nodes']} there)"
        for role, found in roles.items()
        if isinstance(found, dict) and (found.get("nodes") or found.get("desired"))
        if {"nodes", "desired"} <= found.keys()
    ]
    if not parts:
        return ""
    who = ""
    if told.get("auto_roles"):
        leader = told.get("leader")
        who = f" {leader} changes roles." if leader else " No router changes roles now."
    return f"For this load: {', '.join(parts)}.{who}"


def _numbers(told: Any) -> dict[str, float]:
    entries = told.items() if isinstance(told, dict) else ()
    return {
        name: float(value)
        for name, value in entries
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def _facts(url: str, node: Any) -> Facts:
    # Earlier routers send `control_address` only as `address`.
    is_object = isinstance(node, dict)
    told = known_facts({"control_address": node.get("address"), **node}) if is_object else {}
    if "node_id" not in told:
        raise RouterUnreachable(f"{url}{PATH}: a node has no node_id: no pdserve router?")
    if is_object and isinstance(node.get("is_suspected"), bool):
        told["is_suspected"] = node["is_suspected"]
    if is_object:
        told["kv_unreachable"] = tuple(_incarnations(node.get("kv_unreachable")))
    return told


def _incarnations(told: Any) -> Iterator[Incarnation]:
    """Yield the nodes of a list. A router adds the pairs that it avoids to those that a node tells
    of, so they may be more than a node can tell."""
    for one in told if isinstance(told, list) else ():
        with contextlib.suppress(ValidationError):
            yield _INCARNATION.validate_python(one)
