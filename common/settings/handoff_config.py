"""The section of KV between nodes: lanes, limits, and what a new node takes."""

from __future__ import annotations

from dataclasses import dataclass

from common.settings.setting import FormRule, Section, setting

NODE_ID = FormRule("at most 128 characters", lambda name: len(name) <= 128)


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffConfig(Section):
    """How KV moves between nodes."""

    local_prefill_threshold: int = setting(
        64,
        "decode nodes compute prompts of at most this many uncached tokens themselves",
        note="0: none; its steps and its memory are then planned for decoding alone",
        at_least=0,
    )
    lease_s: float = setting(
        30.0, "time until an idle reservation expires", unit="seconds", between=(0.1, 3600)
    )
    kv_window: int = setting(
        32 << 20,
        "maximum unacknowledged KV of each connection of a node pair",
        unit="bytes",
        at_least=1 << 16,
    )
    kv_lanes: int = setting(
        1,
        "connections of a node pair over zmq, and threads that hash and copy KV",
        note="of two nodes that differ the smaller number counts",
        between=(1, 16),
    )
    kv_transport: str = setting(
        "auto",
        "how KV travels",
        note="auto: on one host ipc between GPUs, else shm, else rdma where both have it, else zmq",
        one_of=("auto", "ipc", "shm", "rdma", "zmq"),
    )
    kv_verify: str = setting(
        "auto",
        "checksums of KV",
        note="commit: one per transfer; block: one per block; auto: block, but off over rdma "
        "between caches in host memory",
        one_of=("auto", "off", "commit", "block"),
    )
    rdma_devices: str = setting(
        "", "RDMA devices, separated by commas", note="default: all", metavar="NAMES"
    )
    kv_key: str = setting(
        "",
        "file made by `pdserve kv-key`, the same on all nodes, that encrypts KV over zmq",
        metavar="FILE",
    )
    warm_from: str = setting(
        "",
        "node from which a node pulls cached prefixes after its start, the latest first",
        note="auto: any node of its model; serving does not wait for it; default: none",
        form=NODE_ID,
        metavar="NODE_ID",
    )
    max_queued_requests: int = setting(
        256, "maximum number of requests that wait on a node; it refuses more", at_least=1
    )
