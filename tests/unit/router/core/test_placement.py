"""Filter, score, pick."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.errors import Overloaded
from common.ids import Incarnation
from common.kv.prompt_blocks import PromptBlocks
from common.nodes import NodeLoad, Role
from common.request import SamplingParams
from common.token_rules import NO_RULES, ThinkingBudget, TokenRules
from placement.store import LiveNode
from router.core.effects import Choose
from router.core.known.node_view import NodeView
from router.core.known.roster import Roster
from router.core.known.sessions import Placed
from router.core.membership import Membership
from router.core.placement import Chooser, ChosenNodes, Placer
from router.core.policies import POLICIES
from router.core.policies.query import (
    MAX_HASHED_BLOCKS,
    NoneStays,
    PolicyState,
    Query,
    TooLong,
    query_of,
)
from tests.support.nodes.node_records import record
from tests.support.nodes.node_views import names, node, prefill, query

NOBODY: frozenset[Incarnation] = frozenset()


def choose(
    nodes: list[NodeView],
    request: Query | None = None,
    excluded: frozenset[Incarnation] = NOBODY,
    policy: str = "least_loaded",
) -> ChosenNodes:
    return Placer(policy).choose(nodes, request or query(), excluded)


@pytest.mark.parametrize(
    ("nodes", "max_tokens", "expected"),
    [
        ([node("d0"), prefill("p0")], 8, ("d0", "p0")),
        ([node("d0")], 8, ("d0", None)),
        ([node("m0", Role.MIXED), prefill("p0")], 8, ("m0", None)),
        ([node("d0"), prefill("p0", fingerprint="other")], 8, ("d0", None)),
        ([node("d0"), prefill("p0", kv_protocol=5)], 8, ("d0", None)),
        ([node("d0"), prefill("p0", kv_protocol=5), prefill("p1")], 8, ("d0", "p1")),
        ([node("d0"), prefill("p0"), prefill("p1", queued_tokens=900)], 8, ("d0", "p0")),
        ([node("d0"), prefill("p0", queued_tokens=900), prefill("p1")], 8, ("d0", "p1")),
        ([node("d0", num_requests=3), node("d1")], 8, ("d1", None)),
        ([node("d0", num_requests=3), node("m0", Role.MIXED)], 8, ("m0", None)),
        ([node("d0", free_blocks=10), node("d1", free_blocks=50)], 8, ("d1", None)),
        ([node("d1"), node("d0")], 8, ("d0", None)),
        ([node("d0", is_draining=True), node("d1", num_requests=9)], 8, ("d1", None)),
        ([node("d0", max_model_len=23), node("d1", num_requests=9)], 8, ("d1", None)),
        ([node("d0", max_model_len=24), node("d1", num_requests=9)], 8, ("d0", None)),
        ([node("d0"), prefill("p0", is_draining=True)], 8, ("d0", None)),
        ([node("d0"), prefill("p0", max_model_len=23)], 8, ("d0", None)),
        ([node("d0"), prefill("p0")], 1, (None, "p0")),
        ([prefill("p0")], 1, (None, "p0")),
        ([node("d0")], 1, ("d0", None)),
    ],
)
def test_which_node_is_chosen(
    nodes: list[NodeView], max_tokens: int, expected: tuple[str | None, str | None]
) -> None:
    choice = choose(nodes, query(max_tokens=max_tokens))
    assert names(choice) == expected
    assert choice.reason


@pytest.mark.parametrize(
    ("others", "why"),
    [
        ([], "no prefill node: local prefill"),
        ([prefill("p0", fingerprint="other")], "another KV layout: local prefill"),
        ([prefill("p0")], "1, 0 requests there"),
    ],
)
def test_the_reason_says_why_a_prompt_stays(others: list[NodeView], why: str) -> None:
    assert choose([node("d0"), *others]).reason.endswith(why)


@pytest.mark.parametrize(
    ("nodes", "max_tokens", "expected"),
    [
        ([node("d0"), node("d1", has_grammars=True), prefill("p0")], 8, ("d1", None)),
        ([node("d1", has_grammars=True), prefill("p0", has_grammars=True)], 8, ("d1", "p0")),
        ([node("d0"), node("m0", Role.MIXED, has_grammars=True)], 8, ("m0", None)),
        ([node("d1", has_grammars=True), prefill("p0")], 1, ("d1", None)),
    ],
)
def test_only_nodes_that_follow_grammars_get_one(
    nodes: list[NodeView], max_tokens: int, expected: tuple[str | None, str | None]
) -> None:
    request = query(max_tokens=max_tokens)
    request.needs_grammars = True
    assert names(choose(nodes, request)) == expected


@pytest.mark.covers("F138")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("nodes", "max_tokens", "expected"),
    [
        ([node("d0"), node("d1", fingerprint="new"), prefill("p0")], 8, ("d0", "p0")),
        ([node("d0", fingerprint="new"), node("d1", num_requests=9)], 8, ("d1", None)),
        ([node("d0", fingerprint="new"), node("d1", queued_tokens=900)], 8, ("d1", None)),
        ([node("d0", fingerprint="new"), prefill("p0", fingerprint="new")], 8, ("d0", "p0")),
        ([node("d0", fingerprint="new"), node("d1", is_draining=True)], 8, ("d0", None)),
        ([node("d0", fingerprint="new"), node("d1", is_suspected=True)], 8, ("d0", None)),
        ([node("d0", fingerprint="new"), node("d1", max_model_len=23)], 8, ("d0", None)),
        ([node("d0", fingerprint="new"), node("tried")], 8, ("d0", None)),
        ([prefill("p0", fingerprint="new"), prefill("p1", queued_tokens=9)], 1, (None, "p1")),
        ([prefill("p0", fingerprint="new")], 1, (None, "p0")),
    ],
)
def test_an_answer_goes_on_in_its_layout_while_a_node_of_that_can_take_it(
    nodes: list[NodeView], max_tokens: int, expected: tuple[str | None, str | None], policy: str
) -> None:
    request = query(max_tokens=max_tokens)
    request.layout = "f"
    chosen = choose(nodes, request, frozenset({Incarnation("tried", 1)}), policy)
    assert names(chosen) == expected
    views = {view.incarnation: view for view in nodes}
    computing = chosen.decode or chosen.prefill
    assert computing is not None
    assert chosen.layout == views[computing].record.fingerprint


@pytest.mark.covers("F138")
def test_a_new_answer_goes_wherever_there_is_most_room() -> None:
    nodes = [node("d0", fingerprint="new"), node("d1", num_requests=9)]
    chooser = Chooser("least_loaded", 600.0, 0)
    chosen, _ = chooser.choose(Roster(nodes), query(), Choose(None, NOBODY), 0.0)
    assert (names(chosen), chosen.layout) == (("d0", None), "new")
    chosen, _ = chooser.choose(Roster(nodes), query(), Choose(None, NOBODY, "f"), 0.0)
    assert (names(chosen), chosen.layout) == (("d1", None), "f")


def test_a_session_stays_where_it_was_placed_and_other_requests_are_none() -> None:
    chooser = Chooser("least_loaded", 600.0, 0)
    in_session = query()
    in_session.session = b"a"
    nodes = [node("d0", num_requests=1), node("d1"), prefill("p0")]
    chosen = {
        "first": chooser.choose(Roster(nodes), in_session, Choose(None, NOBODY), 0.0),
        "other": chooser.choose(Roster(nodes), query(), Choose(None, NOBODY), 0.0),
    }
    assert [placed for _, placed in chosen.values()] == [Placed.NEW, None]
    assert chooser.num_sessions == 1
    nodes[1] = node("d1", num_requests=1)
    later, placed = chooser.choose(Roster(nodes), in_session, Choose(None, NOBODY), 1.0)
    assert (names(later), placed) == (("d1", "p0"), Placed.KEPT)
    other, _ = chooser.choose(Roster(nodes), query(), Choose(None, NOBODY), 1.0)
    assert names(other) == ("d0", "p0")


def test_without_a_node_that_follows_grammars_none_is_chosen() -> None:
    request = query()
    request.needs_grammars = True
    with pytest.raises(Overloaded, match="no decode or mixed node follows grammars"):
        choose([node("d0"), prefill("p0", has_grammars=True)], request)


@pytest.mark.parametrize(
    ("rules", "salt", "is_needed"),
    [
        (NO_RULES, "", False),
        (NO_RULES, "mine", True),
        (TokenRules(biases=((1, 2.0),)), "", True),
        (TokenRules(bad_words=((1,),)), "", True),
    ],
)
def test_only_nodes_that_know_rules_and_salts_get_them(
    rules: TokenRules, salt: str, is_needed: bool
) -> None:
    request = query_of(PromptBlocks((1, 2, 3)), SamplingParams(max_tokens=8, rules=rules), salt)
    old = [node("d0"), prefill("p0")]
    new = [node("d1", has_token_rules=True), prefill("p1", has_token_rules=True)]
    if is_needed:
        assert names(choose([*old, *new], request)) == ("d1", "p1")
        with pytest.raises(Overloaded, match="knows biases, bad words and salts"):
            choose(old, request)
    else:
        assert names(choose(old, request)) == ("d0", "p0")


def test_a_salt_that_is_wanted_and_not_needed_leaves_no_node_out() -> None:
    request = query_of(
        PromptBlocks((1, 2, 3)), SamplingParams(max_tokens=8), "mine", needs_salt=False
    )
    assert names(choose([node("d0"), prefill("p0")], request)) == ("d0", "p0")
    ruled = SamplingParams(max_tokens=8, rules=TokenRules(bad_words=((1,),)))
    with pytest.raises(Overloaded, match="knows biases, bad words and salts"):
        choose([node("d0")], query_of(PromptBlocks((1, 2, 3)), ruled, "mine", needs_salt=False))


def test_prompt_logprobs_are_asked_of_nodes_that_answer_with_them() -> None:
    sampling = SamplingParams(max_tokens=8, prompt_logprobs=0)
    asked, plain = (
        query_of(PromptBlocks((1, 2, 3)), one, "")
        for one in (sampling, SamplingParams(max_tokens=8))
    )
    old = [node("d0"), prefill("p0")]
    new = [node("d1", has_prompt_logprobs=True), prefill("p1", has_prompt_logprobs=True)]
    assert names(choose([*old, *new], asked)) == ("d1", "p1")
    with pytest.raises(Overloaded, match="no decode or mixed node answers with prompt_logprobs"):
        choose(old, asked)
    assert names(choose(old, plain)) == ("d0", "p0")
    one_token = query_of(
        PromptBlocks((1, 2, 3)), SamplingParams(max_tokens=1, prompt_logprobs=0), ""
    )
    assert names(choose([*old, *new], one_token)) == (None, "p1")
    # No new prefill node: a decode node computes the prompt itself.
    assert names(choose([*old, new[0]], one_token)) == ("d1", None)


def test_a_budget_of_thinking_leaves_no_node_out() -> None:
    """Nodes of the release before ignore it, as they did before their routers were replaced."""
    rules = TokenRules(thinking=ThinkingBudget(num_tokens=3, end_token_id=7))
    asked = query_of(PromptBlocks((1, 2, 3)), SamplingParams(max_tokens=8, rules=rules), "")
    assert names(choose([node("d0"), prefill("p0")], asked)) == ("d0", "p0")


@pytest.mark.covers("V04")
def test_keys_of_prompts_with_a_salt_are_their_own() -> None:
    record = node("d0").record
    of = [
        query_of(PromptBlocks((1, 2, 3, 4)), SamplingParams(max_tokens=8), salt).block_keys(record)
        for salt in ("", "mine", "yours")
    ]
    assert len({keys[0] for keys in of}) == 3


def test_nodes_that_were_tried_are_not_chosen() -> None:
    nodes = [node("d0"), node("d1"), prefill("p0"), prefill("p1")]
    tried = frozenset({Incarnation("d0", 1), Incarnation("p0", 1)})
    assert names(choose(nodes, excluded=tried)) == ("d1", "p1")


@pytest.mark.parametrize(
    ("nodes", "text"),
    [
        ([], "no decode or mixed node is heard"),
        ([prefill("p0")], "no decode or mixed node is heard"),
        ([node("d0", is_draining=True)], "every decode or mixed node is draining"),
    ],
)
def test_a_missing_role_is_named(nodes: list[NodeView], text: str) -> None:
    with pytest.raises(NoneStays, match=text):
        choose(nodes)


def test_when_all_were_tried_it_says_so() -> None:
    tried = frozenset({Incarnation("d0", 1)})
    with pytest.raises(Overloaded, match="the only decode or mixed node refused or failed"):
        choose([node("d0")], excluded=tried)
    tried |= {Incarnation("d1", 1)}
    with pytest.raises(Overloaded, match="all 2 decode and mixed nodes refused or failed"):
        choose([node("d0"), node("d1")], excluded=tried)


def test_a_request_too_long_for_every_node_is_the_callers_fault() -> None:
    nodes = [node("d0", max_model_len=20), node("d1", max_model_len=23), prefill("p0")]
    text = r"16 prompt tokens and max_tokens 8 make 24: wanted at most max_model_len = 23"
    with pytest.raises(TooLong, match=text) as wrong:
        choose(nodes)
    assert (wrong.value.param, wrong.value.longest) == ("max_tokens", 23)


def test_one_token_that_only_a_prefill_node_holds_is_not_too_long() -> None:
    short, long = node("d0", max_model_len=16), prefill("p0")
    one = query(max_tokens=1)
    assert names(choose([short, long], one)) == (None, "p0")
    text = "only prefill nodes hold the request, and none of them can take it now"
    for busy, excluded in (
        (long, frozenset({long.incarnation})),
        (replace(long, is_suspected=True), NOBODY),
    ):
        with pytest.raises(Overloaded, match=text):
            choose([short, busy], one, excluded)
    for too_short in (prefill("p0", max_model_len=16), prefill("p0", is_draining=True)):
        with pytest.raises(TooLong):
            choose([short, too_short], one)
    with pytest.raises(TooLong):
        choose([short, long])


def test_another_prefill_node_for_a_reservation() -> None:
    placer = Placer("least_loaded")
    nodes = [node("d0"), prefill("p0"), prefill("p1"), prefill("p2", fingerprint="other")]
    d0, p0, p1 = (Incarnation(name, 1) for name in ("d0", "p0", "p1"))
    assert names(placer.choose_prefill(nodes, query(), d0, {p0})) == ("d0", "p1")
    assert names(placer.choose_prefill(nodes, query(), d0, {p0, p1})) == ("d0", None)
    assert names(placer.choose_prefill(nodes[1:], query(), d0, {p0})) == ("d0", None)


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(KeyError):
        Placer("coin_toss")


def test_round_robin_takes_turns_on_both_sides() -> None:
    placer = Placer("round_robin")
    nodes = [node("d0"), node("d1"), prefill("p0"), prefill("p1")]
    pairs = [names(placer.choose(nodes, query(), NOBODY)) for _ in range(4)]
    assert pairs == [("d0", "p0"), ("d1", "p1"), ("d0", "p0"), ("d1", "p1")]


def test_prompts_that_are_nearly_cached_do_not_send_others_to_a_busier_node() -> None:
    idle = NodeLoad(free_blocks=90, free_seats=10, num_running=0, num_waiting=0, queued_tokens=0)
    loads = {
        record("d0"): idle,
        record("p0", Role.PREFILL): replace(
            idle, num_waiting=1, queued_tokens=500, num_found_tokens=14_500
        ),
        record("p1", Role.PREFILL): replace(idle, num_waiting=1, queued_tokens=4000),
    }
    members = Membership(model="m", lease_s=5.0)
    members.on_listing([LiveNode(record=one, load=load) for one, load in loads.items()], 0.0)
    for one in loads:
        members.on_heard(one.incarnation)
    assert names(choose([*members.nodes()])) == ("d0", "p0")


@pytest.mark.covers("F112")
def test_a_common_start_goes_where_it_was_before() -> None:
    placer = Placer("prefix_affinity")
    nodes = [node("d0"), node("d1"), prefill("p0"), prefill("p1")]
    first = frozenset({Incarnation("d0", 1), Incarnation("p0", 1)})
    assert names(placer.choose(nodes, query(900), first)) == ("d1", "p1")
    busier = [
        node("d0"),
        node("d1", free_blocks=98),
        prefill("p0"),
        prefill("p1", queued_tokens=800),
    ]
    assert names(placer.choose(busier, query(900), NOBODY)) == ("d1", "p1")
    assert names(placer.choose(busier, query(900, first=5000), NOBODY)) == ("d0", "p0")
    # Waiting there takes longer than computing it again.
    busier[3] = prefill("p1", queued_tokens=1000)
    assert names(placer.choose(busier, query(900), NOBODY)) == ("d1", "p0")


@pytest.mark.covers("F112")
def test_a_common_start_does_not_pile_up_on_a_full_node() -> None:
    placer = Placer("prefix_affinity")
    placer.choose([node("d0"), node("d1")], query(), NOBODY)
    full = [node("d0", num_requests=10, free_blocks=20), node("d1")]
    assert names(placer.choose(full, query(), NOBODY)) == ("d1", None)


@pytest.mark.covers("F110")
def test_a_new_life_of_a_node_is_not_believed_to_hold_anything() -> None:
    state = PolicyState()
    nodes = [node("d0"), node("d1")]
    request = query()
    state.blocks.expect(request.block_keys(nodes[0].record), Incarnation("d0", 7))
    first, second = POLICIES["prefix_affinity"](nodes, request, state)
    assert first == second
    state.blocks.expect(request.block_keys(nodes[0].record), Incarnation("d0", 1))
    first, second = POLICIES["prefix_affinity"](nodes, request, state)
    assert first > second


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_scores_lie_between_0_and_1(policy: str) -> None:
    nodes = [
        node("a", num_requests=10_000, free_blocks=0, queued_tokens=10**9),
        node("b", free_blocks=10**6),
        node("c"),
    ]
    scores = POLICIES[policy](nodes, query(), PolicyState(turn=5))
    assert len(scores) == 3
    assert all(0 <= score <= 1 for score in scores)


def test_fuller_nodes_score_less_even_beyond_full() -> None:
    nodes = [node("a", num_requests=count) for count in (0, 5, 10, 20, 400)]
    scores = POLICIES["least_loaded"](nodes, query(), PolicyState())
    assert scores == sorted(set(scores), reverse=True)


def test_keys_are_of_full_blocks_and_of_a_bounded_head() -> None:
    record = node("a").record
    assert len(Query(tuple(range(4 * 600 + 3)), 8).block_keys(record)) == 600
    request = Query(tuple(range(4 * MAX_HASHED_BLOCKS + 9)), 8)
    keys = request.block_keys(record)
    assert len(keys) == MAX_HASHED_BLOCKS
    assert request.block_keys(record) is keys
    assert request.block_keys(node("b", fingerprint="other").record) != keys


@pytest.mark.parametrize("policy", POLICIES)
def test_a_suspected_node_decodes_only_where_no_other_can(policy: str) -> None:
    d0, d1 = node("d0", is_suspected=True), node("d1", num_requests=9)
    assert names(choose([d0, d1], policy=policy))[0] == "d1"
    assert names(choose([d0, d1], excluded=frozenset({d1.incarnation})))[0] == "d0"
    draining = node("d1", is_draining=True)
    assert names(choose([d0, draining], policy=policy))[0] == "d0"


def test_a_suspected_node_prefills_nothing() -> None:
    d0, p0, p1 = node("d0"), prefill("p0", is_suspected=True), prefill("p1")
    assert names(choose([d0, p0, p1])) == ("d0", "p1")
    assert names(choose([d0, p0])) == ("d0", None)
    assert names(choose([d0, p0], query(max_tokens=1))) == ("d0", None)


def pair(prefill_id: str, decode_id: str) -> tuple[Incarnation, Incarnation]:
    return Incarnation(prefill_id, 1), Incarnation(decode_id, 1)


@pytest.mark.covers("F30")
@pytest.mark.parametrize(
    ("avoided", "expected"),
    [
        ([], ("d0", "p0")),
        # Another decode node, though its prefill nodes have not failed with the first one.
        ([pair("p0", "d0")], ("d1", "p0")),
        ([pair("p0", "d0"), pair("p0", "d1")], ("d0", "p1")),
        ([pair("p0", "d0"), pair("p1", "d0")], ("d1", "p0")),
        ([pair("p0", "d0"), pair("p1", "d0"), pair("p0", "d1")], ("d1", "p1")),
        ([pair(p, d) for p in ("p0", "p1") for d in ("d0", "d1")], ("d0", None)),
    ],
)
def test_pairs_that_fail_are_avoided_while_there_is_another_way(
    avoided: list[tuple[Incarnation, Incarnation]], expected: tuple[str | None, str | None]
) -> None:
    nodes = [node("d0"), node("d1"), prefill("p0"), prefill("p1")]
    choice = Placer("least_loaded").choose(nodes, query(), NOBODY, frozenset(avoided))
    assert names(choice) == expected
    assert ("failed handoffs: local prefill" in choice.reason) == (expected[1] is None)


def test_a_ticket_does_not_go_to_a_prefill_node_whose_pair_fails() -> None:
    nodes = [node("d0"), prefill("p0"), prefill("p1")]
    placer = Placer("least_loaded")
    decode = nodes[0].incarnation
    first = frozenset([pair("p0", "d0")])
    assert placer.choose_prefill(nodes, query(), decode, NOBODY, first).prefill == pair("p1", "")[0]
    both = frozenset([pair("p0", "d0"), pair("p1", "d0")])
    assert placer.choose_prefill(nodes, query(), decode, NOBODY, both).prefill is None


def test_a_mixed_node_needs_no_pair() -> None:
    nodes = [node("d0"), node("m0", Role.MIXED), prefill("p0")]
    choice = Placer("least_loaded").choose(nodes, query(), NOBODY, frozenset([pair("p0", "d0")]))
    assert names(choice) == ("m0", None)


def test_a_reservation_gets_a_prefill_node_whatever_the_role_of_its_node_is_now() -> None:
    """Its node was a decode node when it was chosen."""
    d0 = Incarnation("d0", 1)
    for role in (Role.DECODE, Role.MIXED, Role.PREFILL):
        nodes = [node("d0", role), prefill("p0")]
        assert names(Placer("round_robin").choose_prefill(nodes, query(), d0, set())) == (
            "d0",
            "p0",
        )
    alone = Placer("round_robin").choose_prefill([node("d0", Role.PREFILL)], query(), d0, set())
    assert names(alone) == ("d0", None), "it is not its own partner"
