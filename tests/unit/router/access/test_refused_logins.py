"""Refused API keys: each is counted, and a client that guesses cannot fill the log."""

from __future__ import annotations

from pathlib import Path

import pytest

from router.access.api_key_book import ApiKeyBook
from router.access.api_keys import add_api_key
from router.access.spaced_lines import LINE_EVERY_S
from tests.support.clocks.manual_clock import ManualClock
from tests.support.http.http_edge import Edge, make_edge


def refused(edge: Edge) -> dict[str, float]:
    reasons = ("no_key", "wrong_key", "not_admin")
    return {
        reason: edge.metric("pdserve_refused_logins_total", reason=reason) for reason in reasons
    }


async def test_refused_keys_are_counted_by_reason(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    alice = add_api_key(path, "alice")
    edge = make_edge(keys=ApiKeyBook(ManualClock(), path=path))
    assert refused(edge) == {"no_key": 0, "wrong_key": 0, "not_admin": 0}
    async with edge.client() as client:
        for _ in range(3):
            await client.get("/v1/models")
        await client.get("/v1/models", headers={"authorization": "Bearer x"})
        await client.get("/v1/models", headers={"authorization": f"Bearer {alice}"})
        headers = {"authorization": f"Bearer {alice}"}
        await client.post("/v1/cluster/drain", json={"node_id": "a"}, headers=headers)
        # Probes and the live page are open: nobody was refused.
        await client.get("/health")
        await client.get("/")
    assert refused(edge) == {"no_key": 3, "wrong_key": 1, "not_admin": 1}


async def test_a_thousand_guesses_are_a_line_every_ten_seconds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, clock = tmp_path / "keys.json", ManualClock()
    add_api_key(path, "alice")
    edge = make_edge(keys=ApiKeyBook(clock, path=path), clock=clock)
    async with edge.client() as client:
        for number in range(1000):
            secret = {"authorization": f"Bearer guess-{number}"}
            await client.get("/v1/models", headers=secret)
            clock.advance(LINE_EVERY_S / 256)
    assert [message.split()[0] for message in caplog.messages] == ["1", "256", "256", "256"]
    assert all("127.0.0.1 with a wrong API key" in message for message in caplog.messages)
    assert "guess" not in caplog.text
