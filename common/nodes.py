"""What the cluster knows of a node: who it is, what it serves, how busy it is.

`NodeRecord` and `NodeLoad` are the one place that names these facts: `placement.records` encodes
and decodes them by their fields, for the placement store, the router and the command line.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, NamedTuple

from common.ids import Incarnation
from common.version import UNNAMED_KV_PROTOCOL, UNNAMED_PROTOCOL
from common.wire_types import Address, Bounds, Count, Flag, Name, OptionalAddress, Share, Size, Text

MAX_KV_LINKS = 32
MAX_KV_UNREACHABLE = 16
MAX_ROLES = 8


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
    HTTP. `fingerprint` is the KV layout's and `kv_protocol` the version of the frames with KV: a
    prefill and a decode node pair up only when both are equal. `kv_description` says for people
    what enters the fingerprint. `version` is that of the package, `protocol` that of the messages
    to and from routers. `has_grammars`: answers under a grammar can be asked of it.
    `has_token_rules`: it knows `common.token_rules` and salts. `has_prompt_logprobs`: it answers
    with the log probabilities of a prompt where they are asked for. `sends_blocks`: it sends cached
    blocks to a node that asks for them by their hashes.
    `kv_cache_bytes` is the memory of its KV blocks as they are stored; 0: unknown. `device` names
    the accelerator that it computes on; empty: it computes on a CPU, or does not tell.
    `roles` are those that it can be given while it runs; empty: it keeps its own.
    `tokens` tell its tokenizer apart (`common.files.tokenizer_files.plain_tokens_digest`); empty:
    unknown.
    `num_host_blocks` fit into its host memory for preempted sequences and prefixes, and
    `num_disk_blocks` into its files of prefixes; 0: it has none, or does not tell.
    `lease_ms` is the length of its leases; 0: it does not tell.

    A field that is added needs a default: nodes of earlier versions do not send it.
    """

    node_id: Name
    epoch: Count
    role: Role
    control_address: Address
    model: Name
    fingerprint: Name
    block_size: Size
    num_blocks: Count
    max_num_seqs: Count
    max_model_len: Count
    metrics_address: OptionalAddress = ""
    kv_description: Text = ""
    speculative_method: Name = "none"
    version: Text = ""
    protocol: Count = UNNAMED_PROTOCOL
    kv_protocol: Count = UNNAMED_KV_PROTOCOL
    has_grammars: Flag = False
    has_token_rules: Flag = False
    has_prompt_logprobs: Flag = False
    sends_blocks: Flag = False
    kv_cache_bytes: Count = 0
    device: Text = ""
    num_host_blocks: Count = 0
    num_disk_blocks: Count = 0
    roles: Annotated[tuple[Role, ...], Bounds(max_length=MAX_ROLES)] = ()
    tokens: Text = ""
    lease_ms: Count = 0
    incarnation: Incarnation = field(init=False, repr=False, compare=False)
    """The node in its present life: follows from the others, and is kept because a router asks for
    it again and again."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "incarnation", Incarnation(self.node_id, self.epoch))

    def can_become(self, role: Role) -> bool:
        """Return whether the node has this role, or can be given it while it runs."""
        return role is self.role or role in self.roles

    def can_exchange_kv(self, other: NodeRecord) -> bool:
        """Return whether KV that one of the two nodes computed can be used by the other."""
        return self.fingerprint == other.fingerprint and self.kv_protocol == other.kv_protocol


class KVLink(NamedTuple):
    """A decode node that this node hands prompts off to, and the transport that they agreed on.

    `num_bytes` of KV were acknowledged by it, counted since the two first met; a pair that was
    forgotten for others begins at 0 again.

    The store holds a link as a list of these four: another field would keep earlier versions from
    reading the node.
    """

    decode: Name
    transport: Name
    is_connected: Flag
    num_bytes: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLoad:
    """How busy a node said it was.

    `free_blocks` can be had: they are free, or cached and evictable. Reserved and receiving ones
    belong to prompts on their way here; quarantined ones are kept because a sender that failed may
    still write them. All others hold running sequences. `num_prefix_host_blocks` blocks of host
    memory and `num_prefix_disk_blocks` files hold prefixes.

    `queued_tokens` are to be computed: `num_found_tokens` more wait with them that were cached when
    they were queued.

    `new_token_ratio` is the share of the remaining outputs for which the node keeps blocks back
    now; what follows it counts from the node's start. `uptime_s` are the seconds since the node was
    ready, after a minute in steps of 10, after an hour of 60; 0: unknown.

    `num_prompt_tokens` were computed in chunks, in steps that took `prompt_steps_ms` together; the
    other ones of `num_steps` took `decode_steps_ms`. What a node is able to do is learned from them
    (`router.core.scaling`).

    `kv_unreachable` are the decode nodes that did not answer this node's KV connection and that it
    tries to connect to again; routers place no request on such a pair while another one can be had.

    A field that is added needs a default: nodes of earlier versions do not send it.
    """

    free_blocks: Count
    free_seats: Count
    num_running: Count
    num_waiting: Count
    queued_tokens: Count
    is_draining: Flag = False
    new_token_ratio: Share = 0.0
    num_preemptions: Count = 0
    num_recomputed_tokens: Count = 0
    num_drafted: Count = 0
    num_accepted: Count = 0
    num_cached_blocks: Count = 0
    num_reserved_blocks: Count = 0
    num_receiving_blocks: Count = 0
    num_quarantined_blocks: Count = 0
    num_prefix_host_blocks: Count = 0
    num_prefix_disk_blocks: Count = 0
    num_steps: Count = 0
    num_prompt_tokens: Count = 0
    prompt_steps_ms: Count = 0
    decode_steps_ms: Count = 0
    kv_links: Annotated[tuple[KVLink, ...], Bounds(max_length=MAX_KV_LINKS)] = ()
    kv_unreachable: Annotated[tuple[Incarnation, ...], Bounds(max_length=MAX_KV_UNREACHABLE)] = ()
    uptime_s: Count = 0
    num_found_tokens: Count = 0
