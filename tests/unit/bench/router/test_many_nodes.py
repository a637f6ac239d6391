"""What `bench.router.many_nodes` counts, and the idle nodes of its systems."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from bench.router import many_nodes
from bench.router.idle_nodes import IdleService, idle_record, serve_idle_nodes
from bench.router.load import LoadResult
from bench.router.node_stand_in import node_record
from common.ids import AttemptId, Incarnation
from common.nodes import Role
from common.request import GenerationRequest, SamplingParams
from router.dispatch.client.node_clients import NodeClient
from tests.support.clocks.manual_clock import ManualClock
from tests.support.http.http_server import eventually


class System:
    """A router that takes 2 ms for a request, and 1 ms in a second for each of its nodes."""

    def __init__(self, num_nodes: int) -> None:
        self.num_nodes = num_nodes
        self.redis_url = ""
        self.used_s = 0.0
        self.num_commands = 0
        self.load = SimpleNamespace(call=self._load)

    def cpu_s(self) -> dict[str, float]:
        return {"router": self.used_s}

    def pass_s(self, seconds: float) -> None:
        self.used_s += 0.001 * self.num_nodes * seconds
        self.num_commands += round(10 * seconds)

    def num_misplaced(self) -> int:
        return 0

    def _load(self, name: str, spec: Any) -> LoadResult:
        assert name == "run"
        self.pass_s(spec.duration_s)
        if spec.num_requests == many_nodes.WARM_UP:
            return LoadResult(many_nodes.WARM_UP, 0, 0, 0.0, [])
        self.used_s += 0.002 * 100
        self.num_commands += 3 * 100
        return LoadResult(100, 6400, 6400, spec.duration_s, [0.01] * 100)


def test_figures_are_per_request_and_by_number_of_nodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    systems: list[System] = []

    @contextmanager
    def running(_folder: Path, _pieces: Any, _step_s: float, *, num_nodes: int) -> Iterator[System]:
        systems.append(System(num_nodes))
        yield systems[-1]

    model = SimpleNamespace(encode=lambda *_a, **_k: list(range(1000)))
    monkeypatch.setattr(many_nodes, "running_system", running)
    monkeypatch.setattr(many_nodes, "TextModel", SimpleNamespace(load=lambda *_: model))
    monkeypatch.setattr(many_nodes, "_num_commands", lambda system: system.num_commands)

    def sleep(span_s: float) -> None:
        for one in systems:
            one.pass_s(span_s)

    monkeypatch.setattr(many_nodes, "time", SimpleNamespace(sleep=sleep))
    found = many_nodes.measure((2, 100), 3, 2.0, 4, Path())
    assert found["idle_share"] == {"2": 0.002, "100": 0.1}
    assert found["request_us"] == {"2": 2000.0, "100": 2000.0}
    assert found["requests_per_s"] == {"2": 50.0, "100": 50.0}
    assert found["redis_commands"] == {"2": 3.0, "100": 3.0}
    assert found["growth"] == 0.0


def test_idle_nodes_can_take_no_request_of_the_nodes_that_answer() -> None:
    answering = node_record(Role.DECODE, 1, "m")
    records = [idle_record(number, 1, "m") for number in range(4)]
    assert [one.role for one in records] == [Role.DECODE, Role.PREFILL] * 2
    assert len({one.node_id for one in records}) == 4
    assert all(one.fingerprint != answering.fingerprint for one in records)


async def test_an_idle_node_is_heard_and_a_request_ends_its_stream() -> None:
    service = IdleService()
    server, port = await serve_idle_nodes(service)
    listener = Mock(num_running=0)
    router = Incarnation("router-0", 1)
    client = NodeClient(idle_record(0, port, "m"), router, listener, Mock(), clock=ManualClock())
    client.start()
    await eventually(lambda: listener.on_heard.called)
    caller = Mock()
    request = GenerationRequest(
        id=AttemptId("r", 1),
        prompt_token_ids=(1,),
        sampling=SamplingParams(max_tokens=1),
        deadline_s=30.0,
    )
    client.calls.reserve_nowait(request, caller, must_prefill_locally=False, may_wait=False)
    await eventually(lambda: caller.on_failed.called)
    assert listener.on_lost.called
    assert service.num_calls == 1
    await client.close()
    await server.stop(0)
