"""Requests that no endpoint gets leave their reason in the log, and cannot fill it."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from common.nodes import Role
from common.settings.config import ApiConfig, Config, ModelConfig
from router.access.api_key_book import ApiKeyBook
from router.access.api_keys import add_api_key
from router.access.spaced_lines import LINE_EVERY_S
from tests.support.clocks.manual_clock import ManualClock
from tests.support.http.http_edge import make_edge

LOGGER = "pdserve.router.http"


@pytest.fixture(autouse=True)
def _at_info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER)


@pytest.mark.parametrize(
    ("method", "path", "status", "code", "reason"),
    [
        ("GET", "/nowhere", 404, "not_found", "GET /nowhere: Not Found"),
        ("GET", "/models", 404, "not_found", "GET /models: Not Found: wanted /v1/models"),
        (
            "DELETE",
            "/v1/models",
            405,
            "method_not_allowed",
            "DELETE /v1/models: Method Not Allowed",
        ),
        (
            "GET",
            "/v1/completions",
            405,
            "method_not_allowed",
            "GET /v1/completions: Method Not All",
        ),
        ("GET", "/v1/models/gpt-4", 404, "model_not_found", "model 'gpt-4' is not served here: "),
    ],
)
async def test_a_wrong_path_or_method(
    caplog: pytest.LogCaptureFixture, method: str, path: str, status: int, code: str, reason: str
) -> None:
    async with make_edge().client(headers={"x-request-id": "mine"}) as client:
        assert (await client.request(method, path)).status_code == status
    (record,) = caplog.records
    assert record.getMessage().startswith(
        f"1 requests refused with status {status} ({code}) since the last line; the latest came "
        f"from 127.0.0.1: {reason}"
    )
    assert vars(record)["fields"] == {"request_id": "mine"}


async def test_a_foreign_host(caplog: pytest.LogCaptureFixture) -> None:
    config = Config(role=Role.ROUTER, model=ModelConfig(model="m"), api=ApiConfig())
    async with make_edge(config=config).client() as client:
        await client.get("/v1/models", headers={"host": "evil.example"})
        await client.get("/v1/models", headers={"origin": "http://evil.example"})
    (line,) = caplog.messages
    assert "status 403 (foreign_host)" in line
    assert "the Host header names 'evil.example'" in line


async def test_the_limit_of_a_key(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    path, clock = tmp_path / "keys.json", ManualClock()
    secret = add_api_key(path, "alice", requests_per_minute=1)
    edge = make_edge(keys=ApiKeyBook(clock, path=path), clock=clock)
    async with edge.client(headers={"authorization": f"Bearer {secret}"}) as client:
        for _ in range(5):
            reply = await client.post("/tokenize", json={"prompt": "a"})
    assert reply.status_code == 429
    (line,) = caplog.messages
    assert "status 429 (rate_limit_exceeded)" in line
    assert "the API key 'alice' may send 1 requests per minute" in line
    assert secret not in caplog.text


async def test_each_reason_has_a_line_every_ten_seconds(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    async with make_edge(clock=clock).client() as client:
        for number in range(1000):
            await client.get(f"/{number}{'x' * 500}")
            if number % 100 == 0:
                await client.put("/health")
            clock.advance(LINE_EVERY_S / 256)
    lines = [line.split(" ", 1) for line in caplog.messages]
    of_404 = [num for num, line in lines if "status 404" in line]
    of_405 = [num for num, line in lines if "status 405" in line]
    assert of_404 == ["1", "256", "256", "256"]
    assert of_405[0] == "1"
    assert len(of_405) == 4
    assert max(len(line) for line in caplog.messages) < 400
