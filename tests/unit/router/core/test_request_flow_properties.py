"""Whatever happens in whatever order: tokens once and in order, one outcome, nothing left held."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import HandoffFailed, NodeLost, Overloaded, StaleEpoch
from common.request import FinishReason
from router.core.effects import Finish
from tests.support.examples import everyday
from tests.unit.router.core.flow_cluster import (
    DEADLINE_S,
    DECODE_NODES,
    PREFILL_NODES,
    ModelCluster,
)

Action = Callable[[], None]


def kind_actions(cluster: ModelCluster) -> list[Action]:
    """What a healthy cluster does next, in any order."""
    actions: list[Action] = []
    for reserve in cluster.reserves:
        actions.append(lambda r=reserve: cluster.answer_reserve(r))  # type: ignore[misc]
    for prefill in cluster.prefills:
        actions.append(lambda p=prefill: cluster.answer_prefill(p))  # type: ignore[misc]
    if cluster.is_waiting:
        actions.append(cluster.wait)
    for node in sorted(cluster.lost):
        actions.append(lambda n=node: cluster.come_back(n))  # type: ignore[misc]
    for leg in cluster.outbox:
        actions.append(lambda leg=leg: cluster.deliver(leg))  # type: ignore[misc]
    return actions


def cruel_actions(cluster: ModelCluster) -> list[Action]:
    """Refusals, failed calls, lost nodes, duplicates."""
    actions: list[Action] = []
    for reserve in cluster.reserves:
        for refusal in (Overloaded("full"), StaleEpoch("another life")):
            actions.append(lambda r=reserve, e=refusal: cluster.answer_reserve(r, e))  # type: ignore[misc]
    for prefill in cluster.prefills:
        actions.append(lambda p=prefill: cluster.answer_prefill(p, Overloaded("full")))  # type: ignore[misc]
    for call in (*cluster.reserves, *cluster.prefills):
        for error in (NodeLost("reset"), HandoffFailed("?"), Overloaded("busy")):
            if not isinstance(error, Overloaded):
                actions.append(lambda c=call, e=error: cluster.fail_call(c, e))  # type: ignore[misc]
    for index in range(len(cluster.delivered)):
        actions.append(lambda i=index: cluster.deliver_again(i))  # type: ignore[misc]
    for node in (*DECODE_NODES, *PREFILL_NODES):
        actions.append(lambda n=node: cluster.lose(n))  # type: ignore[misc]
        for is_heard in (False, True):
            actions.append(lambda n=node, h=is_heard: cluster.suspect(n, h))  # type: ignore[misc]
        actions.append(lambda n=node: cluster.trust(n))  # type: ignore[misc]
    return actions


@pytest.mark.covers("F92")
@settings(max_examples=everyday(30, of=400), deadline=None)
@given(data=st.data())
def test_any_order_of_events(data: st.DataObject) -> None:
    answer_length = data.draw(st.integers(1, 6))
    max_tokens = data.draw(st.sampled_from([answer_length, answer_length + 3]))
    cluster = ModelCluster(answer_length, max_tokens, data.draw(st.integers(1, 4)))
    for _ in range(data.draw(st.integers(0, 40))):
        kind = kind_actions(cluster)
        cruel = cruel_actions(cluster)
        is_kind = bool(kind) and data.draw(st.integers(0, 9)) > 1
        data.draw(st.sampled_from(kind if is_kind else cruel))()
        cluster.check()
    ending = data.draw(st.sampled_from(["time", "client gone", "kind"]))
    if ending == "client gone":
        cluster.perform(cluster.flow.on_client_gone())
    while ending == "kind" and (actions := kind_actions(cluster)):
        data.draw(st.sampled_from(actions))()
        cluster.check()
    cluster.now_s = DEADLINE_S
    cluster.perform(cluster.flow.on_time(cluster.now_s))
    while actions := kind_actions(cluster):
        # Late answers: granted, after everything was over.
        actions[0]()
    cluster.check_end()


@settings(max_examples=everyday(20, of=200), deadline=None)
@given(data=st.data())
def test_a_healthy_cluster_answers_in_full_in_any_order(data: st.DataObject) -> None:
    """Liveness: without faults nothing waits for the deadline."""
    answer_length = data.draw(st.integers(1, 6))
    step_size = data.draw(st.integers(1, 4))
    max_tokens = answer_length + data.draw(st.integers(0, 1))
    cluster = ModelCluster(answer_length, max_tokens, step_size)
    while actions := kind_actions(cluster):
        data.draw(st.sampled_from(actions))()
    cluster.check_end()
    (outcome,) = cluster.outcomes
    assert isinstance(outcome, Finish)
    assert outcome.reason in (FinishReason.STOP, FinishReason.LENGTH)
    assert cluster.flow.attempt.attempt == 1
