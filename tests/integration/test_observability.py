"""A traced cluster at debug level: one trace per request, and nothing said of its text."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pdserve.local_cluster.free_ports import free_loopback_port
from tests.support.clocks.stall_free_clock import timed
from tests.support.clocks.waiting import wait_until
from tests.support.cluster.api import Api
from tests.support.cluster.cluster import Cluster, running
from tests.support.cluster.topologies import keyed_spec
from tests.support.models.tiny_model import prompt_tokens
from tests.support.observing.otlp_collector import OtlpCollector, ReceivedSpan, otlp_collector
from tests.support.stores.redis_server import RedisServer
from tools.generate_metrics_table import described_metrics

SECRET_WORDS = "zanzibar plutonium marmalade"
EXPORTED_WITHIN_S = 60.0


@pytest.fixture(scope="module")
def collector_port() -> int:
    return free_loopback_port()


@pytest.fixture(scope="module")
def cluster(
    keyed_redis: RedisServer,
    cluster_folder: Path,
    tiny_model: Path,
    keys: Path,
    collector_port: int,
) -> Iterator[Cluster]:
    spec = keyed_spec("observed", tiny_model, keys)
    seen = (
        *("--log-level", "debug", "--log-format", "json"),
        *("--otel-endpoint", f"http://127.0.0.1:{collector_port}"),
    )
    prefill, decode = spec.nodes
    # A start of its own, all of whose lines are in its log.
    nodes = (prefill, replace(decode, environ={"PYTHONUNBUFFERED": "1"}))
    spec = replace(spec, nodes=nodes, flags=(*spec.flags, *seen), routers=(seen,))
    with running([spec], keyed_redis, cluster_folder) as (cluster,):
        yield cluster


@pytest.fixture
def api(cluster: Cluster) -> Iterator[Api]:
    cluster.wait_trusted()
    with Api(cluster.url, "tiny", cluster.headers) as api:
        yield api
    cluster.check_settled()


def asking(prompt: str, num_tokens: int) -> dict[str, Any]:
    """A request for exactly so many tokens: a sampled answer may end before."""
    return {"model": "tiny", "prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True}


def traceparent() -> str:
    return f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-01"


def wait_for_trace(collector: OtlpCollector, trace_id: str, count: int) -> list[ReceivedSpan]:
    wait_until(
        lambda: len(collector.trace(trace_id)) >= count,
        f"{count} spans",
        timeout_s=EXPORTED_WITHIN_S,
    )
    return collector.trace(trace_id)


def test_one_request_is_one_trace_over_three_processes(
    cluster: Cluster, api: Api, collector_port: int
) -> None:
    parent = traceparent()
    with otlp_collector(collector_port) as collector:
        response = api.http.post(
            "/v1/completions",
            json=asking(SECRET_WORDS * 9, 12),
            headers={"traceparent": parent, "x-request-id": "asked-by-me"},
        )
        assert response.status_code == 200
        spans = wait_for_trace(collector, parent[3:35], 10)
    by_name = {span.name: span for span in spans}
    tree = {
        (span.service, span.name): next(
            (other.name for other in spans if other.span_id == span.parent_id), span.parent_id
        )
        for span in spans
    }
    assert tree == {
        ("pdserve-router", "request"): parent[36:52],
        ("pdserve-router", "tokenize"): "request",
        ("pdserve-router", "attempt"): "request",
        ("pdserve-router", "reserve"): "attempt",
        ("pdserve-prefill", "prefill"): "attempt",
        ("pdserve-prefill", "queue"): "prefill",
        ("pdserve-prefill", "compute"): "prefill",
        ("pdserve-prefill", "kv transfer"): "attempt",
        ("pdserve-prefill", "exposed"): "kv transfer",
        ("pdserve-decode", "decode"): "attempt",
    }
    assert not any(span.is_error for span in spans)
    order = ["tokenize", "reserve", "prefill", "decode"]
    begins = [by_name[name].began_at_ns for name in order]
    assert begins == sorted(begins)
    whole = by_name["request"]
    for span in spans:
        assert span.began_at_ns <= span.ended_at_ns
        # Processes on one machine have one wall clock, read at slightly different moments.
        assert whole.began_at_ns - 10**7 <= span.began_at_ns <= whole.ended_at_ns + 10**7
    usage = response.json()["usage"]
    assert whole.attributes["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert whole.attributes["gen_ai.usage.output_tokens"] == 12
    assert whole.attributes["http.response.status_code"] == 200
    assert whole.attributes["pdserve.request_id"] == "asked-by-me"
    assert by_name["attempt"].attributes["pdserve.decode_node"] == "decode-1"
    assert by_name["attempt"].attributes["pdserve.prefill_node"] == "prefill-1"
    transfer = by_name["kv transfer"].attributes
    assert transfer["pdserve.kv.transport"] == "zmq"
    assert transfer["pdserve.kv.bytes"] > 0
    exposed = by_name["exposed"]
    assert transfer["pdserve.kv.exposed_s"] == pytest.approx(
        (exposed.ended_at_ns - exposed.began_at_ns) / 1e9, abs=1e-6
    )
    assert SECRET_WORDS.split()[0] not in str(spans)


def test_what_the_caller_does_not_sample_is_not_traced(
    cluster: Cluster, api: Api, collector_port: int
) -> None:
    with otlp_collector(collector_port) as collector:
        unwanted, wanted = traceparent()[:-2] + "00", traceparent()
        for header in (unwanted, wanted):
            fields = asking("One", 2)
            api.http.post("/v1/completions", json=fields, headers={"traceparent": header})
        wait_for_trace(collector, wanted[3:35], 10)
        assert collector.trace(unwanted[3:35]) == []


def test_a_collector_that_is_away_costs_spans_and_nothing_else(
    cluster: Cluster, api: Api, collector_port: int
) -> None:
    parent = traceparent()
    for _ in range(20):
        answer = api.http.post(
            "/v1/completions",
            json=asking("Away", 4),
            headers={"traceparent": traceparent()},
        )
        assert answer.status_code == 200
    with otlp_collector(collector_port) as collector:
        fields = asking("Back", 4)
        api.http.post("/v1/completions", json=fields, headers={"traceparent": parent})
        wait_for_trace(collector, parent[3:35], 10)


def lines_of(cluster: Cluster, name: str) -> list[dict[str, Any]]:
    """Fails unless every line is a JSON object, but for what it is writing now."""
    return [json.loads(line) for line in cluster.processes[name].log().split("\n")[:-1]]


def test_every_line_is_json_and_the_request_can_be_followed(cluster: Cluster, api: Api) -> None:
    parent = traceparent()
    response = api.http.post(
        "/v1/completions",
        json=asking(SECRET_WORDS * 5, 7),
        headers={"traceparent": parent},
    )
    request_id = response.headers["x-request-id"]
    cluster.check_settled()

    def said_of_it() -> list[dict[str, Any]]:
        lines = lines_of(cluster, "router-1")
        return [line for line in lines if line.get("request_id") == request_id]

    (line,) = wait_until(said_of_it, "the router's line")
    assert line["message"] == "request ended: ok"
    assert (line["level"], line["role"], line["node_id"]) == ("info", "router", "router-1")
    assert line["nodes"] == ["prefill-1", "decode-1"]
    assert line["trace_id"] == parent[3:35]
    assert line["output_tokens"] == 7
    assert line["prompt_tokens"] == response.json()["usage"]["prompt_tokens"]
    assert 0 < line["ttft_ms"] < line["duration_ms"]
    assert line["api_key"]
    (choice,) = line["choices"]

    def said_at(node: str) -> list[str]:
        lines = lines_of(cluster, node)
        return [said["message"] for said in lines if said.get("choice_id") == choice]

    wait_until(lambda: len(said_at("prefill-1")) == 2, "the prefill node's lines")
    wait_until(lambda: len(said_at("decode-1")) == 2, "the decode node's lines")
    assert said_at("prefill-1") == ["an attempt was taken", "an attempt ended: handed_off"]
    assert said_at("decode-1") == ["an attempt was taken", "an attempt ended: length"]


def test_no_log_holds_a_prompt_an_answer_or_a_key(cluster: Cluster, api: Api, keys: Path) -> None:
    answer = api.complete(SECRET_WORDS * 5, max_tokens=40)
    chat = api.chat(SECRET_WORDS, max_tokens=40)
    token_ids = prompt_tokens(30, salt=91)
    api.complete(token_ids, max_tokens=3)
    bad = api.http.post("/v1/completions", json={"model": "tiny", "prompt": SECRET_WORDS, "n": -1})
    assert bad.status_code == 400
    cluster.check_settled()
    logs = "".join(process.log() for process in cluster.processes.values())
    api_key = (keys / "client" / "api.key").read_text().strip()
    for secret in (*SECRET_WORDS.split(), api_key, answer.text[:12], chat.text[:12]):
        assert secret
        assert secret not in logs
        assert json.dumps(secret)[1:-1] not in logs
    numbers = re.sub(r"\D+", ",", logs)
    assert ",".join(map(str, token_ids[:4])) not in numbers


def test_every_metric_that_is_shown_is_in_the_tables(api: Api, keys: Path) -> None:
    api.complete("Something to count", max_tokens=3)
    tables = described_metrics()
    of_all = {metric.name for metric in tables["process"]}
    of_router = of_all | {metric.name for metric in tables["router"]}
    of_node = of_all | {metric.name for table in ("node", "kv") for metric in tables[table]}
    token = (keys / "client" / "metrics.token").read_text().strip()
    headers = {"authorization": f"Bearer {token}"}
    assert shown(api.http.get("/metrics", headers=headers).text) == of_router
    for node in api.http.get("/v1/cluster").json()["nodes"]:
        text = httpx.get(f"http://{node['metrics_address']}/metrics", headers=headers).text
        assert shown(text) == of_node


def shown(text: str) -> set[str]:
    """Names as the tables have them, without what the client library says of the process."""
    families = list(text_string_to_metric_families(text))
    names = {f"{f.name}_total" if f.type == "counter" else f.name for f in families}
    assert "process_cpu_seconds_total" in names
    return {name for name in names if not name.startswith("process_")}


def test_a_role_ends_soon_though_the_collector_is_away(cluster: Cluster, api: Api) -> None:
    api.complete("One more", max_tokens=3)
    code, took_s = timed(cluster.processes["router-1"].stop)
    assert code == 0
    assert took_s < 10
    cluster.mend()
