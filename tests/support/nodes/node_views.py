"""Nodes as placement sees them."""

from __future__ import annotations

from common.ids import Incarnation
from common.nodes import NodeLoad, Role
from router.core.known.node_view import NodeView
from router.core.placement import ChosenNodes, Placing
from router.core.policies.query import Query
from tests.support.nodes.node_records import record


def node(
    node_id: str,
    role: Role = Role.DECODE,
    *,
    num_requests: int = 0,
    fingerprint: str = "f",
    max_model_len: int = 1000,
    free_blocks: int = 100,
    queued_tokens: int = 0,
    is_draining: bool = False,
    is_suspected: bool = False,
    kv_protocol: int = 4,
    has_grammars: bool = False,
    has_token_rules: bool = False,
    has_prompt_logprobs: bool = False,
    sends_blocks: bool = True,
    num_cached_blocks: int = 0,
    kv_unreachable: tuple[Incarnation, ...] = (),
) -> NodeView:
    described = record(
        node_id,
        role,
        fingerprint=fingerprint,
        max_model_len=max_model_len,
        kv_protocol=kv_protocol,
        has_grammars=has_grammars,
        has_token_rules=has_token_rules,
        has_prompt_logprobs=has_prompt_logprobs,
        sends_blocks=sends_blocks,
    )
    load = NodeLoad(
        free_blocks=free_blocks,
        free_seats=10,
        num_running=0,
        num_waiting=0,
        queued_tokens=queued_tokens,
        is_draining=is_draining,
        num_cached_blocks=num_cached_blocks,
        kv_unreachable=kv_unreachable,
    )
    return NodeView(
        record=described,
        load=load,
        num_requests=num_requests,
        num_used_blocks=max(0, described.num_blocks - free_blocks),
        num_queued_tokens=queued_tokens,
        is_suspected=is_suspected,
    )


def prefill(node_id: str, **more: object) -> NodeView:
    return node(node_id, Role.PREFILL, **more)  # type: ignore[arg-type]


def query(num_tokens: int = 16, max_tokens: int = 8, first: int = 0) -> Query:
    return Query(tuple(range(first, first + num_tokens)), max_tokens)


def names(choice: ChosenNodes) -> tuple[str | None, str | None]:
    return (
        None if choice.decode is None else choice.decode.node_id,
        None if choice.prefill is None else choice.prefill.node_id,
    )


def placing(policy: str, *, lease_s: float = 60.0, seed: int = 0) -> Placing:
    """What decides in a router that serves the model "tiny"."""
    return Placing(model="tiny", lease_s=lease_s, policy=policy, session_ttl_s=600.0, seed=seed)
