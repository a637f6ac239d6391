"""Two administrators who give nodes other roles at the same time."""

from __future__ import annotations

import asyncio

import pytest

from common.errors import NodeLost, PdserveError
from common.nodes import Role
from router.cluster.drain import drain_node
from router.cluster.role import MovedNode, give_role
from router.dispatch.client.calls_beside import CallsBeside
from router.http.errors import ApiError
from tests.integration.scripted_cluster import Cluster
from tests.integration.scripted_cluster import (
    scripted_cluster as scripted_cluster,
)


async def test_of_two_changes_at_once_the_one_that_leaves_no_decode_node_is_refused(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("d0", "d1"):
        await cluster.add(name, Role.DECODE)
    router = await cluster.router()
    id_of = {node.incarnation.node_id: node.incarnation for node in cluster.nodes}
    answers: asyncio.Queue[PdserveError | None] = asyncio.Queue()

    async def set_role(_beside: CallsBeside, _role: Role, _number: int) -> None:
        refused = await answers.get()
        if refused is not None:
            raise refused

    monkeypatch.setattr(CallsBeside, "set_role", set_role)
    for answer in (NodeLost("it does not answer"), None):
        first = asyncio.create_task(give_role(router.pool, "d0", Role.PREFILL))
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="without d1 no node would decode"):
            await give_role(router.pool, "d1", Role.PREFILL)
        answers.put_nowait(answer)
        (moved,) = await asyncio.gather(first, return_exceptions=True)
    # The end of one change of a node is not that of another one of the same node.
    both = [asyncio.create_task(router.pool.set_role(id_of["d0"], Role.PREFILL)) for _ in "ab"]
    await asyncio.sleep(0)
    answers.put_nowait(None)
    await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    assert router.pool.changes.roles == [(id_of["d0"], Role.PREFILL)]
    answers.put_nowait(None)
    await asyncio.gather(*both)
    assert router.pool.changes.roles == []
    assert isinstance(moved, MovedNode)
    assert (moved.earlier, moved.role) == (Role.DECODE, Role.PREFILL)


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
    with pytest.raises(ApiError, match="without d1 no node would decode"):
        await give_role(router.pool, "d1", Role.PREFILL)
