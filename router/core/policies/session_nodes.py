"""The node that served a session last, unless it is much busier than another. For every policy."""

from __future__ import annotations

from collections.abc import Sequence

from common.ids import Incarnation
from common.nodes import Role
from router.core.known.node_view import QUEUED_TOKENS_SCALE, NodeView
from router.core.policies.query import Query

MOST_EXTRA_PRESSURE = 0.5
"""How much busier than the idlest node the session's may be: half of its seats, or of its blocks.
Beyond that, waiting costs more than what is kept saves. A node that computes prompts saves the
tokens of the last one too: these may wait there before this one."""


def session_node(
    nodes: Sequence[NodeView], last: Incarnation | None, query: Query
) -> NodeView | None:
    """Return `last` where it is among `nodes` and not too busy; else None: the policy chooses.

    The nodes are those that can take the request: one that drains, or was tried, is not among them.
    """
    if last is None:
        return None
    held = next((node for node in nodes if node.incarnation == last), None)
    if held is None or (held.is_full and not all(node.is_full for node in nodes)):
        return None
    most = MOST_EXTRA_PRESSURE
    if held.record.role is not Role.DECODE:
        num_saved = min(query.last.num_tokens, len(query.prompt_token_ids))
        most += num_saved / QUEUED_TOKENS_SCALE
    is_near = held.pressure - min(node.pressure for node in nodes) <= most
    return held if is_near else None
