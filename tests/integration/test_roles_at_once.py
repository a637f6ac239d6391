"""Two administrators who give nodes other roles at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from common.errors import LastInRole, PdserveError
from common.nodes import Role
from router.cluster.drain import drain_node
from router.cluster.role import give_role
from router.dispatch.client.calls_beside import CallsBeside
from router.http.errors import ApiError
from tests.integration.scripted_cluster import Cluster
from tests.integration.scripted_cluster import (
    scripted_cluster as scripted_cluster,
)


async def test_changes_under_way_are_counted_until_their_nodes_have_answered(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("d0", "d1"):
        await cluster.add(name, Role.DECODE)
    router = await cluster.router()
    answers: asyncio.Queue[Role | PdserveError] = asyncio.Queue()
    asked: list[Sequence[str] | None] = []

    async def set_role(
        _beside: CallsBeside, _role: Role, _number: int, others: Sequence[str] | None
    ) -> Role:
        asked.append(others)
        answer = await answers.get()
        if isinstance(answer, PdserveError):
            raise answer
        return answer

    monkeypatch.setattr(CallsBeside, "set_role", set_role)
    pool = router.pool
    both = [asyncio.create_task(give_role(pool, "d0", Role.PREFILL)) for _ in "ab"]
    await asyncio.sleep(0)
    assert asked == [["d1"]] * 2
    answers.put_nowait(Role.MIXED)
    (moved,), _ = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    assert pool.changes.are_asked(pool.nodes())
    answers.put_nowait(LastInRole("no other node does what it does"))
    found = await asyncio.gather(*both, return_exceptions=True)
    assert not pool.changes.are_asked(pool.nodes())
    assert (moved.result().earlier, moved.result().role) == (Role.MIXED, Role.PREFILL)
    (refused,) = (one for one in found if isinstance(one, ApiError))
    assert (refused.status, refused.code) == (409, "last_decode_node")


async def test_a_node_that_was_told_to_leave_is_not_counted_on_before_it_says_so(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("d0", "d1"):
        await cluster.add(name, Role.DECODE)
    router = await cluster.router()

    async def drain(_beside: CallsBeside) -> float:
        return 5.0

    monkeypatch.setattr(CallsBeside, "drain", drain)
    assert (await drain_node(router.pool, "d0")).timeout_s == 5.0
    (d1,) = (one for one in router.pool.nodes() if one.record.node_id == "d1")
    assert router.pool.changes.others_that_stay(router.pool.nodes(), d1.incarnation) == []
