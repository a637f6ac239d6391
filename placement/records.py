"""What the store holds, as JSON, and the checks on the way back.

The store is shared, so its content is a stranger's word: `ValueError` names what is wrong, and the
caller skips that entry.
"""

from __future__ import annotations

import json
import re
from typing import Any

from common.ids import AttemptId, Incarnation
from common.nodes import KVLink, NodeLoad, NodeRecord, Role
from placement.store import LiveNode, Placement

MAX_TEXT = 512
MAX_NUMBER = 2**53
MAX_VALUE_BYTES = 16_384
MAX_KV_LINKS = 32
_HOST_AND_PORT = re.compile(r"[!-~]+:([0-9]{1,5})")


def encode_node(node: LiveNode) -> bytes:
    """A lease's value: the record and its load. `epoch` stands at the top, for the scripts."""
    record, load = node.record, node.load
    return _dump(
        {
            "epoch": record.incarnation.epoch,
            "node_id": record.incarnation.node_id,
            "role": record.role.value,
            "control_address": record.control_address,
            "model": record.model,
            "fingerprint": record.fingerprint,
            "block_size": record.block_size,
            "num_blocks": record.num_blocks,
            "max_num_seqs": record.max_num_seqs,
            "max_model_len": record.max_model_len,
            "metrics_address": record.metrics_address,
            "kv_description": record.kv_description,
            "speculative_method": record.speculative_method,
            "load": {
                "free_blocks": load.free_blocks,
                "free_seats": load.free_seats,
                "num_running": load.num_running,
                "num_waiting": load.num_waiting,
                "queued_tokens": load.queued_tokens,
                "is_draining": load.is_draining,
                "new_token_ratio": load.new_token_ratio,
                "num_preemptions": load.num_preemptions,
                "num_recomputed_tokens": load.num_recomputed_tokens,
                "num_drafted": load.num_drafted,
                "num_accepted": load.num_accepted,
                "num_cached_blocks": load.num_cached_blocks,
                "num_reserved_blocks": load.num_reserved_blocks,
                "num_receiving_blocks": load.num_receiving_blocks,
                "num_quarantined_blocks": load.num_quarantined_blocks,
                "kv_links": [
                    [link.decode_node_id, link.transport, link.is_connected, link.num_bytes]
                    for link in load.kv_links[:MAX_KV_LINKS]
                ],
            },
        }
    )


def decode_node(value: bytes) -> LiveNode:
    """Raises `ValueError` for anything that `encode_node` does not write."""
    entry = _load(value)
    load = entry.get("load")
    if not isinstance(load, dict):
        raise ValueError(f"load is {type(load).__name__}: wanted an object")
    record = NodeRecord(
        incarnation=Incarnation(_text(entry, "node_id"), _number(entry, "epoch")),
        role=Role(_text(entry, "role")),
        control_address=_address(entry, "control_address"),
        model=_text(entry, "model"),
        fingerprint=_text(entry, "fingerprint"),
        block_size=_number(entry, "block_size", at_least=1),
        num_blocks=_number(entry, "num_blocks"),
        max_num_seqs=_number(entry, "max_num_seqs"),
        max_model_len=_number(entry, "max_model_len"),
        metrics_address=_address(entry, "metrics_address") if entry.get("metrics_address") else "",
        kv_description=_text(entry, "kv_description", at_least=0),
        speculative_method=_text(entry, "speculative_method"),
    )
    return LiveNode(
        record=record,
        load=NodeLoad(
            free_blocks=_number(load, "free_blocks"),
            free_seats=_number(load, "free_seats"),
            num_running=_number(load, "num_running"),
            num_waiting=_number(load, "num_waiting"),
            queued_tokens=_number(load, "queued_tokens"),
            is_draining=load.get("is_draining") is True,
            new_token_ratio=_share(load, "new_token_ratio"),
            num_preemptions=_number(load, "num_preemptions"),
            num_recomputed_tokens=_number(load, "num_recomputed_tokens"),
            num_drafted=_number(load, "num_drafted"),
            num_accepted=_number(load, "num_accepted"),
            num_cached_blocks=_number(load, "num_cached_blocks"),
            num_reserved_blocks=_number(load, "num_reserved_blocks"),
            num_receiving_blocks=_number(load, "num_receiving_blocks"),
            num_quarantined_blocks=_number(load, "num_quarantined_blocks"),
            kv_links=_kv_links(load),
        ),
    )


