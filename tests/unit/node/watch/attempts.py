"""Attempts as spans show them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from common.ids import Incarnation
from engine.core.sequences.sequence import Sequence
from node.flow.attempts.attempt_table import NodeAttempt
from tests.support.engine.build import make_request

PARENT = f"00-{'1' * 32}-{'2' * 16}-01"


def attempt_with(
    *,
    is_exported: bool = False,
    has_remote_kv: bool = False,
    output_token_ids: tuple[int, ...] = (),
    **fields: Any,
) -> NodeAttempt:
    request = make_request(20, max_tokens=9, output_token_ids=output_token_ids)
    request = replace(request, traceparent=PARENT)
    sequence = Sequence(1, request, is_exported=is_exported, has_remote_kv=has_remote_kv)
    attempt = NodeAttempt(request.id, Incarnation("router", 1), sequence, 99.0, received_at_s=10.0)
    for name, value in fields.items():
        setattr(attempt, name, value)
    return attempt
