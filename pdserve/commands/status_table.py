"""A cluster as tables for the terminal. Pure: text in, text out."""

from __future__ import annotations

from collections.abc import Sequence

from common.nodes import KVLink
from pdserve.commands.cluster_status import ClusterStatus, Facts, role_of

_HEADINGS = (
    "NODE",
    "ROLE",
    "EPOCH",
    "VERSION",
    "PROTOCOL",
    "STATE",
    "RUNNING",
    "WAITING",
    "FREE BLOCKS",
    "KV CACHE",
    "QUARANTINED",
    "ADDRESS",
)
_SCHEDULING = (
    "NODE",
    "KEPT BACK",
    "PREEMPTED",
    "RECOMPUTED TOKENS",
    "DRAFTER",
    "ACCEPTED DRAFTS",
    "METRICS",
)
_PAIRS = ("PREFILL", "DECODE", "TRANSPORT", "STATE")
_LEFT_ALIGNED = frozenset(
    {
        "NODE",
        "ROLE",
        "VERSION",
        "STATE",
        "ADDRESS",
        "DRAFTER",
        "METRICS",
        "PREFILL",
        "DECODE",
        "TRANSPORT",
    }
)


def status_table(cluster: ClusterStatus) -> str:
    """Return the table: a line for the cluster, two for each node (its load and its scheduling),
    and one for each pair of nodes that hands prompts off.
    """
    models = sorted({node["model"] for node in cluster.nodes if "model" in node})
    count = len(cluster.nodes)
    title = f"{cluster.url}: {count} node{'' if count == 1 else 's'}"
    if models:
        title += f" serving {', '.join(models)}"
    if cluster.router_id:
        title += f", as {cluster.router_id} sees them"
    if cluster.is_store_away:
        title += "\nThe placement store is away: no node can join until it is back."
    for warning in cluster.warnings:
        title += f"\nWarning: {warning}."
    if not cluster.nodes:
        return f"{title}\nRequests have nowhere to run.\n"
    nodes = _aligned([_HEADINGS, *(_row(node) for node in cluster.nodes)])
    scheduling = _aligned([_SCHEDULING, *(_scheduling_row(node) for node in cluster.nodes)])
    shown = f"{title}\n\n{nodes}\nScheduling, since each node's start:\n{scheduling}"
    pairs = _pairs(cluster.nodes)
    return f"{shown}\nKV transfer:\n{_aligned([_PAIRS, *pairs])}" if pairs else shown


def _pairs(nodes: Sequence[Facts]) -> list[tuple[str, ...]]:
    """Return each prefill node with the decode nodes that can take its KV or have taken it.

    A decode node that left is shown as away for as long as its prefill node reports the link.
    """
    decoders = {node["node_id"]: node for node in nodes if role_of(node) == "decode"}
    pairs: list[tuple[str, ...]] = []
    for node in nodes:
        if role_of(node) != "prefill":
            continue
        links = {link.decode: link for link in node.get("kv_links", ())}
        silent = {decode.node_id for decode in node.get("kv_unreachable", ())}
        fitting = {name for name, other in decoders.items() if _kv(other) == _kv(node)}
        for name in sorted(fitting | links.keys()):
            link = links.get(name)
            transport = link.transport if link else "-"
            state = "unreachable" if name in silent else _link_state(link, name in decoders)
            pairs.append((node["node_id"], name, transport, state))
    return pairs


def _kv(node: Facts) -> tuple[object, object]:
    """Return what two nodes that exchange KV have in common."""
    return node.get("fingerprint"), node.get("kv_protocol")


def _link_state(link: KVLink | None, is_alive: bool) -> str:
    if not is_alive:
        return "away"
    if link is None:
        return "not used yet"
    return "connected" if link.is_connected else "idle"


def _row(node: Facts) -> tuple[str, ...]:
    return (
        node["node_id"],
        role_of(node),
        _shown(node.get("epoch")),
        node.get("version") or "-",
        _shown(node.get("protocol")),
        _state(node),
        _of(node.get("num_running"), node.get("max_num_seqs")),
        _shown(node.get("num_waiting")),
        _of(node.get("free_blocks"), node.get("num_blocks")),
        _size(node.get("kv_cache_bytes")),
        _shown(node.get("num_quarantined_blocks")),
        node.get("control_address", ""),
    )


def _state(node: Facts) -> str:
    told = [state for state in ("draining", "suspected") if node.get(f"is_{state}")]
    return ", ".join(told) or "ready"


def _scheduling_row(node: Facts) -> tuple[str, ...]:
    """Return a row. `KEPT BACK`: the share of the remaining outputs that has blocks set aside now.

    A node whose reservation policy has no ratio reports 0. On a prefill node no output grows, so
    its ratio is not shown.
    """
    ratio = None if role_of(node) == "prefill" else node.get("new_token_ratio")
    return (
        node["node_id"],
        f"{ratio:.0%}" if ratio else "-",
        _shown(node.get("num_preemptions")),
        _shown(node.get("num_recomputed_tokens")),
        node.get("speculative_method", "-"),
        _accepted(node),
        node.get("metrics_address") or "-",
    )


def _accepted(node: Facts) -> str:
    drafted, accepted = node.get("num_drafted"), node.get("num_accepted")
    share = f" ({accepted / drafted:.0%})" if drafted and accepted is not None else ""
    return _of(accepted, drafted) + share


def _shown(count: int | None) -> str:
    return "-" if count is None else str(count)


def _size(num_bytes: int | None) -> str:
    """Return a dash also for 0: a node of an earlier version does not tell it."""
    return f"{num_bytes / (1 << 20):.0f} MiB" if num_bytes else "-"


def _of(count: int | None, total: int | None) -> str:
    return _shown(count) if total is None else f"{_shown(count)} of {total}"


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    headings = rows[0]
    widths = [max(len(row[column]) for row in rows) for column in range(len(headings))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if heading in _LEFT_ALIGNED else cell.rjust(width)
            for cell, width, heading in zip(row, widths, headings, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines) + "\n"
