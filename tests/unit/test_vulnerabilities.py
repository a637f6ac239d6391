"""What the vulnerabilities of other systems needed does not exist here: see the page's last table.

Where behaviour can show it, tests beside the code do; these hold what is absent.
"""

from __future__ import annotations

import ast
import dataclasses
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from kv_transfer.wire import frames
from protos import pdserve_node_pb2 as pb
from router.api.bodies import schemas
from tests.support.http.http_edge import declared_routes, make_edge
from tests.unit.tree import nodes, parsed

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = (
    *("common", "grammars", "engine", "kv_transfer", "placement", "protos", "http_serving"),
    *("node", "prefill_node", "decode_node", "router", "simulator", "pdserve"),
)
OBJECT_MODULES = {
    *("pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "jsonpickle", "marshal"),
    *("multiprocessing", "shelve", "copyreg"),
}
OBJECT_CALLS = {"recv_pyobj", "send_pyobj", "recv_serialized", "eval", "exec"}
FIXED_ENGINE = (0, 3, 13)
"""The first version of Mooncake's Transfer Engine without CVE-2026-103764."""


def object_readers(source: str) -> Iterator[str]:
    """Yield what of this source could make objects, or run code, from bytes."""
    for node in nodes(parsed(source)):
        match node:
            case ast.Import(names=names):
                yield from (n.name for n in names if n.name.partition(".")[0] in OBJECT_MODULES)
            case ast.ImportFrom(module=str(module)) if module.partition(".")[0] in OBJECT_MODULES:
                yield module
            case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name)) if (
                name in OBJECT_CALLS
            ):
                yield name
            case ast.keyword(arg="allow_pickle", value=value):
                if not (isinstance(value, ast.Constant) and value.value is False):
                    yield "allow_pickle"
            case ast.Attribute(attr="load" | "unsafe_load", value=ast.Name(id="yaml" | "torch")):
                yield "a loader that makes objects"


@pytest.mark.covers("V02")
def test_no_process_makes_objects_from_bytes() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for package in PRODUCT
        for path in sorted((ROOT / package).rglob("*.py"))
        for name in object_readers(path.read_text())
    ]
    assert found == []


@pytest.mark.covers("V02")
@pytest.mark.parametrize(
    "source",
    [
        *("import pickle", "from pickle import loads", "import multiprocessing.connection"),
        *("socket.recv_pyobj()", "eval(text)", "np.load(f, allow_pickle=True)", "torch.load(f)"),
    ],
)
def test_a_reader_of_objects_would_be_found(source: str) -> None:
    assert list(object_readers(source))


@pytest.mark.covers("V01")
def test_the_transfer_engine_is_one_that_asks_who_writes() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (wanted,) = [one for one in declared["optional-dependencies"]["rdma"] if "mooncake" in one]
    pins = re.findall(r"^(mooncake\S*?)==([\d.]+)", (ROOT / "requirements.txt").read_text(), re.M)
    assert pins
    for version in (wanted.partition(">=")[2], *(version for _, version in pins)):
        numbers = tuple(int(part) for part in version.strip(".").split(".")[:3])
        assert numbers >= FIXED_ENGINE, version


@pytest.mark.covers("V04")
def test_no_client_names_the_hash_of_a_block_and_nodes_do_in_pulls_alone() -> None:
    """A node finds cached blocks by hashes that it computes from the tokens it is sent."""
    told = {
        *(field.name for kind in kinds_of_frames() for field in dataclasses.fields(kind)),
        *(name for kind in vars(schemas).values() for name in getattr(kind, "model_fields", ())),
    }
    assert {"lease_token", "cache_salt"} <= told
    assert [name for name in told if "hash" in name] == []
    messages = pb.DESCRIPTOR.message_types_by_name.values()
    by_nodes = {f"{one.name}.{field.name}" for one in messages for field in one.fields}
    assert {name for name in by_nodes if "hash" in name} == {
        *("Pull.block_hashes", "Fetch.block_hashes", "NodeMessage.offered_hashes"),
    }


def kinds_of_frames() -> list[type]:
    return [
        kind
        for kind in vars(frames).values()
        if isinstance(kind, type) and dataclasses.is_dataclass(kind)
    ]


@pytest.mark.covers("V05")
def test_nothing_that_is_served_changes_weights_models_or_code() -> None:
    changing = {
        route.path
        for route, _ in declared_routes(make_edge())
        if set(route.methods or ()) - {"GET", "HEAD"}
    }
    assert changing == {
        *("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"),
        *("/tokenize", "/detokenize", "/v1/messages/count_tokens"),
        *("/v1/cluster/drain", "/v1/cluster/role"),
    }
    service = pb.DESCRIPTOR.services_by_name["Node"]
    assert [method.name for method in service.methods] == ["Stream", "Drain", "SetRole"]
