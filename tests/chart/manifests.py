"""The chart rendered with some values, and what is asked of the manifests."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.support.commands import run

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "helm" / "pdserve"
RELEASE = "demo"
LIMIT_S = 60.0

Manifest = Mapping[str, Any]

# One set of values for each way in which the chart renders differently.
CASES: dict[str, dict[str, Any]] = {
    "default": {},
    "everything": {
        "image": {"registry": "registry.example/team/", "tag": "7", "pullSecrets": [{"name": "r"}]},
        "model": {"name": "served", "volume": {"hostPath": {"path": "/models"}}},
        "tracing": {"endpoint": "http://collector:4317"},
        "router": {
            "settings": {"max_connections": 8192},
            "extraEnv": [{"name": "OTEL_RESOURCE_ATTRIBUTES", "value": "a=b"}],
            "podAnnotations": {"a": "b"},
            "podLabels": {"c": "d"},
            "tolerations": [{"key": "k", "operator": "Exists"}],
            "service": {"type": "LoadBalancer", "annotations": {"e": "f"}},
        },
        "prefill": {"autoscaling": {"method": "keda"}, "runtimeClassName": "nvidia"},
        "decode": {"autoscaling": {"method": "hpa"}, "topologySpread": None},
        "mixed": {"replicas": 1, "nodeSelector": {"gpu": "h"}, "priorityClassName": "high"},
        "redis": {"storage": {"storageClassName": "fast"}},
        "networkPolicy": {
            "clients": [{"namespaceSelector": {}}],
            "monitoring": [{"namespaceSelector": {}}],
            "extraEgress": [{"ports": [{"port": 4317}]}],
        },
        "metrics": {
            "serviceMonitor": {"enabled": True, "labels": {"release": "p"}},
            "rules": {"enabled": True, "labels": {"release": "p"}},
        },
    },
    "another Redis, IPv6": {"redis": {"url": "rediss://redis.data:6380/0"}, "listen": "::"},
    "GPUs": {
        "decode": {
            "image": "registry.example/pdserve-node-gpu:1",
            "settings": {"kv_transport": "auto", "num_threads": 8, "memory_fraction": 0.9},
            "resources": {"limits": {"nvidia.com/gpu": 1, "memory": "64Gi"}},
            "kernelCache": {"persistentVolumeClaim": {"claimName": "kernels"}},
        },
        "networkPolicy": {"enabled": False},
    },
}


class Chart:
    """The chart, and the helm that renders it."""

    def __init__(self, helm: Path) -> None:
        self._helm = str(helm)

    def lint(self) -> str:
        """Check the chart. Raises `CommandFailed` with what is wrong."""
        return self._run("lint", "--strict", str(FOLDER))

    def text(self, values: Mapping[str, Any]) -> str:
        """Return the manifests as YAML. Raises `CommandFailed` when values are wrong."""
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            yaml.safe_dump(dict(values), file)
            file.flush()
            return self._run("template", RELEASE, str(FOLDER), "--values", file.name)

    def manifests(self, values: Mapping[str, Any]) -> list[Manifest]:
        """Return the manifests that the chart makes of `values`."""
        return [one for one in yaml.safe_load_all(self.text(values)) if one]

    def _run(self, *arguments: str) -> str:
        return run([self._helm, *arguments], limit_s=LIMIT_S)


def of_kind(manifests: list[Manifest], *kinds: str) -> list[Manifest]:
    return [one for one in manifests if one["kind"] in kinds]


def named(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    (found,) = (
        one for one in of_kind(manifests, kind) if one["metadata"]["name"] == f"demo-pdserve-{name}"
    )
    return found


def pods(manifests: list[Manifest]) -> Iterator[tuple[str, Mapping[str, Any], Mapping[str, str]]]:
    """Yield the component, the specification and the labels of each kind of pod."""
    for one in of_kind(manifests, "Deployment", "StatefulSet"):
        template = one["spec"]["template"]
        labels = template["metadata"]["labels"]
        yield labels["app.kubernetes.io/component"], template["spec"], labels


def selects(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    return selector.items() <= labels.items()


def environment(container: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables of a container, with values for what Kubernetes fills in."""
    fields = {"status.podIP": "10.1.2.3", "limits.cpu": "2"}
    found = {}
    for one in container["env"]:
        source = one.get("valueFrom", {})
        path = source.get("fieldRef", {}).get("fieldPath") or source.get(
            "resourceFieldRef", {}
        ).get("resource")
        found[one["name"]] = fields[path] if path else one["value"]
    return found
