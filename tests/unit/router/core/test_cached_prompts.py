"""What a node has cached of a prompt is no work that waits there, and is counted once."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from common.errors import Overloaded
from common.kv.blocks import block_key
from common.nodes import NodeLoad, NodeRecord, Role
from common.request import FinishReason
from placement.store import LiveNode
from router.core.effects import Effect, LegClosed, SendPrefill, SendReserve
from router.core.held_load import Held, OwnLoad
from router.core.known.block_reports import BlockReport
from router.core.membership import Membership
from router.core.placement import Placer
from router.core.request_flow import RequestFlow
from router.core.scaling.measure import Meter
from tests.support.nodes.node_views import names, node, prefill, query
from tests.unit.router.core.flow_events import D0, D1, FIRST, P0, P1, TICKET, new_flow, output

RECORD = NodeRecord(
    node_id="p0",
    epoch=1,
    role=Role.PREFILL,
    control_address="127.0.0.1:1",
    model="m",
    fingerprint="f",
    block_size=4,
    num_blocks=100_000,
    max_num_seqs=256,
    max_model_len=100_000,
)
IDLE = NodeLoad(free_blocks=100_000, free_seats=256, num_running=0, num_waiting=0, queued_tokens=0)
RUNNING = NodeLoad(
    free_blocks=99_000,
    free_seats=240,
    num_running=2,
    num_waiting=8,
    queued_tokens=3002,
    num_found_tokens=27_000,
)


def listing(*loads: NodeLoad) -> list[LiveNode]:
    """Return a decode node and prefill nodes with these loads."""
    roles = [Role.DECODE, *(Role.PREFILL for _ in loads)]
    ids = ["d0", *(f"p{number}" for number in range(len(loads)))]
    return [
        LiveNode(
            record=NodeRecord(**{**_fields(RECORD), "node_id": node_id, "role": role}), load=load
        )
        for node_id, role, load in zip(ids, roles, (IDLE, *loads), strict=True)
    ]


def _fields(record: NodeRecord) -> dict[str, object]:
    return {name: getattr(record, name) for name in record.__dataclass_fields__ if name != "roles"}


def members(*loads: NodeLoad) -> Membership:
    found = Membership(model="m", lease_s=5.0)
    nodes = listing(*loads)
    found.on_listing(nodes, 0.0)
    for one in nodes:
        found.on_heard(one.record.incarnation)
    return found


def test_prompts_that_are_nearly_cached_do_not_send_others_to_a_busier_node() -> None:
    cluster = members(IDLE, IDLE)
    for _ in range(5):
        cluster.on_leg_opened(P0, 3000, 2900)
    cluster.on_leg_opened(P1, 4000)
    choice = Placer("least_loaded").choose(cluster.nodes(), query(), frozenset())
    assert names(choice) == ("d0", "p0"), "500 tokens are to be computed there, and 4,000 on p1"


def test_a_report_of_cached_prompts_counts_what_is_to_be_computed() -> None:
    reported = NodeLoad(**{**_load_fields(IDLE), "queued_tokens": 500, "num_found_tokens": 14_500})
    other = NodeLoad(**{**_load_fields(IDLE), "queued_tokens": 4000})
    choice = Placer("least_loaded").choose(members(reported, other).nodes(), query(), frozenset())
    assert names(choice) == ("d0", "p0")


def _load_fields(load: NodeLoad) -> dict[str, object]:
    return {name: getattr(load, name) for name in load.__dataclass_fields__}


def test_cached_tokens_take_blocks() -> None:
    own = OwnLoad()
    own.open(400, 360)
    assert own.held(RECORD, None) == Held(1, 100, 40)
    own.close(400, 360)
    assert own == OwnLoad(_peak=1)


def test_the_estimate_never_falls_below_zero() -> None:
    own = OwnLoad()
    own.open(40, 36)
    own.close(80, 0)
    own.close(0, 72)
    assert own.held(RECORD, None) == Held(0, 0, 0)
    own.open(8, 40)
    assert own.held(RECORD, None).num_queued_tokens == 0


@pytest.mark.parametrize(
    ("depths", "expected"),
    [
        ({}, 0),
        ({"p0": 3}, 12),
        ({"p0": 10}, 39),  # one token is computed
        ({"p0": 3, "p1": 7}, 28),  # it is pulled
        ({"p0": 7, "d0": 3}, 28),
    ],
)
def test_a_choice_says_what_its_prefill_node_need_not_compute(
    depths: dict[str, int], expected: int
) -> None:
    nodes = [node("d0"), prefill("p0"), prefill("p1", queued_tokens=90_000)]
    placer, prompt = Placer("least_loaded"), query(num_tokens=40)
    keys = [block_key(one) for one in prompt.block_hashes(nodes[0].record)]
    for one in nodes:
        report = BlockReport(True, tuple(keys[: depths.get(one.incarnation.node_id, 0)]), ())
        placer.on_blocks(one.incarnation, report)
    choice = placer.choose(nodes, prompt, frozenset())
    assert (choice.prefill, choice.num_cached) == (P0, expected)


def counted(effects: list[Effect]) -> Counter[tuple[object, int]]:
    """Return the prefill legs that effects open, less those that they close."""
    legs: Counter[tuple[object, int]] = Counter()
    for effect in effects:
        if isinstance(effect, SendReserve) and effect.prefill is not None:
            legs[effect.prefill, effect.num_cached] += 1
        elif isinstance(effect, SendPrefill) and not effect.is_counted:
            legs[effect.node, effect.num_cached] += 1
        elif isinstance(effect, LegClosed) and effect.is_prefill:
            legs[effect.node, effect.num_cached] -= 1
    return legs


def test_a_leg_is_closed_with_what_it_was_opened_with() -> None:
    flow = new_flow()
    effects = flow.on_choice(D0, P0, "why", 10.0, None, 12)
    assert counted(effects) == {(P0, 12): 1}
    effects += flow.on_reserve_reply(D0, FIRST, TICKET, 12.0)
    effects += flow.on_prefill_reply(P0, FIRST, Overloaded("full"))
    assert +counted(effects) == Counter()
    effects += flow.on_choice(D0, P1, "next", 13.0, None, 3)
    assert +counted(effects) == {(P1, 3): 1}
    effects += flow.on_client_gone()
    assert all(not left for left in counted(effects).values())


def test_a_planned_node_that_is_not_asked_is_closed_with_its_own_number() -> None:
    flow = new_flow()
    effects = flow.on_choice(D0, P0, "why", 10.0, None, 12)
    effects += flow.on_node_suspected(P0)
    effects += flow.on_reserve_reply(D0, FIRST, TICKET, 12.0)
    effects += flow.on_choice(D0, P1, "next", 13.0, None, 3)
    assert +counted(effects) == {(P1, 3): 1}
    effects += flow.on_output(P1, output(FIRST, 0, 10))
    effects += flow.on_output(D0, output(FIRST, 1, 11, is_started=True))
    assert all(not left for left in counted(effects).values())


@pytest.mark.parametrize("seed", range(200))
def test_no_leg_is_left_whatever_happens(seed: int) -> None:
    rng, flow = random.Random(seed), new_flow()
    effects: list[Effect] = []
    for _ in range(30):
        effects += _anything(flow, rng)
        assert all(left in (0, 1, 2) for left in counted(effects).values())
    effects += flow.on_client_gone()
    assert all(not left for left in counted(effects).values())


def _anything(flow: RequestFlow, rng: random.Random) -> list[Effect]:
    decode, prefiller = rng.choice((D0, D1)), rng.choice((P0, P1, None))
    attempt = flow.attempt
    events = [
        lambda: flow.on_choice(decode, prefiller, "why", 1.0, None, rng.randrange(3)),
        lambda: flow.on_reserve_reply(decode, attempt, rng.choice((TICKET, Overloaded("no"))), 1.0),
        lambda: flow.on_prefill_reply(prefiller or P0, attempt, Overloaded("no")),
        lambda: flow.on_node_suspected(rng.choice((decode, prefiller or P0))),
        lambda: flow.on_node_trusted(rng.choice((decode, prefiller or P0))),
        lambda: flow.on_node_lost(rng.choice((decode, prefiller or P0))),
        lambda: flow.on_waited(),
        lambda: flow.on_output(prefiller or P0, output(attempt, 0, 10)),
        lambda: flow.on_output(
            decode, output(attempt, 1, 11, is_started=True, finish=FinishReason.STOP)
        ),
    ]
    return rng.choice(events)()


def test_demand_counts_tokens_to_compute_and_the_blocks_of_all() -> None:
    decode = NodeRecord(**{**_fields(RECORD), "role": Role.MIXED})
    cluster = Membership(model="m", lease_s=5.0)
    cluster.on_listing([LiveNode(record=decode, load=RUNNING)], 0.0)
    cluster.on_heard(decode.incarnation)
    measured = Meter().read(cluster.nodes(), 0.0)[Role.MIXED]
    assert measured.queued_tokens == 3000
    assert measured.waiting_blocks == (3000 + 27_000) / 4
