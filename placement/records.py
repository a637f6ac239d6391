"""The store's values as JSON, and their checks when they are read.

Other processes write to the store too, also in other versions. An unknown field is ignored, a
missing one has its default. `ValueError` names the problem, and the caller skips that entry.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar, get_type_hints

from pydantic import TypeAdapter, ValidationError

from common.ids import AttemptId, Incarnation
from common.nodes import MAX_KV_LINKS, NodeLoad, NodeRecord, Role
from common.wire_types import MAX_TEXT, Count, Name, Text
from placement.store import Leadership, LiveNode, Placement, RoleMove

MAX_VALUE_BYTES = 16_384


@dataclass(frozen=True, slots=True)
class _StoredLoad:
    """The part of a lease's value that is not the record."""

    load: NodeLoad


@dataclass(frozen=True, slots=True, kw_only=True)
class _StoredPlacement:
    router_id: Name
    request_id: Name
    attempt: Count
    decode: Incarnation | None = None
    prefill: Incarnation | None = None
    reason: Text


@dataclass(frozen=True, slots=True)
class _StoredMove:
    """The part of a move's value that is not written by the scripts."""

    node: Incarnation
    role: Role


_RECORD = TypeAdapter(NodeRecord)
_LOAD = TypeAdapter(NodeLoad)
_STORED_LOAD = TypeAdapter(_StoredLoad)
_STORED_PLACEMENT = TypeAdapter(_StoredPlacement)
_STORED_MOVE = TypeAdapter(_StoredMove)
_ROUTER = TypeAdapter(Incarnation)
_BEFORE_LOAD = b',"load":'
_FIELDS: dict[str, TypeAdapter[Any]] = {
    name: TypeAdapter(hint)
    for facts in (NodeRecord, NodeLoad)
    for name, hint in get_type_hints(facts, include_extras=True).items()
}

T = TypeVar("T")


def facts_json(record: NodeRecord, load: NodeLoad) -> dict[str, Any]:
    """Return every field of a node's record and load by its name, as JSON has them."""
    return _json(_RECORD, record) | _json(_LOAD, load)


def known_facts(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `NodeRecord` and `NodeLoad` that a JSON object has, decoded, by name.

    Fields that are missing or of a wrong type are left out, as a router of another version may
    have fewer.
    """
    told = {}
    for name, adapter in _FIELDS.items():
        try:
            told[name] = adapter.validate_python(entry[name])
        except (KeyError, ValidationError):
            continue
    return told


def encode_node(node: LiveNode) -> bytes:
    """Return a lease's value: the record and its load. The scripts read `epoch` at the top."""
    load = replace(node.load, kv_links=node.load.kv_links[:MAX_KV_LINKS])
    return _dump(_json(_RECORD, node.record) | {"load": _json(_LOAD, load)})


def decode_node(value: bytes) -> LiveNode:
    """Return what `encode_node` wrote. Raises `ValueError` for anything else."""
    return NodeListing({}).decode(b"", value)


class Listed(NamedTuple):
    """A node as a listing read it."""

    value: bytes
    head: bytes
    """What is in front of the load, which is the end of the value; empty where it is not."""
    node: LiveNode


class NodeListing:
    """Decodes the nodes of one listing.

    Nothing of an idle node changes from one listing to the next, and of others only the load: what
    has the bytes of the listing before is taken from there, and is the same object.
    """

    def __init__(self, before: Mapping[bytes, Listed]) -> None:
        """Begin; `before` are the `nodes` of the listing before."""
        self._before = before
        self.nodes: dict[bytes, Listed] = {}
        """The nodes by their names in the index."""

    def decode(self, name: bytes, value: bytes) -> LiveNode:
        """Return what `encode_node` wrote. Raises `ValueError` for anything else."""
        before = self._before.get(name)
        if before is None or before.value != value:
            before = _read(value, before)
        self.nodes[name] = before
        return before.node


def _read(value: bytes, before: Listed | None) -> Listed:
    is_known = before is not None and before.head and value.startswith(before.head)
    head = before.head if before is not None and is_known else _head(value)
    load = _last_load(value[len(head) :]) if head else None
    if load is None or len(value) > MAX_VALUE_BYTES:
        # It is elsewhere, as other versions may write it, or something is wrong.
        record, stored = _decoded(_RECORD, value), _decoded(_STORED_LOAD, value)
        return Listed(value, b"", LiveNode(record=record, load=stored.load))
    record = before.node.record if before is not None and is_known else _decoded(_RECORD, value)
    return Listed(value, head, LiveNode(record=record, load=load))


def _head(value: bytes) -> bytes:
    """Return everything in front of the first load, or nothing."""
    head, behind, _ = value.partition(_BEFORE_LOAD)
    return head + behind if behind else b""


def _last_load(tail: bytes) -> NodeLoad | None:
    """Return the load if nothing is behind it but the end of the object that it is in, which then
    is the whole value: everything in front of it belongs to the record."""
    if not tail.endswith(b"}"):
        return None
    try:
        return _LOAD.validate_json(tail[:-1])
    except ValidationError:
        return None


def encode_placement(placement: Placement) -> bytes:
    """Return a placement's value. The scripts read `router_id` at the top."""
    decode, prefill = placement.decode, placement.prefill
    return _dump(
        {
            "router_id": placement.router_id,
            "request_id": placement.attempt.choice_id,
            "attempt": placement.attempt.attempt,
            "decode": None if decode is None else decode._asdict(),
            "prefill": None if prefill is None else prefill._asdict(),
            "reason": placement.reason[:MAX_TEXT],
        }
    )


def decode_placement(value: bytes) -> Placement:
    """Return what `encode_placement` wrote. Raises `ValueError` for anything else."""
    stored = _decoded(_STORED_PLACEMENT, value)
    return Placement(
        attempt=AttemptId(stored.request_id, stored.attempt),
        router_id=stored.router_id,
        decode=stored.decode,
        prefill=stored.prefill,
        reason=stored.reason,
    )


def encode_router(router: Incarnation) -> bytes:
    """Return the value of the leader's lease. The scripts compare it as a whole."""
    return _dump(router._asdict())


def decode_leadership(leader: bytes, last_move: bytes) -> Leadership:
    """Return what a script found; `last_move` is empty where there was none.

    Raises `ValueError` for anything else.
    """
    move = decode_move(last_move) if last_move else None
    return Leadership(leader=_decoded(_ROUTER, leader), last_move=move)


def encode_move(node: Incarnation, role: Role) -> bytes:
    """Return what a move's value has behind its number and whether it is open."""
    return _dump({"node": node._asdict(), "role": role.value})


def decode_move(value: bytes) -> RoleMove:
    """Return a move as a script wrote it. Raises `ValueError` for anything else."""
    number, is_open, what = value.split(b" ", 2)
    stored = _decoded(_STORED_MOVE, what)
    return RoleMove(number=int(number), node=stored.node, role=stored.role, is_open=is_open == b"1")


def _json(adapter: TypeAdapter[T], value: T) -> dict[str, Any]:
    fields: dict[str, Any] = adapter.dump_python(value, mode="json")
    return fields


def _dump(entry: dict[str, Any]) -> bytes:
    return json.dumps(entry, separators=(",", ":")).encode()


def _decoded(adapter: TypeAdapter[T], value: bytes) -> T:
    if len(value) > MAX_VALUE_BYTES:
        raise ValueError(f"{len(value)} bytes: wanted at most {MAX_VALUE_BYTES}")
    try:
        return adapter.validate_json(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"{where}: {first['msg']}" if where else first["msg"]) from None
