"""Records of nodes in the store."""

from __future__ import annotations

from typing import Any

from common.nodes import NodeRecord, Role

_FIELDS = {
    "epoch": 1,
    "control_address": "127.0.0.1:1",
    "model": "m",
    "fingerprint": "f",
    "block_size": 4,
    "num_blocks": 100,
    "max_num_seqs": 10,
    "max_model_len": 1000,
}


def record(node_id: str, role: Role = Role.DECODE, **more: Any) -> NodeRecord:
    """Return the record of a small node in its first life, but for the fields `more`."""
    return NodeRecord(node_id=node_id, role=role, **{**_FIELDS, **more})
