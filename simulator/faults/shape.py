"""The nodes of a cluster in a history, and their settings."""

from __future__ import annotations

from dataclasses import dataclass, replace

from common.nodes import Role
from common.settings.config import (
    Config,
    EngineConfig,
    HandoffConfig,
    ModelConfig,
    PlacementConfig,
    SchedulingConfig,
    SpeculationConfig,
)
from router.core.prefix_sources import AUTO

MODEL = "modelled"
ROUTER = "router"
MOST_ROUTERS = 4
MOST_NODES = 16
MOST_BLOCKS = 4096
MOST_QUEUED = 256
"""Requests that may wait on a node; no history has as many."""
NUM_DRAFTS = 3
LANES = ("zmq", "rdma", "rdma_read", "ipc", "shm")
CARD_LANES = ("rdma_read", "ipc")
"""Lanes of caches that are on cards."""
HOST_LANES = ("rdma",)
"""Lanes of caches in host memory alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The nodes and routers of a cluster and their settings.

    Latencies are in seconds, one way; `lease_s` is that of a node, `kv_lease_s` that of an idle
    reservation. With `keeps_prefixes` host memory holds prefixes too; with
    `is_warmed` a node that starts pulls blocks that others have cached. A node that drains gives
    its requests `drain_s` to finish. KV travels on `lane`. With `is_staged` steps read other memory
    than transfers write, as a cache on a card and its mirror, and copies are made beside the steps.
    With `is_on_card` these are copies to host memory alone: transfers move KV from card to card,
    and a step may begin before the last one is taken. Routers know a session for `session_ttl_s`
    after its last request.
    Nodes have `num_blocks`, or in the order of their names those of `pools`.
    From `reserved_blocks` to `chunk_granularity` are settings of scheduling, under shorter names of
    the same meaning.
    At most `max_queued` requests wait on a node; with `sheds` it refuses what would end too late.
    On `zmq` KV of two nodes travels on `num_kv_lanes` connections. With `is_wide` routers ask and
    choose nodes as those of a wide cluster.
    Roles follow the load where there are targets of latency; 0: nodes keep them.
    """

    num_routers: int
    lane: str
    num_prefill: int
    num_decode: int
    num_mixed: int
    num_blocks: int
    pools: tuple[int, ...]
    num_host_blocks: int
    num_disk_blocks: int
    block_size: int
    keeps_prefixes: bool
    is_staged: bool
    is_on_card: bool
    is_warmed: bool
    max_num_seqs: int
    max_num_batched_tokens: int
    max_queued: int
    sheds: bool
    local_prefill_threshold: int
    has_priorities: bool
    preemption_policy: str
    preemption_mode: str
    reservation_policy: str
    speculative_method: str
    placement_policy: str
    session_ttl_s: float
    target_ttft_s: float
    target_tpot_s: float
    lease_s: float
    kv_lease_s: float
    drain_s: float
    message_s: float
    kv_message_s: float
    step_s: float
    reserved_blocks: int = 16
    requeues_at_tail: bool = False
    retract_decode_steps: int = 4
    min_progress_tokens: int = 16
    priority_pass_limit: int = 16
    skip_ahead_window: int = 4
    skip_ahead_limit: int = 16
    long_prefill_tokens: int = 128
    chunk_granularity: int = 1
    num_kv_lanes: int = 1
    is_wide: bool = False


def is_on_device(shape: Shape) -> bool:
    """Return whether steps run on a device, beside the node that plans them."""
    return shape.is_staged or shape.is_on_card


def are_roles_by_load(shape: Shape) -> bool:
    """Return whether routers give nodes other roles by themselves."""
    return shape.target_ttft_s > 0 and shape.target_tpot_s > 0


def node_names(shape: Shape) -> list[str]:
    """Return the names of the nodes, those that prefill first."""
    counts = {"prefill": shape.num_prefill, "decode": shape.num_decode, "mixed": shape.num_mixed}
    return [f"{role}-{i}" for role, count in counts.items() for i in range(count)]


def shape_of(shape: Shape, name: str) -> Shape:
    """Return the shape of one node: nodes differ only in the sizes of their pools."""
    return (
        replace(shape, num_blocks=_num_blocks_of(shape, name), pools=()) if shape.pools else shape
    )


def longest_of(shape: Shape, name: str) -> int:
    """Return the tokens of one sequence that a node holds, its drafts not counted."""
    return (_num_blocks_of(shape, name) - 1) * shape.block_size


