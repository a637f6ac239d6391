"""What the test of a rolling upgrade concludes from leases and placements."""

from __future__ import annotations

from typing import Any

from common.ids import Incarnation
from common.nodes import KVLink, NodeLoad, Role
from common.version import OLDEST_PROTOCOL_VERSION as OLD
from common.version import PROTOCOL_VERSION as NEW
from placement.store import LiveNode
from tests.support.nodes.node_records import record
from tests.upgrade.handoffs import Handoffs, Pair, Trio


def lease(
    name: str, epoch: int, *, protocol: int = NEW, layout: str = "a", **sent: int
) -> LiveNode:
    """A node's lease; `sent` is how many bytes it has sent to each decode node."""
    role = Role.PREFILL if name.startswith("p") else Role.DECODE
    described = record(name, role, epoch=epoch, fingerprint=layout, protocol=protocol)
    links = tuple(KVLink(decode, "shm", True, num_bytes) for decode, num_bytes in sent.items())
    load = NodeLoad(
        free_blocks=1, free_seats=1, num_running=0, num_waiting=0, queued_tokens=0, kv_links=links
    )
    return LiveNode(record=described, load=load)


def told(*pairs: tuple[str | None, str | None], router: int | None = NEW) -> dict[str, Any]:
    """A router's `/v1/cluster`; routers of protocol 2 did not name theirs."""
    placements = [
        {"request_id": f"r{number}", "attempt": 0, "prefill": prefill, "decode": decode}
        for number, (prefill, decode) in enumerate(pairs)
    ]
    return {
        "router": {} if router is None else {"protocol": router},
        "recent_placements": placements,
    }


def test_bytes_count_for_the_life_of_the_decode_node_that_took_them() -> None:
    seen = Handoffs()
    seen.on_leases([lease("p", 1, d=100), lease("d", 1)])
    seen.on_leases([lease("p", 1, d=130), lease("d", 1)])
    seen.on_leases([lease("p", 1, d=130)])
    seen.on_leases([lease("p", 1, d=130), lease("d", 2)])
    first, second = Incarnation("d", 1), Incarnation("d", 2)
    assert seen.num_bytes == {Pair(Incarnation("p", 1), first): 130}
    assert seen.is_used(first)
    assert not seen.is_used(second)
    seen.on_leases([lease("p", 1, d=131), lease("d", 2)])
    assert seen.num_bytes[Pair(Incarnation("p", 1), second)] == 1


def test_bytes_between_two_lives_count_for_none() -> None:
    seen = Handoffs()
    seen.on_leases([lease("p", 1, d=100), lease("d", 1)])
    seen.on_leases([lease("p", 1, d=150), lease("d", 2)])
    assert seen.num_bytes.total() == 100


def test_choices_are_counted_by_version_and_once() -> None:
    seen = Handoffs()
    seen.on_leases([lease("p", 1, protocol=OLD), lease("d", 4)])
    for _ in range(2):
        seen.on_cluster(told(("p#1", "d#4"), (None, "d#4"), ("p#9", "d#4"), router=None))
    assert seen.chosen() == {Trio(2, OLD, NEW): 1}


def test_a_pair_that_cannot_exchange_kv_is_found_wherever_it_shows() -> None:
    seen = Handoffs()
    seen.on_leases([lease("p", 1), lease("d", 1), lease("d2", 1, layout="b")])
    seen.on_cluster(told(("p#1", "d#1")))
    assert seen.misfits() == []
    seen.on_cluster(told(("p#1", "d2#1")))
    assert seen.misfits() == ["p#1 and d2#1"]
    again = Handoffs()
    again.on_leases([lease("p", 1, d2=5), lease("d2", 1, layout="b")])
    assert again.misfits() == ["p#1 and d2#1"]


def test_what_did_not_work_together_is_named() -> None:
    seen = Handoffs()
    seen.on_leases([lease("p", 1, protocol=OLD, d=7), lease("d", 1)])
    seen.on_leases([lease("p2", 1, layout="b"), lease("d", 1)])
    pair = f"a prefill node of protocol {OLD} and a decode node of protocol {NEW}"
    unchosen = [f"no router of protocol {router} chose {pair}" for router in (OLD, NEW)]
    assert seen.missing() == unchosen
    seen.on_cluster(told(("p#1", "d#1"), router=OLD))
    assert seen.missing() == unchosen[1:]
    seen.on_leases([lease("p3", 1), lease("d", 1)])
    new = f"a prefill node of protocol {NEW} and a decode node of protocol {NEW}"
    assert f"no KV went between {new}" in seen.missing()
