"""A cluster as tables for the terminal: what its operator looks for, or with `is_wide` all facts.

Pure: text in, text out.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence

from common.ids import Incarnation
from common.nodes import KVLink
from pdserve.commands.cluster_status import ClusterStatus, Facts, role_of

_WIDTH = 80
_SHORT = ("NODE", "ROLE", "STATE", "UP", "SEATS FREE", "BLOCKS FREE", "WAITING")
_LANES = ("FROM", "TO", "LANE", "STATE")
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
    "KEPT BLOCKS",
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
        "FROM",
        "TO",
        "LANE",
    }
)


def status_table(cluster: ClusterStatus, *, is_wide: bool) -> str:
    """Return what is served and how, a row for each node and one for each pair that hands prompts
    off. With names of up to 16 characters no line is longer than 80.

    With `is_wide` each node has two rows with all that it tells, however long they are.
    """
    title = _title(cluster)
    if not cluster.nodes:
        return f"{title}\n" + ("" if cluster.not_ready else "Requests have nowhere to run.\n")
    pairs = _pairs(cluster.nodes)
    if not is_wide:
        nodes = _fitted([_SHORT, *(_short_row(node) for node in cluster.nodes)])
        return f"{title}\n\n{nodes}" + (f"\n{_fitted([_LANES, *pairs])}" if pairs else "")
    nodes = _aligned([_HEADINGS, *(_row(node) for node in cluster.nodes)])
    scheduling = _aligned([_SCHEDULING, *(_scheduling_row(node) for node in cluster.nodes)])
    shown = f"{title}\n\n{nodes}\nScheduling, since each node's start:\n{scheduling}"
    return f"{shown}\nKV transfer:\n{_aligned([_PAIRS, *pairs])}" if pairs else shown


def _title(cluster: ClusterStatus) -> str:
    models = sorted({node["model"] for node in cluster.nodes if "model" in node})
    count = len(cluster.nodes)
    serving = f" serving {', '.join(models)}" if models else ""
    lines = [f"{cluster.url}: {count} node{'' if count == 1 else 's'}{serving}"]
    lines += [_router(cluster)] if cluster.router_id or cluster.serving else []
    lines += [cluster.scaling] if cluster.scaling else []
    lines += _devices(cluster.nodes)
    if cluster.not_ready:
        lines.append(f"The router is not ready: {cluster.not_ready}.")
    if cluster.is_store_away:
        why = f" ({cluster.store_error})" if cluster.store_error else ""
        lines.append(f"The placement store is away{why}: no node can join until it is back.")
    lines += [f"Warning: {warning}." for warning in cluster.warnings]
    wrapped = (textwrap.wrap(line, _WIDTH, break_long_words=False) for line in lines)
    return "\n".join(line for part in wrapped for line in part)


def _devices(nodes: Sequence[Facts]) -> list[str]:
    """Return how many nodes compute on each accelerator; a line for each, none for CPUs."""
    counts = Counter(node["device"] for node in nodes if node.get("device"))
    return [
        f"{count} node{'' if count == 1 else 's'} on {device}."
        for device, count in sorted(counts.items())
    ]


def _router(cluster: ClusterStatus) -> str:
    """Return what the router served in the last seconds."""
    told = cluster.serving
    name = f"Router {cluster.router_id}" if cluster.router_id else "The router"
    up = f", up {_span(told['uptime_s'])}" if "uptime_s" in told else ""
    parts = []
    if "in_progress" in told:
        parts.append(f"{told['in_progress']:.0f} in progress")
    if "tokens_per_s" in told:
        parts.append(f"{told['tokens_per_s']:.1f} tokens/s")
    if "ttft_p50_s" in told:
        parts.append(f"first token {1000 * told['ttft_p50_s']:.0f} ms")
    return f"{name}{up}{': ' if parts else ''}{', '.join(parts)}"


def _short_row(node: Facts) -> list[str]:
    seats = node.get("max_num_seqs")
    uptime_s = node.get("uptime_s")
    return [
        node["node_id"],
        role_of(node) or "-",
        _state(node),
        _span(uptime_s) if uptime_s else "-",
        _part(node.get("free_seats"), seats),
        _part(node.get("free_blocks"), node.get("num_blocks")),
        _shown(node.get("num_waiting")),
    ]


def _span(span_s: float) -> str:
    """Return a time as its two largest units: 42s, 3m20s, 5h7m, 12d4h."""
    seconds = int(span_s)
    for unit, unit_s, smaller, smaller_s in (
        ("d", 86400, "h", 3600),
        ("h", 3600, "m", 60),
        ("m", 60, "s", 1),
    ):
        if seconds >= unit_s:
            return f"{seconds // unit_s}{unit}{seconds % unit_s // smaller_s}{smaller}"
    return f"{seconds}s"


def _part(count: int | None, total: int | None) -> str:
    return _shown(count) if total is None else f"{_shown(count)}/{total}"


def _fitted(rows: Sequence[Sequence[str]]) -> str:
    """Return a table; where it is too wide, each name stands on a line above its row.

    A name is never cut: it is what `pdserve drain` takes.
    """
    table = _aligned(rows)
    if max(map(len, table.splitlines())) <= _WIDTH:
        return table
    rest = _aligned([row[1:] for row in rows]).splitlines()
    named = zip(rows[1:], rest[1:], strict=True)
    return (
        "\n".join(
            [f"  {rest[0]}", *(line for row, text in named for line in (row[0], f"  {text}"))]
        )
        + "\n"
    )


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
        silent = {one.node_id for one in node.get("kv_unreachable", ()) if _lives(one, decoders)}
        fitting = {name for name, other in decoders.items() if _kv(other) == _kv(node)}
        for name in sorted(fitting | links.keys()):
            link = links.get(name)
            transport = link.transport if link else "-"
            state = "unreachable" if name in silent else _link_state(link, name in decoders)
            pairs.append((node["node_id"], name, transport, state))
    return pairs


def _lives(decode: Incarnation, decoders: Mapping[str, Facts]) -> bool:
    """Return whether this life of a decode node is the one that is shown, by its name."""
    shown = decoders.get(decode.node_id)
    return shown is not None and shown.get("epoch", decode.epoch) == decode.epoch


def _kv(node: Facts) -> tuple[object, object]:
    """Return what two nodes that exchange KV have in common."""
    return node.get("fingerprint"), node.get("kv_protocol")


def _link_state(link: KVLink | None, is_alive: bool) -> str:
    if not is_alive:
        return "away"
    if link is None:
        return "not used yet"
    return "connected" if link.is_connected else "idle"


def _row(node: Facts) -> list[str]:
    return [
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
    ]


def _state(node: Facts) -> str:
    told = [state for state in ("draining", "suspected") if node.get(f"is_{state}")]
    return ", ".join(told) or "ready"


def _scheduling_row(node: Facts) -> list[str]:
    """Return a row. `KEPT BACK`: the share of the remaining outputs that has blocks set aside now.

    A node whose reservation policy has no ratio reports 0. On a prefill node no output grows, so
    its ratio is not shown. `KEPT BLOCKS`: those of prefixes in host memory.
    """
    ratio = None if role_of(node) == "prefill" else node.get("new_token_ratio")
    return [
        node["node_id"],
        f"{ratio:.0%}" if ratio else "-",
        _shown(node.get("num_preemptions")),
        _shown(node.get("num_recomputed_tokens")),
        _shown(node.get("num_prefix_host_blocks")),
        node.get("speculative_method", "-"),
        _accepted(node),
        node.get("metrics_address") or "-",
    ]


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
