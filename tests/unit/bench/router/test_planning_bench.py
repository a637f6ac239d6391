"""`bench.router.planning` measures bodies that the router takes, and stalls that there are."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from bench.router.planning import bodies, longest_stall_ms
from common.settings.config import ApiConfig
from router.api.bodies.json_text import check_structure
from router.api.planning.body_planner import INLINE_BODY_BYTES, MAX_THREAD_BODY_BYTES

LARGEST = ApiConfig().max_body


@pytest.mark.parametrize("size", [INLINE_BODY_BYTES, MAX_THREAD_BODY_BYTES, LARGEST])
@pytest.mark.parametrize("name", bodies())
def test_bodies_are_as_large_as_they_may_be(name: str, size: int) -> None:
    _, body = bodies()[name](size)
    assert len(body) <= size
    check_structure(body)
    if size < LARGEST:
        json.loads(body)
        assert len(body) > size / 2 or name in ("lists of token ids", "long messages")
    else:
        assert len(body) > 512 << 10


async def test_a_stall_is_seen() -> None:
    async def stalls() -> None:
        await asyncio.sleep(0)
        time.sleep(0.05)  # noqa: ASYNC251 (this is the stall)

    stall_ms, took_ms = await longest_stall_ms(stalls())
    assert took_ms >= stall_ms >= 50
