"""A running cluster as its router's `/v1/cluster` tells it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pdserve.commands.http_client import RouterUnreachable, fetch_json

PATH = "/v1/cluster"


@dataclass(frozen=True, slots=True)
class LinkView:
    """A decode node that a node hands prompts off to, and how KV travels there."""

    decode: str
    transport: str
    is_connected: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """One node. A number that the router did not tell is None."""

    node_id: str
    role: str
    epoch: int | None
    address: str
    model: str
    num_blocks: int | None
    free_blocks: int | None
    max_num_seqs: int | None
    num_running: int | None
    num_waiting: int | None
    is_draining: bool
    speculative_method: str
    num_preemptions: int | None
    num_recomputed_tokens: int | None
    num_drafted: int | None
    num_accepted: int | None
    new_token_ratio: float | None
    metrics_address: str
    fingerprint: str
    num_quarantined_blocks: int | None
    kv_links: tuple[LinkView, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterView:
    """The router that was asked and the nodes it knows, ordered by role and name."""

    url: str
    router_id: str
    is_store_away: bool
    warnings: tuple[str, ...]
    nodes: tuple[NodeView, ...]


def fetch_cluster(url: str, *, api_key: str = "", timeout_s: float = 5.0) -> ClusterView:
    """Ask the router at `url`. Raises `RouterUnreachable` or `RouterRefused`."""
    url = url.rstrip("/")
    reply = fetch_json(url, PATH, api_key=api_key, timeout_s=timeout_s)
    if not isinstance(reply, dict) or not isinstance(reply.get("nodes"), list):
        raise RouterUnreachable(f"{url}{PATH}: the answer lists no nodes: no pdserve router?")
    router = reply.get("router")
    router_id = router.get("router_id") if isinstance(router, dict) else None
    nodes = [_node(url, node) for node in reply["nodes"]]
    warnings = reply.get("warnings")
    return ClusterView(
        url=url,
        router_id=str(router_id or ""),
        is_store_away=reply.get("placement_store") == "away",
        warnings=tuple(map(str, warnings)) if isinstance(warnings, list) else (),
        nodes=tuple(sorted(nodes, key=lambda node: (node.role, node.node_id))),
    )


def _node(url: str, raw: Any) -> NodeView:
    if not isinstance(raw, dict) or not isinstance(raw.get("node_id"), str):
        raise RouterUnreachable(f"{url}{PATH}: a node has no node_id: no pdserve router?")
    return NodeView(
        node_id=raw["node_id"],
        role=str(raw.get("role", "")),
        epoch=_count(raw, "epoch"),
        address=str(raw.get("address", "")),
        model=str(raw.get("model", "")),
        num_blocks=_count(raw, "num_blocks"),
        free_blocks=_count(raw, "free_blocks"),
        max_num_seqs=_count(raw, "max_num_seqs"),
        num_running=_count(raw, "num_running"),
        num_waiting=_count(raw, "num_waiting"),
        is_draining=raw.get("is_draining") is True,
        speculative_method=str(raw.get("speculative_method", "")),
        num_preemptions=_count(raw, "num_preemptions"),
        num_recomputed_tokens=_count(raw, "num_recomputed_tokens"),
        num_drafted=_count(raw, "num_drafted"),
        num_accepted=_count(raw, "num_accepted"),
        new_token_ratio=_number(raw, "new_token_ratio"),
        metrics_address=str(raw.get("metrics_address", "")),
        fingerprint=str(raw.get("fingerprint", "")),
        num_quarantined_blocks=_count(raw, "num_quarantined_blocks"),
        kv_links=_links(raw),
    )


def _links(raw: dict[str, Any]) -> tuple[LinkView, ...]:
    links = raw.get("kv_links")
    return tuple(
        LinkView(
            decode=str(link.get("decode", "")),
            transport=str(link.get("transport", "")),
            is_connected=link.get("is_connected") is True,
        )
        for link in (links if isinstance(links, list) else ())
        if isinstance(link, dict) and link.get("decode")
    )


def _number(raw: dict[str, Any], key: str) -> float | None:
    value = raw.get(key)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number else None  # type: ignore[arg-type]


def _count(raw: dict[str, Any], key: str) -> int | None:
    value = raw.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
