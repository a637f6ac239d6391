"""The app of a router around a small model and a scripted generator."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from prometheus_client import CollectorRegistry
from starlette.routing import Route
from starlette.types import ASGIApp

from common.errors import InvalidRequest
from common.nodes import Role
from common.observing.clock import Clock, MonotonicClock
from common.observing.tracing import NO_TRACING, Tracing
from common.settings.config import ApiConfig, Config, ModelConfig
from grammars.gbnf import Gbnf, lark_of_gbnf
from grammars.trying.messages import Trial, Verdict
from router.access.api_key_book import ApiKeyBook
from router.access.middleware import PlainRequestMiddleware
from router.api.bodies.asked import RequestKind
from router.api.planning.body_planner import TriesGrammars
from router.api.planning.planner import Planner, RequestPlan
from router.api.planning.process import LargeBodies
from router.app import create_app
from router.cluster.admin_calls import UnknownNode
from router.cluster.drain import DrainingNode, DrainNode
from router.cluster.role import GiveRole, MovedNode
from router.http.routes import Access
from router.live.feed import LiveFeed
from router.live.reading import Reading
from router.text.text_model import TextModel
from router.watch.scaling_report import ScalingAnswer
from tests.support.http.edge_model import grammars_of, tiny_model
from tests.support.http.scripted_generator import Script, ScriptedGenerator, says
from tests.support.observing.live_readings import reading, scaling


@dataclass
class FakeCluster:
    """A cluster view that says what a test wants."""

    reason: str = ""
    longest: int | None = None
    wrong: tuple[str, ...] = ()
    live: Reading | None = None

    def is_draining(self) -> bool:
        return self.reason == "draining"

    def is_ready(self) -> bool:
        return not self.reason

    def why_not_ready(self) -> str:
        return self.reason

    def warnings(self) -> list[str]:
        return list(self.wrong)

    def max_model_len(self) -> int | None:
        return self.longest

    def scrape_targets(self) -> list[dict[str, Any]]:
        return [{"targets": ["10.0.0.7:9100"], "labels": {"role": "decode", "node_id": "d"}}]

    def scaling(self) -> ScalingAnswer:
        return scaling()

    def describe(self) -> dict[str, Any]:
        return {"nodes": [], "router": "r0"}

    def read_live(self) -> Reading:
        return self.live or reading(trouble=self.reason, warnings=self.wrong)


@dataclass
class Edge:
    """An app with its parts at hand."""

    app: ASGIApp
    model: TextModel
    generator: ScriptedGenerator
    cluster: FakeCluster
    registry: CollectorRegistry
    live: LiveFeed

    def metric(self, name: str, **labels: str) -> float:
        """A sample's value; 0 when it has none yet."""
        return self.registry.get_sample_value(name, labels) or 0.0

    @asynccontextmanager
    async def client(self, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
        transport = httpx.ASGITransport(app=self.app)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://localhost", **options
        ) as client:
            yield client


class PlansHere:
    """`LargeBodies` without a process: plans at once, and notes how large the bodies were."""

    def __init__(self, model: TextModel) -> None:
        self._model = model
        self.sizes: list[int] = []

    async def plan(self, kind: RequestKind, body: bytes, max_model_len: int) -> RequestPlan:
        self.sizes.append(len(body))
        return Planner(self._model, max_model_len, lambda: 1).plan(kind, body)


class TriesHere:
    """`TriesGrammars` without a process; notes what is tried, and for whom."""

    def __init__(self, model: TextModel) -> None:
        self._model = model
        self.tried: list[Trial] = []
        self.clients: list[str] = []

    def begin(self, trial: Trial, client: str = "") -> Future[Verdict]:
        self.tried.append(trial)
        self.clients.append(client)
        verdict = Future[Verdict]()
        try:
            if isinstance(trial.grammar, Gbnf):
                verdict.set_result(Verdict(instead=lark_of_gbnf(trial.grammar)))
            else:
                followed = grammars_of(self._model).check(trial.grammar, trial.parts)
                verdict.set_result(Verdict(1, None if followed == trial.grammar else followed))
        except InvalidRequest as error:
            verdict.set_exception(error)
        return verdict


async def moves_nothing(node_id: str, role: Role) -> MovedNode:
    raise UnknownNode(node_id, [])


async def drains_nothing(node_id: str) -> DrainingNode:
    """No node is known."""
    raise UnknownNode(node_id, [])


def make_edge(
    script: Script | None = None,
    *,
    generator: ScriptedGenerator | None = None,
    model: TextModel | None = None,
    keys: ApiKeyBook | None = None,
    clock: Clock | None = None,
    config: Config | None = None,
    drain_node: DrainNode = drains_nothing,
    give_role: GiveRole = moves_nothing,
    large_bodies: LargeBodies | None = None,
    trials: TriesGrammars | None = None,
    tracing: Tracing = NO_TRACING,
    **api: Any,
) -> Edge:
    """An edge over `model` (the tiny one); answers "Hello world" where no script is given.

    Where a deadline passes or must not pass, `clock` is the test's `StoppedTime`. Without a
    `config`, `api` are settings of the API.
    """
    clock = clock or MonotonicClock()
    model = model or tiny_model()
    if config is None:
        config = Config(role=Role.ROUTER, model=ModelConfig(model="tiny"), api=ApiConfig(**api))
    generator = generator or ScriptedGenerator(script or says("Hello world"))
    cluster, registry = FakeCluster(), CollectorRegistry()
    live = LiveFeed(cluster, clock)
    app = create_app(
        config=config,
        text_model=model,
        large_bodies=large_bodies or PlansHere(model),
        trials=trials or TriesHere(model),
        generator=generator,
        cluster=cluster,
        registry=registry,
        live=live,
        drain_node=drain_node,
        give_role=give_role,
        api_keys=keys,
        tracing=tracing,
        clock=clock,
    )
    return Edge(app, model, generator, cluster, registry, live)


def declared_routes(edge: Edge) -> list[tuple[Route, Access]]:
    """Every route of the application, with who may call it."""
    app = edge.app
    while not isinstance(app, PlainRequestMiddleware):
        app = app.app  # type: ignore[attr-defined]
    found = []
    for route, declared in app.routes.routes:
        assert isinstance(route, Route)
        found.append((route, declared.access))
    return found


def events(body: bytes) -> list[Any]:
    """The payloads of an SSE body, `[DONE]` as text; every event is checked for its frame."""
    parts = body.split(b"\n\n")
    assert parts.pop() == b""
    payloads: list[Any] = []
    for part in parts:
        assert part.startswith(b"data: ")
        text = part.removeprefix(b"data: ").decode()
        payloads.append(text if text == "[DONE]" else json.loads(text))
    return payloads
