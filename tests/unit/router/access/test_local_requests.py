"""Without keys, on loopback: programs of this machine are served, and no foreign web page."""

from __future__ import annotations

import pytest

from common.nodes import Role
from common.settings.config import ApiConfig, Config, ModelConfig, SecurityConfig, ServerConfig
from tests.support.http.http_edge import make_edge

PATH = "/v1/models"


def edge_config(host: str = "127.0.0.1", *, insecure: bool = False, api_key: str = "") -> Config:
    return Config(
        role=Role.ROUTER,
        model=ModelConfig(model="m", served_model_name="tiny"),
        server=ServerConfig(host=host),
        api=ApiConfig(api_key=api_key),
        security=SecurityConfig(insecure=insecure),
    )


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST:8000", "127.0.0.1:8000", "[::1]:8000", "127.8.8.8", "a.localhost"],
)
async def test_names_of_this_machine_are_served(host: str) -> None:
    async with make_edge(config=edge_config()).client() as client:
        assert (await client.get(PATH, headers={"host": host})).status_code == 200
        origin = {"host": host, "origin": f"http://{host}"}
        assert (await client.get(PATH, headers=origin)).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example"},
        {"host": "localhost.evil.example"},
        {"host": "127.0.0.1.evil.example:8000"},
        {"host": "10.0.0.7:8000"},
        {"host": "[::2]"},
        {"host": "[bad"},
        {"host": ""},
        {"origin": "http://evil.example"},
        {"origin": "https://localhost.evil.example"},
        {"origin": "null"},
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_foreign_names_and_pages_are_refused(headers: dict[str, str], method: str) -> None:
    edge = make_edge(config=edge_config())
    path = PATH if method == "GET" else "/v1/completions"
    async with edge.client() as client:
        reply = await client.request(method, path, headers=headers, content=b'{"prompt": "Hi"}')
    assert reply.status_code == 403
    assert reply.json()["error"]["code"] == "foreign_host"
    assert "--api-key" in reply.json()["error"]["message"]
    assert edge.generator.calls == []


@pytest.mark.parametrize(
    "config",
    [edge_config("0.0.0.0"), edge_config(insecure=True), edge_config(api_key="k")],
    ids=["exposed", "insecure", "with a key"],
)
async def test_any_name_is_served_where_others_are_expected(config: Config) -> None:
    headers = {"host": "models.example", "authorization": "Bearer k"}
    async with make_edge(config=config).client() as client:
        assert (await client.get(PATH, headers=headers)).status_code == 200
