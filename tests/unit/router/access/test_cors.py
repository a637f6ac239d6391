"""Web pages of other sites: those that are named may call the API, and no others."""

from __future__ import annotations

from typing import Any

import pytest

from common.settings.config import ApiConfig
from tests.support.http.http_edge import make_edge

PAGE = "https://chat.example.org"
BODY = {"prompt": "Hi"}


async def post(origin: str, **api: Any) -> Any:
    edge = make_edge(**api)
    async with edge.client() as client:
        return await client.post("/v1/completions", json=BODY, headers={"origin": origin})


@pytest.mark.parametrize("allowed", [PAGE, f"https://other.example.org, {PAGE}", "*"])
@pytest.mark.parametrize("api", [{}, {"api_key": "sesame"}])
async def test_a_page_that_is_allowed_reads_the_answer_or_the_refusal(
    allowed: str, api: dict[str, str]
) -> None:
    reply = await post(PAGE, cors_origins=allowed, **api)
    assert reply.status_code == (401 if api else 200)
    assert reply.headers["access-control-allow-origin"] in (PAGE, "*")
    assert "x-request-id" in reply.headers["access-control-expose-headers"]


@pytest.mark.parametrize("cors", [{}, {"cors_origins": "https://other.example.org"}])
async def test_another_page_is_refused_where_there_are_no_keys(cors: dict[str, str]) -> None:
    reply = await post(PAGE, **cors)
    assert reply.status_code == 403
    assert "--cors-origins" in reply.json()["error"]["message"]
    assert "access-control-allow-origin" not in reply.headers


PROGRAMS = [
    "app://obsidian.md",
    "chrome-extension://bpoadfkcbjbfhfodiogcnhhhpibjhbnh",
    "moz-extension://2c127fa4-62c7-7e4f-90e5-472b45eecfdc",
    "safari-web-extension://4F2A1B0C-62C7-7E4F-90E5-472B45EECFDC",
    "vscode-webview://1a2b3c",
    "tauri://localhost",
]


@pytest.mark.covers("W16")
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("api", [{}, {"api_key": "sesame"}])
async def test_an_extension_or_a_program_is_named_by_its_origin(
    program: str, api: dict[str, str]
) -> None:
    """As the refusal says that names the origin of whoever is refused."""
    assert ApiConfig(cors_origins=f"{PAGE}, {program}").problems() == []
    reply = await post(program, cors_origins=f"{PAGE}, {program}", **api)
    assert reply.status_code == (401 if api else 200)
    assert reply.headers["access-control-allow-origin"] == program


@pytest.mark.covers("W17")
@pytest.mark.parametrize("names", ["x-stainless-os,x-stainless-timeout", "openai-beta,baggage"])
async def test_any_header_of_a_client_in_a_browser_is_allowed(names: str) -> None:
    asks = {
        "origin": PAGE,
        "access-control-request-method": "POST",
        "access-control-request-headers": f"authorization,content-type,{names}",
    }
    async with make_edge(cors_origins=PAGE).client() as client:
        reply = await client.options("/v1/chat/completions", headers=asks)
    allowed = reply.headers["access-control-allow-headers"]
    assert set(names.split(",")) <= {one.strip() for one in allowed.split(",")}


async def test_a_browser_asks_before_it_sends_a_key() -> None:
    edge = make_edge(api_key="sesame", cors_origins=PAGE)
    asks = {
        "origin": PAGE,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    async with edge.client() as client:
        reply = await client.options("/v1/chat/completions", headers=asks)
        other = await client.options(
            "/v1/chat/completions", headers=asks | {"origin": "https://evil.example.org"}
        )
    assert reply.status_code == 200
    assert reply.headers["access-control-allow-origin"] == PAGE
    assert "authorization" in reply.headers["access-control-allow-headers"]
    assert "access-control-allow-origin" not in other.headers


def test_a_default_port_is_no_part_of_an_origin() -> None:
    listed = (
        "https://a.example:443, http://b.example:80, https://c.example:80, http://d.example:443"
    )
    assert ApiConfig(cors_origins=listed).allowed_origins == (
        "https://a.example",
        "http://b.example",
        "https://c.example:80",
        "http://d.example:443",
    )


NO_ORIGINS = [
    "chat.example.org",
    "null",
    "file://",
    "app://obsidian.md/",
    "chrome-extension://*",
    "https://a.example.org/",
    "https://",
    "https://*.example.org",
    "https://Chat.example.org",
]


@pytest.mark.parametrize("wrong", NO_ORIGINS)
def test_what_is_no_origin_is_named(wrong: str) -> None:
    [problem] = ApiConfig(cors_origins=f"{PAGE},{wrong}").problems()
    assert repr(wrong) in problem.text
