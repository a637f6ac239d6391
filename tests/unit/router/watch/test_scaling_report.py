"""What `/v1/scaling` answers and what the metrics say are one decision."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from common.ids import Incarnation
from common.nodes import Role
from common.observing.latency import LatencyTargets
from router.core.scaling.moves import Move
from router.core.scaling.scaling import RoleScaling
from router.watch.scaling_report import ScalingReport
from tests.support.observing.live_readings import node

NODES = (
    node(Incarnation("prefill-1", 1), Role.PREFILL, queued_tokens=5000),
    node(Incarnation("prefill-2", 1), Role.PREFILL),
    node(Incarnation("decode-1", 1), Role.DECODE, num_running=8, num_waiting=5),
)
LEADER = Incarnation("router-1", 3)


def test_the_metrics_are_the_numbers_of_the_answer() -> None:
    registry = CollectorRegistry()
    scaling = RoleScaling(LatencyTargets(ttft_s=1.0, tpot_s=0.1))
    report = ScalingReport(registry, scaling.decide((), 0.0), auto_roles=True)
    report.on_decision(scaling.decide(NODES, 1.0))
    report.on_leader(LEADER, is_me=True)
    move = Move(NODES[1].incarnation, Role.PREFILL, Role.DECODE, "13 answers run or wait")
    report.on_changed(move, 2.0)

    answer = report.answer(3.0)

    assert answer["leader"] == "router-1"
    assert registry.get_sample_value("pdserve_scaling_leader") == 1
    for role, found in answer["roles"].items():
        of_role = {"role": role}
        assert registry.get_sample_value("pdserve_scaling_nodes", of_role) == found["nodes"]
        assert registry.get_sample_value("pdserve_scaling_needed_nodes", of_role) == found["needed"]
        desired = registry.get_sample_value("pdserve_scaling_desired_nodes", of_role)
        assert desired == found["desired"]
    assert answer["roles"]["decode"]["needed"] > 0.5
    assert [(one["node_id"], one["role"], one["age_s"]) for one in answer["changes"]] == [
        ("prefill-2", "decode", 1.0)
    ]
    decoding = {"role": "decode"}
    assert registry.get_sample_value("pdserve_role_changes_total", decoding) == 1