def encode_placement(placement: Placement) -> bytes:
    """A placement's value. `router_id` stands at the top, for the scripts."""
    return _dump(
        {
            "router_id": placement.router_id,
            "request_id": placement.attempt.request_id,
            "attempt": placement.attempt.attempt,
            "decode": _incarnation_value(placement.decode),
            "prefill": _incarnation_value(placement.prefill),
            "reason": placement.reason[:MAX_TEXT],
        }
    )


def decode_placement(value: bytes) -> Placement:
    """Raises `ValueError` for anything that `encode_placement` does not write."""
    entry = _load(value)
    return Placement(
        attempt=AttemptId(_text(entry, "request_id"), _number(entry, "attempt")),
        router_id=_text(entry, "router_id"),
        decode=_incarnation(entry, "decode"),
        prefill=_incarnation(entry, "prefill"),
        reason=_text(entry, "reason", at_least=0),
    )


def _incarnation_value(incarnation: Incarnation | None) -> dict[str, Any] | None:
    if incarnation is None:
        return None
    return {"node_id": incarnation.node_id, "epoch": incarnation.epoch}


def _incarnation(entry: dict[str, Any], key: str) -> Incarnation | None:
    value = entry.get(key)
    if value is None:
        return None
    if not isinstance(value, dict):
        raise ValueError(f"{key} is {type(value).__name__}: wanted an object or null")
    return Incarnation(_text(value, "node_id"), _number(value, "epoch"))


def _kv_links(load: dict[str, Any]) -> tuple[KVLink, ...]:
    links = load.get("kv_links")
    if not isinstance(links, list) or len(links) > MAX_KV_LINKS:
        raise ValueError(f"kv_links is not a list of at most {MAX_KV_LINKS}")
    found = []
    for link in links:
        if not isinstance(link, list) or len(link) != 4 or not isinstance(link[2], bool):
            raise ValueError("a link of kv_links is not [decode, transport, is connected, bytes]")
        parts = {"decode": link[0], "transport": link[1], "bytes": link[3]}
        names = _text(parts, "decode"), _text(parts, "transport")
        found.append(KVLink(*names, link[2], _number(parts, "bytes")))
    return tuple(found)


def _text(entry: dict[str, Any], key: str, *, at_least: int = 1) -> str:
    value = entry.get(key)
    if not isinstance(value, str) or not at_least <= len(value) <= MAX_TEXT:
        raise ValueError(f"{key} is not a text of {at_least} to {MAX_TEXT} characters")
    if not value.isprintable():
        raise ValueError(f"{key} is {value!a}: wanted printable characters")
    return value


def _address(entry: dict[str, Any], key: str) -> str:
    value = _text(entry, key)
    match = _HOST_AND_PORT.fullmatch(value)
    if match is None or not 1 <= int(match[1]) <= 65_535:
        raise ValueError(f"{key} is {value!a}: wanted HOST:PORT")
    return value


def _number(entry: dict[str, Any], key: str, *, at_least: int = 0) -> int:
    value = entry.get(key)
    if type(value) is not int or not at_least <= value <= MAX_NUMBER:
        raise ValueError(f"{key} is not a whole number from {at_least} to 2^53")
    return value


def _share(entry: dict[str, Any], key: str) -> float:
    value = entry.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1:
        raise ValueError(f"{key} is not a number from 0 to 1")
    return float(value)


def _dump(entry: dict[str, Any]) -> bytes:
    return json.dumps(entry, separators=(",", ":")).encode()


def _load(value: bytes) -> dict[str, Any]:
    if len(value) > MAX_VALUE_BYTES:
        raise ValueError(f"{len(value)} bytes: wanted at most {MAX_VALUE_BYTES}")
    try:
        entry = json.loads(value)
    except (UnicodeDecodeError, RecursionError) as wrong:
        raise ValueError(f"not JSON: {wrong}") from wrong
    if not isinstance(entry, dict):
        raise ValueError(f"a JSON {type(entry).__name__}: wanted an object")
    return entry
