"""The bill of materials names what an image holds, at the pinned versions, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from common.version import VERSION
from tools.generate_sbom import bill_of
from tools.requirements import pins

ROOT = Path(__file__).resolve().parents[3]
PINNED = pins((ROOT / "requirements.txt").read_text())


def versions(extras: list[str]) -> dict[str, str]:
    return {part["name"]: part["version"] for part in bill_of(extras)["components"]}


def test_a_router_holds_no_numerics_and_no_tools_of_tests() -> None:
    names = set(versions([]))
    assert {"fastapi", "starlette", "grpcio", "redis", "hiredis"} <= names
    assert not names & {"paddlepaddle", "numpy", "pytest", "mypy", "opentelemetry-sdk"}


def test_a_node_holds_what_it_needs_directly_and_indirectly() -> None:
    names = set(versions(["node", "cpu", "otel"]))
    assert {"paddlepaddle", "numba", "llvmlite", "pyzmq", "opentelemetry-api"} <= names
    assert set(versions([])) < names
    assert not names & {"pytest", "matplotlib"}


@pytest.mark.parametrize("extras", [[], ["node", "cpu", "otel"]])
def test_versions_are_the_pinned_ones(extras: list[str]) -> None:
    found = versions(extras)
    assert {name: PINNED[name].version for name in found} == found


def test_the_document_is_whole() -> None:
    bill = bill_of(["otel"])
    assert (bill["bomFormat"], bill["specVersion"], bill["version"]) == ("CycloneDX", "1.5", 1)
    assert re.fullmatch(r"urn:uuid:[0-9a-f-]{36}", bill["serialNumber"])
    assert bill["metadata"]["component"]["version"] == VERSION
    refs = {part["bom-ref"] for part in bill["components"]}
    assert len(refs) == len(bill["components"])
    (root,) = {one["ref"] for one in bill["dependencies"]} - refs
    assert root == f"pkg:pypi/pdserve@{VERSION}"
    assert all(set(one["dependsOn"]) <= refs for one in bill["dependencies"])
    assert bill == bill_of(["otel"])


def test_an_extra_that_is_unknown_is_an_error() -> None:
    with pytest.raises(KeyError, match="gnu"):
        bill_of(["gnu"])
