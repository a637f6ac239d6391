"""The node with the least to do, where what it lacks of the prompt counts as work.

Tokens count, and not the share of the prompt: a start that all prompts share is soon on every node,
because it is worth no more than the work that it saves once.
"""

from __future__ import annotations

from collections.abc import Sequence

from common.nodes import Role
from router.core.known.block_index import HeldBlocks
from router.core.known.node_view import QUEUED_TOKENS_SCALE, NodeView
from router.core.policies.query import PolicyState, Query

_SENT_SHARE = 1 / 4
"""A token that a decode node gets from a prefill node costs this much of a computed one."""
_MOST_SENT = 1 / 8
"""The most that this weighs: an eighth of the seats, which are what a decode node runs out of."""


def prefix_affinity(nodes: Sequence[NodeView], query: Query, state: PolicyState) -> list[float]:
    """Return `1 / (1 + pressure)` per node, the tokens of the prompt that it lacks included."""
    found: dict[tuple[str, int], HeldBlocks] = {}
    fingerprint, block_size, held = "", 0, None
    num_tokens, scores = len(query.prompt_token_ids), []
    for node in nodes:
        record = node.record
        if held is None or record.block_size != block_size or record.fingerprint != fingerprint:
            layout = fingerprint, block_size = record.fingerprint, record.block_size
            held = found.get(layout) or state.blocks.held(query.block_keys(record))
            found[layout] = held
        work = (num_tokens - held.on(node.incarnation) * block_size) / QUEUED_TOKENS_SCALE
        if record.role is Role.DECODE:
            work = min(_SENT_SHARE * work, _MOST_SENT)
        scores.append(1 / (1 + node.pressure + work))
    return scores
