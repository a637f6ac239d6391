"""`compose/` agrees with the code: what is installed, which settings and metrics there are."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.settings.config import ApiConfig, ServerConfig
from pdserve.configuration.config_sources import OTHER_VARIABLES
from pdserve.configuration.options import all_options
from tools.requirements import pins

ROOT = Path(__file__).resolve().parents[3]
COMPOSE = ROOT / "compose"
OBSERVABILITY = COMPOSE / "observability"
FILES = sorted(COMPOSE.glob("*.yaml"))
DOCKERFILES = sorted(COMPOSE.glob("Dockerfile.*"))
SUFFIXES = ("_bucket", "_sum", "_count")


def test_the_build_context_is_what_is_installed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = project["tool"]["setuptools"]["packages"]["find"]["include"]
    lines = (ROOT / ".dockerignore").read_text().split()
    allowed = {line[1:] for line in lines if line.startswith("!")}
    assert "*" in lines
    assert {name for name in allowed if (ROOT / name).is_dir()} == {
        name.rstrip("*") for name in packages
    }
    copied = re.findall(r"^COPY (?!--)(.+) \S+$", everything(DOCKERFILES), re.MULTILINE)
    wanted = {source for sources in copied for source in sources.split() if source != "."}
    assert wanted <= allowed
    assert {name for name in allowed if name.startswith(("compose/", "tools/"))} <= wanted


@pytest.mark.parametrize(
    ("device", "rdma", "chosen"),
    [
        ("cpu", "", ["paddlepaddle"]),
        ("gpu", "", ["triton"]),
        ("cpu", "1", ["mooncake-transfer-engine-non-cuda", "paddlepaddle"]),
        ("gpu", "1", ["mooncake-transfer-engine-non-cuda", "triton"]),
    ],
)
def test_an_image_installs_the_device_and_the_rdma_that_it_names(
    tmp_path: Path, device: str, rdma: str, chosen: list[str]
) -> None:
    """The first command of Dockerfile.node, run by a shell."""
    text = (COMPOSE / "Dockerfile.node").read_text()
    (command,) = re.findall(r"^RUN (python requirements(?:[^\\\n]|\\\n)+)", text, re.MULTILINE)
    for name in ("pyproject.toml", "requirements.txt", "tools/requirements.py"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "python").symlink_to(sys.executable)
    variables = {
        "DEVICE": device,
        "RDMA": rdma,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
    }
    subprocess.run(["sh", "-c", command], cwd=tmp_path, env=variables, check=True)
    names = list(pins((tmp_path / "dependencies.txt").read_text()))
    assert [name for name in names if name.startswith(("mooncake", "paddle", "triton"))] == chosen
    assert {"fastapi", "numba"} < set(names)
    assert list(pins((tmp_path / "build.txt").read_text())) == ["setuptools"]


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_verifies_hashes(dockerfile: Path) -> None:
    joined = dockerfile.read_text().replace("\\\n", " ")
    installs = re.findall(r"pip (?:--python \S+ )?install [^&;\n]+", joined)
    for one in installs:
        assert re.search(r"--require-hashes -r \w+\.txt|--no-deps --no-compile /wheels/", one)


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_a_dockerfile_builds_where_no_registry_is(dockerfile: Path) -> None:
    text = dockerfile.read_text()
    assert "syntax=" not in text
    stages = re.findall(r"^FROM (\S+)", text, re.MULTILINE)
    assert set(stages) == {"${BASE_IMAGE}"}
    assert re.search(r"^USER 10001:10001$", text, re.MULTILINE)
    assert re.search(r"^HEALTHCHECK ", text, re.MULTILINE)


@pytest.mark.parametrize("file", [*FILES, *DOCKERFILES], ids=lambda path: path.name)
def test_every_setting_exists(file: Path) -> None:
    known = {option.variable for option in all_options().values()} | set(OTHER_VARIABLES)
    used = set(re.findall(r"\bPDSERVE_[A-Z_]+\b", file.read_text()))
    assert used <= known


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.name)
def test_the_example_of_settings_has_every_variable_with_its_default(file: Path) -> None:
    lines = (COMPOSE / ".env.example").read_text().splitlines()
    example = dict(line.split("=", 1) for line in lines if line and line[0] != "#")
    used = dict(re.findall(r"\$\{([A-Z_0-9]+):-([^}]*)\}", file.read_text()))
    # The same variable has another default where a cluster is spread over machines.
    assert used.items() <= example.items()
    for name in re.findall(r"\$\{([A-Z_0-9]+):\?", file.read_text()):
        assert f"# {name}=" in lines


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.name)
def test_every_service_is_fenced_in(file: Path) -> None:
    if file.name in ("compose.gpu.yaml", "compose.https.yaml"):
        pytest.skip("only adds to the services of compose.yaml")
    for name, service in load(file)["services"].items():
        if service.keys() == {"environment"}:
            continue  # adds settings to a service of compose.yaml
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["user"].startswith("${CONTAINER_USER:-"), name
        mounts = [volume for volume in service.get("volumes", []) if "KEYS_FOLDER" in volume]
        assert all(mount.endswith(":ro") for mount in mounts), name
        assert not any("/ca" in mount or "/client" in mount for mount in mounts), name


def test_limits_spare_redis_before_all_others() -> None:
    order = {"node": 800, "router": 400, "balancer": 200, "redis": 0}
    found = set()
    for file in FILES:
        for name, service in load(file)["services"].items():
            kind = "node" if name in ("prefill", "decode") else name.partition("-")[0]
            if kind not in order or "read_only" not in service:
                continue  # monitoring, or additions to a service of compose.yaml
            assert service["oom_score_adj"] == order[kind], name
            assert re.fullmatch(r"\$\{\w+_MEMORY_LIMIT:-\w+\}", service["mem_limit"])
            assert re.fullmatch(r"\$\{\w+_CPUS:-0\}", service["cpus"])
            assert service["pids_limit"]
            found.add((file.name, kind))
    assert {kind for _, kind in found} == set(order)


def test_everything_runs_again_after_a_reboot_but_a_drained_node_until_then() -> None:
    for file in FILES:
        for name, service in load(file)["services"].items():
            if "read_only" not in service:
                continue  # adds to a service of compose.yaml
            assert service["restart"] == "unless-stopped", name
            if name in ("prefill", "decode"):
                assert service["environment"]["PDSERVE_STAY_DRAINED"] == "true"


def test_published_ports_are_on_loopback_unless_asked_for() -> None:
    ports = [
        port
        for file in FILES
        for service in load(file)["services"].values()
        for port in service.get("ports", [])
    ]
    assert ports
    assert all(re.fullmatch(r"\$\{\w+:-127\.0\.0\.1:\d+\}:\d+", port) for port in ports)


def test_a_container_outlives_its_drain() -> None:
    example = env_example()
    for prefix in ("", "ROUTER_"):
        grace_s = int(example[f"{prefix}STOP_GRACE_PERIOD"].rstrip("s"))
        assert grace_s > int(example[f"{prefix}DRAIN_TIMEOUT_S"]) + 13
    routers = int(example["ROUTER_DRAIN_TIMEOUT_S"])
    assert routers == ApiConfig().request_timeout_s, "every stream may end by itself"
    assert int(example["DRAIN_TIMEOUT_S"]) == ServerConfig().drain_timeout_s


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.name)
def test_what_cannot_hand_streams_over_has_the_time_of_a_request_to_stop(file: Path) -> None:
    """A balancer as little as a router: killed sooner, it would cut what the routers let end."""
    example = env_example()
    for name, service in load(file)["services"].items():
        if "stop_grace_period" not in service:
            continue
        is_node = name in ("prefill", "decode")
        variable = "STOP_GRACE_PERIOD" if is_node else "ROUTER_STOP_GRACE_PERIOD"
        assert service["stop_grace_period"] == f"${{{variable}:-{example[variable]}}}", name
        drain = service.get("environment", {}).get("PDSERVE_DRAIN_TIMEOUT_S")
        variable = "DRAIN_TIMEOUT_S" if is_node else "ROUTER_DRAIN_TIMEOUT_S"
        assert drain in (None, f"${{{variable}:-{example[variable]}}}"), name


def test_every_service_that_answers_requests_has_a_time_to_stop() -> None:
    with_time = {
        name
        for file in FILES
        for name, service in load(file)["services"].items()
        if "stop_grace_period" in service
    }
    assert {"balancer", "router-1", "router-2", "router", "prefill", "decode"} <= with_time


def test_the_balancer_waits_for_an_answer_as_long_as_a_request_may_take() -> None:
    found = re.search(r"^ *timeout server (\d+)s$", (COMPOSE / "haproxy.cfg").read_text(), re.M)
    assert found is not None
    assert int(found[1]) > ApiConfig().request_timeout_s


@pytest.mark.parametrize("page", ["operations.md", "kubernetes.md"])
def test_the_documents_name_these_times(page: str) -> None:
    example, text = env_example(), (ROOT / "docs" / page).read_text()
    assert f"{example['ROUTER_DRAIN_TIMEOUT_S']} s" in text
    assert f"{example['DRAIN_TIMEOUT_S']} s" in text
    if page == "operations.md":
        for variable in ("STOP_GRACE_PERIOD", "ROUTER_STOP_GRACE_PERIOD"):
            assert f"`stop_grace_period: {example[variable]}`" in text


def env_example() -> dict[str, str]:
    lines = (COMPOSE / ".env.example").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and line[0] != "#")


def test_the_dashboard_shows_metrics_that_there_are() -> None:
    shown = expressions("pdserve.json")
    used = {name for text in shown for name in re.findall(r"\bpdserve_\w+", text)}
    assert len(used) > 15
    assert unlisted(used) == set()


def test_the_rules_use_metrics_that_there_are() -> None:
    rules = all_rules()
    texts = [rule["expr"] for rule in rules]
    texts += [rule["annotations"]["description"] for rule in rules if "alert" in rule]
    used = {name for text in texts for name in re.findall(r"\bpdserve_\w+", text)}
    assert len(used) > 10
    assert unlisted(used) == set()
    recorded = {rule["record"] for rule in rules if "record" in rule}
    assert {name for text in texts for name in re.findall(r"\bpdserve:[\w:]+", text)} <= recorded


def test_a_failed_request_is_one_with_an_error_of_the_server() -> None:
    (expression,) = (
        rule["expr"]
        for rule in all_rules()
        if rule.get("record") == "pdserve:requests_failed:ratio_5m"
    )
    assert set(re.findall(r"\bpdserve_\w+", expression)) == {
        "pdserve_failed_requests_total",
        "pdserve_requests_total",
    }
    assert "outcome" not in expression


def test_traces_reach_a_store_that_grafana_reads() -> None:
    collector, tempo = (load(OBSERVABILITY / f"{name}.yaml") for name in ("collector", "tempo"))
    services = load(COMPOSE / "compose.observability.yaml")["services"]
    host, _, port = collector["exporters"]["otlp"]["endpoint"].partition(":")
    assert host in services
    assert "otlp" in collector["service"]["pipelines"]["traces"]["exporters"]
    receiver = tempo["distributor"]["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"]
    assert receiver.rpartition(":")[2] == port
    (source,) = load(OBSERVABILITY / "grafana/provisioning/datasources/tempo.yaml")["datasources"]
    assert source["url"] == f"http://{host}:{tempo['server']['http_listen_port']}"


def test_the_dashboard_reads_the_provisioned_source() -> None:
    provisioned = load(OBSERVABILITY / "grafana/provisioning/datasources/prometheus.yaml")
    (source,) = provisioned["datasources"]
    text = (OBSERVABILITY / "grafana/dashboards/pdserve.json").read_text()
    assert set(re.findall(r'"uid": "(\w+)"', text)) == {source["uid"], "pdserve"}
    services = load(COMPOSE / "compose.observability.yaml")["services"]
    assert source["url"] == "http://prometheus:9090"
    assert "prometheus" in services


def test_prometheus_finds_every_role_of_the_cluster() -> None:
    jobs = load(OBSERVABILITY / "prometheus.yaml")["scrape_configs"]
    targets = {
        name: found["port"]
        for job in jobs
        for found in job["dns_sd_configs"]
        for name in found["names"]
    }
    assert targets == {"router-1": 8000, "router-2": 8000, "prefill": 9100, "decode": 9100}
    assert set(targets) <= set(load(COMPOSE / "compose.yaml")["services"])
    volumes = load(COMPOSE / "compose.observability.yaml")["services"]["prometheus"]["volumes"]
    for job in jobs:
        token = job["authorization"]["credentials_file"]
        assert any(volume.endswith(f"metrics.token:{token}:ro") for volume in volumes)


def test_the_collector_takes_what_the_code_sends() -> None:
    collector = load(OBSERVABILITY / "collector.yaml")
    assert collector["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"] == "0.0.0.0:4317"
    for pipeline in collector["service"]["pipelines"].values():
        for part in ("receivers", "processors", "exporters"):
            assert set(pipeline[part]) <= set(collector[part])


def all_rules() -> list[dict[str, Any]]:
    groups = load(OBSERVABILITY / "rules.yaml")["groups"]
    return [rule for group in groups for rule in group["rules"]]


def unlisted(used: set[str]) -> set[str]:
    """Return the names that the page of metrics does not have."""
    page = (ROOT / "docs" / "metrics.md").read_text()
    cells = [line.split("|")[1] for line in page.splitlines() if line.startswith("|")]
    listed = {name for cell in cells for name in re.findall(r"`(pdserve_\w+)`", cell)}
    return {name for name in used if base_name(name, listed) not in listed}


def load(path: Path) -> dict[str, Any]:
    return dict(yaml.safe_load(path.read_text()))


def everything(files: list[Path]) -> str:
    return "\n".join(path.read_text() for path in files)


def expressions(dashboard: str) -> list[str]:
    found = json.loads((OBSERVABILITY / "grafana/dashboards" / dashboard).read_text())
    return [target["expr"] for panel in found["panels"] for target in panel["targets"]]


def base_name(name: str, listed: set[str]) -> str:
    """A histogram is listed without the endings of its series."""
    for suffix in SUFFIXES:
        if name.endswith(suffix) and name not in listed:
            return name.removesuffix(suffix)
    return name
