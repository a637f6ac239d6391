"""Clusters on the tiny model that several test files use."""

from __future__ import annotations

from pathlib import Path

from common.nodes import Role
from pdserve.local_cluster.free_ports import free_loopback_port
from tests.support.cluster.cluster import ClusterSpec, NodeSpec
from tests.support.kv.kv_relay import environ_of_endpoint
from tests.support.kv.tcp_proxy import TcpProxy

PREFILL_STEP_TOKENS = 32
"""A long prompt takes many steps of the prefill node."""

SHORT_DEADLINE_S = 2.0
"""What the third router of a handoff cluster gives its requests: more than a first token takes,
and less than an answer does where nodes are slow."""

LONG_DEADLINE_S = 60.0

SMALL_NODES = ("--block-size", "16", "--num-threads", "1", "--kv-cache-memory", "16MiB")
"""Flags of nodes of the tiny model, of which many run at a time."""


def handoff_spec(name: str, model: Path) -> ClusterSpec:
    """One prefill node, one decode node that prefills nothing if it can help it, three routers.

    Its nodes can be slow. Chats may have tools.
    """
    # Ports that outlive the process: a node that restarts comes back where it was.
    ports = ("--port", str(free_loopback_port()), "--kv-port", str(free_loopback_port()))
    step = ("--max-num-batched-tokens", str(PREFILL_STEP_TOKENS))
    return ClusterSpec(
        name=name,
        model=model,
        nodes=(
            NodeSpec("prefill-1", Role.PREFILL, step),
            NodeSpec("decode-1", Role.DECODE, ("--local-prefill-threshold", "0", *ports)),
        ),
        flags=SMALL_NODES,
        routers=tuple(
            ("--request-timeout-s", str(deadline_s))
            for deadline_s in (LONG_DEADLINE_S, LONG_DEADLINE_S, SHORT_DEADLINE_S)
        ),
        can_be_slow=True,
    )


def keyed_spec(name: str, model: Path, keys: Path) -> ClusterSpec:
    """A router, a prefill and a decode node with keys, whose KV travels over the network."""
    ports = ("--kv-port", str(free_loopback_port()), "--metrics-port", str(free_loopback_port()))
    return ClusterSpec(
        name=name,
        model=model,
        keys=keys,
        nodes=(
            NodeSpec("prefill-1", Role.PREFILL),
            NodeSpec("decode-1", Role.DECODE, ("--local-prefill-threshold", "0", *ports)),
        ),
        flags=(*SMALL_NODES, "--kv-transport", "zmq"),
        has_patient_routers=True,
    )


def relayed_spec(
    name: str, model: Path, relay: TcpProxy, folder: Path, *others: NodeSpec
) -> ClusterSpec:
    """One prefill node, `decode-1`, whose KV port it reaches through `relay`, and `others`.

    Nothing is cached. Writes into `folder`, which must outlive the cluster.
    """
    behind = ("--local-prefill-threshold", "0", "--kv-port", str(relay.target_port))
    return ClusterSpec(
        name=name,
        model=model,
        nodes=(
            # Short steps make short frames, which are acknowledged while a link is slow.
            NodeSpec("prefill-1", Role.PREFILL, ("--max-num-batched-tokens", "64")),
            NodeSpec("decode-1", Role.DECODE, behind, environ_of_endpoint(folder, relay.endpoint)),
            *others,
        ),
        flags=(*SMALL_NODES, "--kv-transport", "zmq", "--no-enable-prefix-caching"),
    )


def flag(spec: ClusterSpec, node_id: str, name: str) -> str:
    """The value of one flag of one node."""
    (node,) = [node for node in spec.nodes if node.node_id == node_id]
    return node.flags[node.flags.index(name) + 1]
