"""Records of nodes."""

from __future__ import annotations

from common.nodes import NodeRecord, Role


def record(
    name: str, role: Role, fingerprint: str = "f", *, kv: str = "30 layers, without mtp"
) -> NodeRecord:
    return NodeRecord(
        node_id=name,
        epoch=1,
        role=role,
        control_address="127.0.0.1:1",
        model="m",
        fingerprint=fingerprint,
        block_size=4,
        num_blocks=100,
        max_num_seqs=10,
        max_model_len=1000,
        kv_description=kv,
    )
