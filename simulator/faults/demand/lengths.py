"""How long a request may be, and an answer that is cut to what nodes hold. Pure."""

from __future__ import annotations

from common.errors import InternalError, InvalidRequest, PdserveError
from common.nodes import NodeRecord, Role
from simulator.faults.demand.grammars import WRONG
from simulator.faults.history import AskedRequest
from simulator.faults.shape import Shape, longest_of, node_names


def tokens_wanted(asked: AskedRequest, num_answered: int = 0) -> int:
    """Return how many tokens a node must hold that can take the request, or go on with it."""
    return asked.num_prompt + (num_answered + 1 if asked.is_cut else asked.max_tokens)


def lengths_of(shape: Shape, asked: AskedRequest) -> list[int]:
    """Return the tokens that each node holds which may have a role that answers the request."""
    one_token = asked.max_tokens == 1
    names = node_names(shape)
    prefill = Role.PREFILL.value
    return [longest_of(shape, one) for one in names if one_token or not one.startswith(prefill)]


def may_be_too_long(shape: Shape, asked: AskedRequest, *, is_still: bool) -> bool:
    """Return whether a request may be refused for its length.

    With `is_still` no node leaves and none moves: then only one that fits no node.
    """
    lengths = lengths_of(shape, asked) if is_still else _all_lengths(shape)
    least = max(lengths) if is_still else min(lengths)
    return tokens_wanted(asked) > least


def fewest_tokens(shape: Shape, asked: AskedRequest, *, is_still: bool) -> int:
    """Return the fewest tokens that a whole answer may have, unless it stops by itself."""
    if not asked.is_cut:
        return asked.max_tokens
    lengths = lengths_of(shape, asked) if is_still else _all_lengths(shape)
    left = [one - asked.num_prompt for one in lengths if one > asked.num_prompt]
    if not left:
        return asked.max_tokens
    return min(asked.max_tokens, max(left) if is_still else min(left))


def check_too_long(
    choice_id: str,
    error: PdserveError,
    num_wanted: int,
    able: list[NodeRecord],
    *,
    is_one_token: bool,
) -> None:
    """Check that a request of `num_wanted` tokens is refused for its length by no node's fault.

    `able` are the nodes that stay. Raises `InternalError`.
    """
    if not isinstance(error, InvalidRequest) or str(error) == WRONG:
        return
    for record in able:
        decodes = record.role is not Role.PREFILL or is_one_token
        if decodes and num_wanted <= record.max_model_len:
            node = record.incarnation
            raise InternalError(f"{choice_id} is too long, and {node} holds it: {error}")


def _all_lengths(shape: Shape) -> list[int]:
    return [longest_of(shape, one) for one in node_names(shape)]
