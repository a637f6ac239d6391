"""The one line about each generation request, however it ends."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import httpx
import pytest

from common.errors import InternalError, NodeLost, Overloaded
from router.text.text_model import TextModel
from tests.support.http.edge_model import write_model_folder
from tests.support.http.http_edge import make_edge
from tests.support.http.http_server import eventually, served
from tests.support.http.scripted_generator import chunks, fails, hangs_after
from tests.support.observing.recorded_tracing import RecordedTracing

LOGGER = "pdserve.router.requests"
PROMPT = "Hello world"
BODY: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": 9}


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    shown = []
    for record in caplog.records:
        if record.name == LOGGER:
            assert record.levelno == logging.INFO
            fields: dict[str, Any] = vars(record)["fields"]
            assert PROMPT not in str(fields)
            shown.append({key: value for key, value in fields.items() if value is not None})
    return shown


@pytest.fixture(autouse=True)
def _at_info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER)


@pytest.mark.parametrize("is_stream", [True, False])
async def test_an_answer(caplog: pytest.LogCaptureFixture, is_stream: bool) -> None:
    edge = make_edge(api_key="sesame")
    headers = {"authorization": "Bearer sesame", "x-request-id": "mine"}
    async with edge.client(headers=headers) as client:
        response = await client.post("/v1/completions", json={**BODY, "stream": is_stream})
    assert response.status_code == 200
    (line,) = lines(caplog)
    assert 0 <= line.pop("ttft_ms") <= line.pop("duration_ms")
    assert line.pop("output_tokens") > 0
    assert line.pop("prompt_tokens") > 0
    line.pop("api_key", None)
    assert line == {
        "request_id": "mine",
        "endpoint": "completions",
        "model": "tiny",
        "outcome": "ok",
        "status": 200,
    }
    assert "sesame" not in caplog.text


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (Overloaded("full"), 503),
        (NodeLost("gone"), 502),
        (InternalError("a bug"), 500),
        (KeyError("a bug"), 500),
    ],
)
async def test_a_failure(caplog: pytest.LogCaptureFixture, error: Exception, status: int) -> None:
    async with make_edge(fails(error)).client() as client:
        response = await client.post("/v1/completions", json=BODY)
    (line,) = lines(caplog)
    assert line["status"] == response.status_code == status
    assert line["outcome"] == response.json()["error"]["code"] != "ok"
    assert line["error"] == response.json()["error"]["message"]
    assert line["request_id"] == response.headers["x-request-id"]
    assert "ttft_ms" not in line
    assert line["prompt_tokens"] > 0


async def test_a_failure_in_the_middle(caplog: pytest.LogCaptureFixture) -> None:
    edge = make_edge(fails(NodeLost("gone"), after=chunks([50, 51])[:1]))
    async with edge.client() as client:
        await client.post("/v1/completions", json={**BODY, "stream": True})
    (line,) = lines(caplog)
    assert (line["outcome"], line["status"], line["output_tokens"]) == ("node_lost", 200, 1)
    assert line["error"] == "gone"
    assert line["ttft_ms"] >= 0


async def test_a_body_that_is_none(caplog: pytest.LogCaptureFixture) -> None:
    async with make_edge().client() as client:
        await client.post("/v1/completions", content=b"{")
    (line,) = lines(caplog)
    assert line["status"] == 400
    assert "prompt_tokens" not in line
    assert line["error"].startswith("the body is not valid JSON")


async def test_a_refused_conversation_is_not_in_the_log(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    folder = write_model_folder(tmp_path)
    quotes = "{{ raise_exception('not ' ~ messages[0]['content']) }}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": quotes}))
    body = {"messages": [{"role": "user", "content": "a secret"}]}
    async with make_edge(model=TextModel.load(folder, "tiny", 0)).client() as client:
        reply = await client.post("/v1/chat/completions", json=body)
    assert "not a secret" in reply.json()["error"]["message"]
    (line,) = lines(caplog)
    assert (line["status"], line.get("error")) == (400, None)


async def test_a_client_that_leaves(caplog: pytest.LogCaptureFixture) -> None:
    edge = make_edge(hangs_after())
    async with served(edge.app) as port:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            asking = asyncio.create_task(client.post("/v1/completions", json=BODY))
            await eventually(lambda: len(edge.generator.calls) == 1)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        await eventually(lambda: len(lines(caplog)) == 1)
    assert lines(caplog)[0]["outcome"] == "client_closed"


async def test_nothing_is_put_together_when_nobody_reads_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, LOGGER)
    async with make_edge().client() as client:
        assert (await client.post("/v1/completions", json=BODY)).status_code == 200
    assert lines(caplog) == []


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": PROMPT}),
        ("/detokenize", {"tokens": [50, 51]}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": PROMPT}]}),
    ],
)
async def test_tokenization(
    caplog: pytest.LogCaptureFixture, path: str, body: dict[str, Any]
) -> None:
    tracing = RecordedTracing()
    async with make_edge(tracing=tracing).client(headers={"x-request-id": "mine"}) as client:
        assert (await client.post(path, json=body)).status_code == 200
        refused = await client.post(path, json=body | {"model": "other"})
    good, bad = lines(caplog)
    assert good.pop("duration_ms") >= 0
    common = {"request_id": "mine", "endpoint": path.rpartition("/")[2], "model": "tiny"}
    assert good == common | {"outcome": "ok", "status": 200}
    assert (bad["outcome"], bad["status"]) == ("model_not_found", 404)
    assert bad["error"] == refused.json()["error"]["message"]
    assert tracing.spans == [], "nothing was asked of a model"


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
async def test_tokenization_that_fails(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    def fail(*given: Any, **more: Any) -> Any:
        raise KeyError("a bug")

    edge = make_edge()
    monkeypatch.setattr(TextModel, "decode", fail)
    monkeypatch.setattr(TextModel, "encode", fail)
    async with edge.client() as client:
        reply = await client.post(path, json={"prompt": PROMPT, "tokens": [50]})
    assert reply.status_code == 500
    (line,) = lines(caplog)
    assert (line["outcome"], line["status"]) == ("internal_error", 500)
    assert any(record.exc_info for record in caplog.records)
