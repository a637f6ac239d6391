"""What the chart makes: valid manifests, settings that exist, pods that are found and fenced in."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.settings.config import ApiConfig, ServerConfig
from pdserve.configuration.config_sources import load_config
from pdserve.configuration.options import all_options
from tests.chart.manifests import (
    CASES,
    FOLDER,
    ROOT,
    Chart,
    Manifest,
    environment,
    named,
    of_kind,
    pods,
    selects,
)
from tests.support.commands import CommandFailed, run
from tools.generate_metrics_table import described_metrics

# The oldest version of `kubeVersion` in Chart.yaml, and a late one.
KUBERNETES = ("1.27", "1.37")
KUBERNETES_DEADLINE_S = 600
"""`progressDeadlineSeconds` of a Deployment that does not set it."""
# Objects of operators, which Kubernetes' own schemas do not describe.
FOREIGN = ("ScaledObject", "ServiceMonitor", "PrometheusRule")
PORTS = {"router": {"http": 8000}, "redis": {"redis": 6379}}
ENGINE_PORTS = {"control": 9000, "kv": 9001, "metrics": 9100}
METRICS = {metric.name for table in described_metrics().values() for metric in table}


@pytest.fixture(params=CASES)
def manifests(request: pytest.FixtureRequest, chart: Chart) -> list[Manifest]:
    return chart.manifests(CASES[request.param])


def test_the_chart_and_its_values_are_right(chart: Chart) -> None:
    assert "0 chart(s) failed" in chart.lint()


@pytest.mark.parametrize("version", KUBERNETES)
def test_the_manifests_are_those_of_kubernetes(
    manifests: list[Manifest], schemas: Path, tmp_path: Path, version: str
) -> None:
    own = [one for one in manifests if one["kind"] not in FOREIGN]
    assert len(own) > 10
    file = tmp_path / "manifests.yaml"
    file.write_text(yaml.safe_dump_all(own))
    run(validate(file, version), limit_s=120.0, env=with_schemas(schemas))


def test_a_misspelt_field_is_not_one_of_kubernetes(
    chart: Chart, schemas: Path, tmp_path: Path
) -> None:
    wrong = json.loads(json.dumps(named(chart.manifests({}), "Deployment", "router")))
    wrong["spec"]["template"]["spec"]["terminationGraceSeconds"] = 5
    file = tmp_path / "wrong.yaml"
    file.write_text(yaml.safe_dump(wrong))
    with pytest.raises(CommandFailed, match="terminationGraceSeconds"):
        run(validate(file, KUBERNETES[-1]), limit_s=120.0, env=with_schemas(schemas))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"prefil": {"replicas": 1}}, "prefil"),
        ({"decode": {"replicaz": 1}}, "replicaz"),
        ({"decode": {"replicas": -1}}, "minimum"),
        ({"decode": {"settings": {"maxNumSeqs": 1}}}, "maxNumSeqs"),
        ({"redis": {"url": "redis://in.clear"}}, "url"),
        ({"decode": {"autoscaling": {"method": "cpu"}}}, "method"),
        (
            {"prefill": {"autoscaling": {"method": "hpa", "queuedPromptTokens": 0}}},
            "prefill.autoscaling looks at nothing",
        ),
    ],
)
def test_wrong_values_are_refused(chart: Chart, values: dict[str, Any], said: str) -> None:
    with pytest.raises(CommandFailed, match=said):
        chart.text(values)


def test_every_value_is_used() -> None:
    templates = "".join(path.read_text() for path in (FOLDER / "templates").iterdir())
    values = yaml.safe_load((FOLDER / "values.yaml").read_text())
    unused = [key for key in keys_of(values) if not re.search(rf"\b{key}\b", templates)]
    # What is copied as a whole: resources, security, strategies, volumes.
    copied = {
        *("requests", "limits", "cpu", "memory", "type", "rollingUpdate", "maxSurge"),
        *("maxUnavailable", "runAsNonRoot", "runAsUser"),
        *("runAsGroup", "fsGroup", "fsGroupChangePolicy", "seccompProfile", "names"),
    }
    assert set(unused) <= copied


# --- what the processes get -----------------------------------------------------------------------


def test_every_process_can_start_with_its_settings(manifests: list[Manifest]) -> None:
    roles = set()
    for component, pod, _ in pods(manifests):
        if component == "redis":
            continue
        (container,) = pod["containers"]
        environ = {k: v for k, v in environment(container).items() if k.startswith("PDSERVE_")}
        assert set(environ) <= {option.variable for option in all_options().values()}
        config = load_config({}, [], environ).config
        assert config.role.value == component
        roles.add(component)
        if component != "router":
            assert (config.server.advertise_host, config.server.stay_drained) == ("10.1.2.3", True)
            ports = (config.server.port, config.server.kv_port, config.server.metrics_port)
            assert ports == (9000, 9001, 9100)
    assert {"router", "decode"} <= roles


def test_a_pod_outlives_its_drain(manifests: list[Manifest]) -> None:
    for component, pod, _ in pods(manifests):
        if component == "redis":
            continue
        (container,) = pod["containers"]
        drain_s = float(environment(container)["PDSERVE_DRAIN_TIMEOUT_S"])
        before_s = 0.0
        if component == "router":
            assert drain_s == ApiConfig().request_timeout_s, "every stream may end by itself"
            before_s = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
            assert before_s > 0
        else:
            assert drain_s == ServerConfig().drain_timeout_s
            assert "lifecycle" not in container
        # Behind the time-out: 5 s for the last step, 6 s for one that hangs, 2 s for the streams.
        assert pod["terminationGracePeriodSeconds"] >= before_s + drain_s + 13


def test_a_rollout_does_not_fail_before_a_start_may_have_ended(manifests: list[Manifest]) -> None:
    for deployment in of_kind(manifests, "Deployment"):
        spec = deployment["spec"]
        startup = spec["template"]["spec"]["containers"][0]["startupProbe"]
        longest_start_s = startup["periodSeconds"] * startup["failureThreshold"]
        assert spec.get("progressDeadlineSeconds", KUBERNETES_DEADLINE_S) >= longest_start_s + 60


def test_only_readiness_looks_further_than_the_process(manifests: list[Manifest]) -> None:
    for component, pod, _ in pods(manifests):
        (container,) = pod["containers"]
        if component == "redis":
            continue
        port = "http" if component == "router" else "metrics"
        probes = {kind: container[f"{kind}Probe"]["httpGet"] for kind in ("liveness", "readiness")}
        assert probes["liveness"] == {"path": "/health", "port": port}
        assert probes["readiness"] == {"path": "/ready", "port": port}
        startup = container["startupProbe"]
        assert startup["httpGet"]["path"] == ("/health" if component == "router" else "/ready")
        if component != "router":
            assert startup["periodSeconds"] * startup["failureThreshold"] >= 900


# --- who finds whom -------------------------------------------------------------------------------


def test_services_find_their_pods_and_ports(manifests: list[Manifest]) -> None:
    of_pods = {component: (pod, labels) for component, pod, labels in pods(manifests)}
    for service in of_kind(manifests, "Service"):
        selector = service["spec"]["selector"]
        found = {name for name, (_, labels) in of_pods.items() if selects(selector, labels)}
        component = service["metadata"]["labels"]["app.kubernetes.io/component"]
        wanted = set(of_pods) - {"router", "redis"} if component == "nodes" else {component}
        assert found == wanted
        for port in service["spec"]["ports"]:
            for name in found:
                assert port["targetPort"] in ports_of(of_pods[name][0])


def test_pods_have_the_ports_that_others_use(manifests: list[Manifest]) -> None:
    for component, pod, _ in pods(manifests):
        assert ports_of(pod) == PORTS.get(component, ENGINE_PORTS)


def test_each_budget_and_deployment_selects_its_own_pods(manifests: list[Manifest]) -> None:
    all_labels = {component: labels for component, _, labels in pods(manifests)}
    for one in of_kind(manifests, "PodDisruptionBudget", "Deployment", "StatefulSet"):
        selector = one["spec"]["selector"]["matchLabels"]
        found = [name for name, labels in all_labels.items() if selects(selector, labels)]
        assert found == [one["metadata"]["labels"]["app.kubernetes.io/component"]]


def test_the_network_policies_open_what_is_needed_and_no_more(chart: Chart) -> None:
    manifests = chart.manifests(CASES["everything"])
    labels = {component: labels for component, _, labels in pods(manifests)}
    opened = set()
    for policy in of_kind(manifests, "NetworkPolicy"):
        assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
        own = policy["spec"]["podSelector"]["matchLabels"]
        for rule in policy["spec"]["ingress"]:
            for peer in rule["from"]:
                if "podSelector" not in peer:
                    continue  # clients and Prometheus, as the values say
                selector = peer["podSelector"]["matchLabels"]
                opened |= {
                    (source, target, port["port"])
                    for source in labels
                    for target in labels
                    for port in rule["ports"]
                    if selects(selector, labels[source]) and selects(own, labels[target])
                }
    engines = set(labels) - {"router", "redis"}
    assert opened == {
        *(("router", engine, "control") for engine in engines),
        *((one, other, "kv") for one in engines for other in engines),
        *((source, "redis", "redis") for source in labels),
    }


def test_without_policies_there_are_none(chart: Chart) -> None:
    assert of_kind(chart.manifests(CASES["GPUs"]), "NetworkPolicy") == []


def test_another_redis_replaces_the_charts(chart: Chart) -> None:
    manifests = chart.manifests(CASES["another Redis, IPv6"])
    assert of_kind(manifests, "StatefulSet") == []
    for _, pod, _ in pods(manifests):
        environ = environment(pod["containers"][0])
        assert environ["PDSERVE_REDIS_URL"] == "rediss://redis.data:6380/0"
        assert environ["PDSERVE_HOST"] == "::"
    policy = named(manifests, "NetworkPolicy", "router")
    assert {"ports": [{"port": 6380}]} in policy["spec"]["egress"]


@pytest.mark.parametrize(
    ("url", "ports"),
    [
        ("rediss://redis.data/0", [6379]),
        ("rediss://user:pa:55@[fd00::12]:6380/0", [6380]),
        ("rediss://[fd00::12]/0", [6379]),
        ("rediss+sentinel://s1:26380,s2/main", [26380, 26379, 6379]),
        ("rediss+cluster://n1:7000,n2:7001", [7000, 7001, 6379]),
    ],
)
def test_the_policies_open_every_port_of_another_redis(
    chart: Chart, url: str, ports: list[int]
) -> None:
    manifests = chart.manifests(CASES["another Redis, IPv6"] | {"redis": {"url": url}})
    policy = named(manifests, "NetworkPolicy", "router")
    assert {"ports": [{"port": port} for port in ports]} in policy["spec"]["egress"]


# --- what holds an intruder back ------------------------------------------------------------------


def test_every_pod_is_fenced_in(manifests: list[Manifest]) -> None:
    for component, pod, _ in pods(manifests):
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        assert pod["enableServiceLinks"] is False
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert "memory" in container["resources"]["limits"]
        (keys,) = (volume for volume in pod["volumes"] if volume["name"] == "keys")
        kind = component if component in ("router", "redis") else "node"
        assert keys["secret"] == {"secretName": f"pdserve-{kind}-keys", "defaultMode": 0o440}


def test_gpus_and_large_pools_are_as_asked(chart: Chart) -> None:
    deployment = named(chart.manifests(CASES["GPUs"]), "Deployment", "decode")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "registry.example/pdserve-node-gpu:1"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    environ = environment(container)
    assert (environ["PDSERVE_KV_TRANSPORT"], environ["PDSERVE_NUM_THREADS"]) == ("auto", "8")


# --- autoscaling and monitoring -------------------------------------------------------------------


def test_what_scales_has_no_fixed_number_of_replicas(chart: Chart) -> None:
    manifests = chart.manifests(CASES["everything"])
    for name, has_number in (("prefill", False), ("decode", False), ("mixed", True)):
        assert ("replicas" in named(manifests, "Deployment", name)["spec"]) is has_number


def test_autoscalers_look_at_metrics_that_there_are(chart: Chart) -> None:
    manifests = chart.manifests(CASES["everything"])
    keda = named(manifests, "ScaledObject", "prefill")["spec"]
    (trigger,) = keda["triggers"]
    query = trigger["metadata"]["query"]
    assert query == (
        'sum(pdserve_queued_prompt_tokens{namespace="default", pod=~"demo-pdserve-prefill-.+"})'
    )
    assert trigger["metadata"]["threshold"] == "8192"
    hpa = named(manifests, "HorizontalPodAutoscaler", "decode")["spec"]
    shown = {
        one["pods"]["metric"]["name"]: one["pods"]["target"]["averageValue"]
        for one in hpa["metrics"]
    }
    assert shown == {"pdserve_kv_blocks_used_ratio": "700m", "pdserve_seats_used_ratio": "800m"}
    assert {"pdserve_queued_prompt_tokens", *shown} <= METRICS
    for behavior in (
        hpa["behavior"],
        keda["advanced"]["horizontalPodAutoscalerConfig"]["behavior"],
    ):
        assert behavior["scaleDown"]["policies"] == [
            {"type": "Pods", "value": 1, "periodSeconds": 60}
        ]


def test_service_monitors_find_every_process_and_have_the_token(chart: Chart) -> None:
    manifests = chart.manifests(CASES["everything"])
    services = of_kind(manifests, "Service")
    for monitor in of_kind(manifests, "ServiceMonitor"):
        selector = monitor["spec"]["selector"]["matchLabels"]
        (service,) = (s for s in services if selects(selector, s["metadata"]["labels"]))
        (endpoint,) = monitor["spec"]["endpoints"]
        assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
        assert endpoint["authorization"]["credentials"] == {
            "name": "pdserve-router-keys",
            "key": "metrics.token",
        }
        assert monitor["metadata"]["labels"]["release"] == "p"
    assert len(of_kind(manifests, "ServiceMonitor")) == 2


def test_metrics_of_nodes_have_the_role_that_the_dashboard_asks_for(chart: Chart) -> None:
    """Those of routers have a label of that name themselves."""
    manifests = chart.manifests(CASES["everything"])
    component = "app.kubernetes.io/component"
    roles = {labels[component] for _, _, labels in pods(manifests)}
    assert roles >= {"prefill", "decode", "mixed"}
    monitors = {one["metadata"]["name"]: one for one in of_kind(manifests, "ServiceMonitor")}
    relabelings = {
        name: one["spec"]["endpoints"][0].get("relabelings") for name, one in monitors.items()
    }
    label = "__meta_kubernetes_pod_label_" + re.sub(r"\W", "_", component)
    assert relabelings == {
        "demo-pdserve-router": None,
        "demo-pdserve-nodes": [{"sourceLabels": [label], "targetLabel": "role"}],
    }


def test_the_rules_are_those_of_compose(chart: Chart) -> None:
    (rule,) = of_kind(chart.manifests(CASES["everything"]), "PrometheusRule")
    file = ROOT / "compose" / "observability" / "rules.yaml"
    assert rule["spec"] == yaml.safe_load(file.read_text())


def validate(file: Path, version: str) -> list[str]:
    return [sys.executable, "-m", "kubernetes_validate", "--strict", "-k", version, str(file)]


def with_schemas(folder: Path) -> dict[str, str]:
    others = os.environ.get("PYTHONPATH", "")
    return {"PYTHONPATH": f"{folder}{os.pathsep}{others}"}


def keys_of(values: Any) -> set[str]:
    if not isinstance(values, dict):
        return set()
    return set(values).union(*(keys_of(value) for value in values.values()))


def ports_of(pod: Any) -> dict[str, int]:
    (container,) = pod["containers"]
    return {port["name"]: port["containerPort"] for port in container["ports"]}
