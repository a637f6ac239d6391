"""`/openapi.json` describes what every endpoint answers, errors included."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from common.errors import (
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    NodeLost,
    Overloaded,
    StaleEpoch,
)
from common.ids import Incarnation
from common.nodes import Role
from common.settings.config import Config, ModelConfig
from common.version import VERSION
from router.api.tokenization import MAX_DETOKENIZE_BYTES
from router.cluster.admin_calls import UnknownNode
from router.cluster.drain import DrainingNode
from router.cluster.role import MovedNode
from router.cluster.shapes import ClusterAnswer
from router.cluster.view import node_json, placement_json
from router.http.described import schema_of
from router.http.errors import ApiError
from router.live.history import LiveHistory
from router.live.shapes import HistoryEvent, SnapshotEvent
from router.live.snapshot import SnapshotJson
from router.text.text_model import TextModel
from router.watch.edge_counters import EdgeCounters
from router.watch.recent_placements import RecentPlacements
from tests.support.http.described import check, described_paths
from tests.support.http.http_edge import Edge, FakeCluster, make_edge
from tests.support.observing.live_readings import node, placed, reading

PROBES = {"/health", "/ready"}
DRAIN, ROLE = "/v1/cluster/drain", "/v1/cluster/role"
COUNT = "/v1/messages/count_tokens"
D0 = Incarnation("d0", 1)


_paths: dict[str, Any] = {}


async def described() -> dict[str, Any]:
    """The paths of the description, which is the same in every router."""
    if not _paths:
        _paths.update(await described_paths(make_edge()))
    return _paths


async def ask(edge: Edge, method: str, path: str, **request: Any) -> tuple[int, Any, Any]:
    """Status and body of an answer, and how such an answer is described."""
    async with edge.client() as client:
        reply = await client.request(method, path, **request)
    shown = "/v1/models/{name}" if path.startswith("/v1/models/") else path
    responses = (await described())[shown][method.lower()]["responses"]
    content = responses[str(reply.status_code)]["content"]["application/json"]
    return reply.status_code, reply.json(), content["schema"]


async def test_every_answer_and_error_has_a_schema() -> None:
    for path, methods in (await described()).items():
        for operation in methods.values():
            responses = operation["responses"]
            wanted = {"200", "403"} | (set() if path in PROBES else {"401", "500"})
            assert wanted <= responses.keys(), path
            assert "422" not in responses, path
            for status, response in responses.items():
                assert response["content"], (path, status)
                for content in response["content"].values():
                    assert content["schema"].keys() & {"type", "anyOf"}, (path, status)
                    Draft202012Validator.check_schema(content["schema"])


async def test_every_post_has_a_body() -> None:
    for path, methods in (await described()).items():
        if "post" in methods:
            body = methods["post"]["requestBody"]
            assert body["required"], path
            Draft202012Validator.check_schema(body["content"]["application/json"]["schema"])


async def test_the_name_of_a_model_is_a_parameter() -> None:
    (name,) = (await described())["/v1/models/{name}"]["get"]["parameters"]
    assert (name["name"], name["in"], name["required"]) == ("name", "path", True)


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/health", None),
        ("GET", "/ready", None),
        ("GET", "/version", None),
        ("GET", "/v1/models", None),
        ("GET", "/v1/models/tiny", None),
        ("GET", "/v1/cluster/targets", None),
        ("GET", "/v1/scaling", None),
        ("POST", "/tokenize", {"prompt": "Hello"}),
        ("POST", "/tokenize", {"messages": [{"role": "user", "content": "Hello"}]}),
        ("POST", "/detokenize", {"tokens": [50, 51]}),
        ("POST", COUNT, {"messages": [{"role": "user", "content": "Hello"}]}),
    ],
)
async def test_answers_are_as_described(method: str, path: str, body: Any) -> None:
    status, answer, schema = await ask(make_edge(), method, path, json=body)
    assert status == 200
    check(answer, schema)


async def test_the_version() -> None:
    _, answer, _ = await ask(make_edge(), "GET", "/version")
    assert answer == {"version": VERSION}


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/tokenize", {"prompt": 5}, 400),
        (COUNT, {"messages": 5}, 400),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404),
        ("/detokenize", {"tokens": [10**6]}, 400),
        ("/detokenize", {"tokens": [1] * MAX_DETOKENIZE_BYTES}, 413),
    ],
)
async def test_refused_texts_are_as_described(path: str, body: Any, status: int) -> None:
    found, answer, schema = await ask(make_edge(), "POST", path, json=body)
    assert found == status
    check(answer, schema)


async def test_bodies_are_as_described() -> None:
    paths = await described()
    for path, good, bad in (
        ("/tokenize", {"prompt": "a"}, {"prompt": True}),
        ("/detokenize", {"tokens": [1]}, {"tokens": ["a"]}),
        (DRAIN, {"node_id": "d0"}, {"node_id": 5}),
    ):
        schema = paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        Draft202012Validator(schema).validate(good)
        assert not Draft202012Validator(schema).is_valid(bad), path


async def test_a_router_that_is_not_ready() -> None:
    edge = make_edge()
    edge.cluster.wrong = ("p0 can hand nothing off",)
    _, answer, schema = await ask(edge, "GET", "/ready")
    assert answer["warnings"]
    check(answer, schema)
    edge.cluster.reason = "no decode node"
    status, answer, schema = await ask(edge, "GET", "/ready")
    assert status == 503
    check(answer, schema)


async def test_a_model_that_is_not_served() -> None:
    status, answer, schema = await ask(make_edge(), "GET", "/v1/models/a/b")
    assert status == 404
    check(answer, schema)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/v1/models", "/tokenize"])
async def test_strangers_are_refused_as_described(path: str) -> None:
    method = "GET" if path == "/v1/models" else "POST"
    local = Config(role=Role.ROUTER, model=ModelConfig(model="m"))
    foreign = {"origin": "http://evil.example"}
    for edge, headers, wanted in (
        (make_edge(api_key="sesame"), {}, 401),
        (make_edge(config=local), foreign, 403),
    ):
        status, answer, schema = await ask(edge, method, path, headers=headers)
        assert status == wanted
        check(answer, schema)


async def test_a_bug_is_as_described(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: Any, **more: Any) -> Any:
        raise KeyError("a bug")

    edge = make_edge()
    monkeypatch.setattr(FakeCluster, "describe", fail)
    monkeypatch.setattr(TextModel, "decode", fail)
    for method, path, body in (
        ("GET", "/v1/cluster", None),
        ("POST", "/detokenize", {"tokens": [50]}),
    ):
        status, answer, schema = await ask(edge, method, path, json=body)
        assert status == 500
        check(answer, schema)


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (None, 200),
        (UnknownNode("d0", []), 404),
        (StaleEpoch("d0#1"), 409),
        (NodeLost("gone"), 502),
        (DeadlineExceeded("late"), 502),
        (Overloaded("full"), 503),
    ],
)
async def test_a_drain(error: Exception | None, wanted: int) -> None:
    async def drain(node_id: str) -> DrainingNode:
        if error is not None:
            raise error
        return DrainingNode(D0, 30.0)

    edge = make_edge(drain_node=drain)
    status, answer, schema = await ask(edge, "POST", DRAIN, json={"node_id": "d0"})
    assert status == wanted
    check(answer, schema)


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (None, 200),
        (UnknownNode("d0", []), 404),
        (InvalidRequest("it has no room for prompts"), 400),
        (ApiError(409, "the last", code="last_decode_node"), 409),
        (Draining("it leaves"), 409),
        (StaleEpoch("d0#1"), 409),
        (NodeLost("gone"), 502),
    ],
)
async def test_another_role(error: Exception | None, wanted: int) -> None:
    async def give(node_id: str, role: Role) -> MovedNode:
        if error is not None:
            raise error
        return MovedNode(D0, role, Role.DECODE)

    body = {"node_id": "d0", "role": "prefill"}
    status, answer, schema = await ask(make_edge(give_role=give), "POST", ROLE, json=body)
    assert status == wanted
    check(answer, schema)
    if error is None:
        assert (answer["role"], answer["earlier_role"]) == ("prefill", "decode")


@pytest.mark.parametrize("role", [None, 5, "", "router", "Prefill"])
async def test_a_role_that_is_none(role: object) -> None:
    body = {"node_id": "d0", "role": role}
    status, answer, schema = await ask(make_edge(), "POST", ROLE, json=body)
    assert (status, answer["error"]["param"]) == (400, "role")
    check(answer, schema)


@pytest.mark.parametrize("path", [DRAIN, ROLE])
async def test_a_body_of_a_drain_or_a_role_that_is_none(path: str) -> None:
    for request, wanted in (({"content": b"{}"}, 415), ({"json": {}}, 400)):
        status, answer, schema = await ask(make_edge(), "POST", path, **request)
        assert status == wanted
        check(answer, schema)


def test_the_cluster() -> None:
    """Nodes report more than is described."""
    listed = schema_of(ClusterAnswer)["properties"]
    Draft202012Validator(listed["nodes"]).validate([node_json(node(D0, Role.DECODE, kv_links=()))])
    check(make_edge().live.serving(), listed["serving"])
    recent = RecentPlacements()
    running = placed(recent, "a", D0)
    ended = placed(recent, "b", D0, Incarnation("p0", 1))
    recent.end(ended, "stop", duration_s=1.5, num_tokens=7)
    check([placement_json(running), placement_json(ended)], listed["recent_placements"])


async def test_the_events_of_the_live_page() -> None:
    recent = RecentPlacements()
    placed(recent, "a", D0)
    shown = reading(node(D0, Role.DECODE), placements=recent)
    edge = make_edge()
    edge.cluster.live = shown
    async with edge.client() as client:
        await client.post("/v1/completions", json={"prompt": 5})
    errors, samples = edge.live.edge.errors, LiveHistory(EdgeCounters())
    samples.add(shown, 0.0)
    events = SnapshotJson(samples, 0.0, quotes_requests=True)
    history = {"kind": "history", **events.history(shown, errors)}
    snapshot = {"kind": "snapshot", **events.snapshot(shown, recent, errors)}
    assert history["errors"]
    for event, kind in ((history, HistoryEvent), (snapshot, SnapshotEvent)):
        told, schema = json.loads(json.dumps(event)), schema_of(kind)
        Draft202012Validator(schema).validate(told)
        assert told.keys() == schema["properties"].keys()
        for name in ("placements", "errors"):
            assert told[name]
            check(told[name], schema["properties"][name])