def _num_blocks_of(shape: Shape, name: str) -> int:
    return shape.pools[node_names(shape).index(name)] if shape.pools else shape.num_blocks


def router_names(shape: Shape) -> list[str]:
    """Return the names of the routers."""
    return [ROUTER, *(f"{ROUTER}-{number}" for number in range(2, shape.num_routers + 1))]


def config_of(shape: Shape, role: Role) -> Config:
    """Return the settings of a node."""
    return Config(
        role=role,
        model=ModelConfig(model=MODEL),
        engine=EngineConfig(
            max_num_seqs=shape.max_num_seqs,
            max_num_batched_tokens=shape.max_num_batched_tokens,
            block_size=shape.block_size,
            prefix_host_memory=shape.num_host_blocks if shape.keeps_prefixes else 0,
            prefix_disk="disk" if shape.num_disk_blocks else "",
            prefix_disk_size=shape.num_disk_blocks << 20,
        ),
        scheduling=SchedulingConfig(
            enable_priority_scheduling=shape.has_priorities,
            preemption_policy=shape.preemption_policy,
            preemption_mode=shape.preemption_mode,
            reservation_policy=shape.reservation_policy,
            reserve_output_block_num_for_decode_when_schedule_new_prefill=shape.reserved_blocks,
            requeue="tail" if shape.requeues_at_tail else "arrival",
            retract_decode_steps=shape.retract_decode_steps,
            min_progress_tokens=shape.min_progress_tokens,
            priority_pass_limit=shape.priority_pass_limit,
            skip_ahead_window=shape.skip_ahead_window,
            skip_ahead_limit=shape.skip_ahead_limit,
            long_prefill_token_threshold=shape.long_prefill_tokens,
            chunk_granularity=shape.chunk_granularity,
            shed=shape.sheds,
        ),
        speculation=SpeculationConfig(
            speculative_method=shape.speculative_method,
            num_speculative_tokens=0 if shape.speculative_method == "none" else NUM_DRAFTS,
        ),
        handoff=HandoffConfig(
            local_prefill_threshold=shape.local_prefill_threshold,
            lease_s=shape.kv_lease_s,
            warm_from=AUTO if shape.is_warmed else "",
            max_queued_requests=shape.max_queued,
            kv_lanes=shape.num_kv_lanes,
        ),
        placement=PlacementConfig(
            placement_policy=shape.placement_policy, node_lease_s=shape.lease_s
        ),
    )


def problems_of(shape: Shape) -> list[str]:
    """Return the reasons why no cluster can have this shape; empty if one can."""
    counts = (shape.num_prefill, shape.num_decode, shape.num_mixed)
    if min(counts) < 0 or not 0 < sum(counts) <= MOST_NODES:
        return [f"{sum(counts)} nodes: wanted 1 to {MOST_NODES}, and no negative number of any"]
    wrong = []
    if not 0 < shape.num_routers <= MOST_ROUTERS:
        wrong.append(f"{shape.num_routers} routers: wanted 1 to {MOST_ROUTERS}")
    if not 2 <= shape.num_blocks <= MOST_BLOCKS or not 0 <= shape.num_host_blocks <= MOST_BLOCKS:
        wrong.append(f"wanted 2 to {MOST_BLOCKS} blocks, and no more on the host")
    if shape.pools and len(shape.pools) != sum(counts):
        wrong.append(
            f"{len(shape.pools)} pools: wanted none, or one for each of {sum(counts)} nodes"
        )
    if not all(2 <= num_blocks <= MOST_BLOCKS for num_blocks in shape.pools):
        wrong.append(f"pools: wanted 2 to {MOST_BLOCKS} blocks in each")
    if min(shape.message_s, shape.kv_message_s, shape.step_s) <= 0:
        wrong.append("message_s, kv_message_s and step_s: wanted more than 0")
    if shape.lane not in LANES:
        wrong.append(f"lane is {shape.lane!r}: wanted one of {', '.join(LANES)}")
    if shape.lane in CARD_LANES and shape.is_staged:
        wrong.append(
            f"lane {shape.lane} reads and writes the memory of steps: wanted is_staged false"
        )
    if shape.is_on_card and (shape.is_staged or shape.lane in HOST_LANES):
        wrong.append(f"is_on_card on lane {shape.lane}: wanted another one, and is_staged false")
    names = {name.rpartition("-")[0] for name in node_names(shape)}
    for role in sorted(names):
        wrong += [problem.text for problem in config_of(shape, Role(role)).problems()]
    return wrong
