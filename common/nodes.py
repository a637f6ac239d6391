"""What the cluster knows of a node: who it is, what it serves, how busy it is."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from common.ids import Incarnation


class Role(Enum):
    """What a process does. A mixed node prefills and decodes on one engine."""

    ROUTER = "router"
    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """One live node, as its lease in the placement store describes it.

    `control_address` is the gRPC `host:port`, `metrics_address` that of Prometheus metrics over
    HTTP. `fingerprint` is the KV layout's: a prefill and a decode node pair up only when theirs are
    equal. `kv_description` says for people what enters it.
    """

    incarnation: Incarnation
    role: Role
    control_address: str
    model: str
    fingerprint: str
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_model_len: int
    metrics_address: str = ""
    kv_description: str = ""
    speculative_method: str = "none"


@dataclass(frozen=True, slots=True)
class KVLink:
    """A decode node that this node hands prompts off to, and the transport that they agreed on.

    `num_bytes` of KV were acknowledged by it, counted since the two first met; a pair that was
    forgotten for others begins at 0 again.
    """

    decode_node_id: str
    transport: str
    is_connected: bool
    num_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLoad:
    """How busy a node said it was.

    `free_blocks` can be had: they are free, or cached and evictable. Reserved and receiving ones
    belong to prompts on their way here; quarantined ones are kept because a sender that failed may
    still write them. All others hold running sequences.

    `new_token_ratio` is the share of the remaining outputs for which the node keeps blocks back
    now; what follows it counts from the node's start.
    """

    free_blocks: int
    free_seats: int
    num_running: int
    num_waiting: int
    queued_tokens: int
    is_draining: bool = False
    new_token_ratio: float = 0.0
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_cached_blocks: int = 0
    num_reserved_blocks: int = 0
    num_receiving_blocks: int = 0
    num_quarantined_blocks: int = 0
    kv_links: tuple[KVLink, ...] = ()
