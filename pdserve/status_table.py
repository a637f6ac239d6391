"""A cluster as a table for the terminal. Pure: text in, text out."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.cluster_view import ClusterView, NodeView

_HEADINGS = ("NODE", "ROLE", "EPOCH", "STATE", "RUNNING", "WAITING", "FREE BLOCKS", "ADDRESS")
_RIGHT_ALIGNED = frozenset({"EPOCH", "RUNNING", "WAITING", "FREE BLOCKS"})


def status_table(cluster: ClusterView) -> str:
    """A line for the cluster and one for each node."""
    models = sorted({node.model for node in cluster.nodes if node.model})
    count = len(cluster.nodes)
    title = f"{cluster.url}: {count} node{'' if count == 1 else 's'}"
    if models:
        title += f" serving {', '.join(models)}"
    if cluster.router_id:
        title += f", as {cluster.router_id} sees them"
    if cluster.is_store_away:
        title += "\nThe placement store is away: nodes that join or leave are not noticed."
    if not cluster.nodes:
        return f"{title}\nRequests have nowhere to run.\n"
    return f"{title}\n\n" + _aligned([_HEADINGS, *(_row(node) for node in cluster.nodes)])


def _row(node: NodeView) -> tuple[str, ...]:
    return (
        node.node_id,
        node.role,
        _shown(node.epoch),
        "draining" if node.is_draining else "ready",
        _of(node.num_running, node.max_num_seqs),
        _shown(node.num_waiting),
        _of(node.free_blocks, node.num_blocks),
        node.address,
    )


def _shown(count: int | None) -> str:
    return "-" if count is None else str(count)


def _of(count: int | None, total: int | None) -> str:
    return _shown(count) if total is None else f"{_shown(count)} of {total}"


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if heading in _RIGHT_ALIGNED else cell.ljust(width)
            for cell, width, heading in zip(row, widths, _HEADINGS, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines) + "\n"
