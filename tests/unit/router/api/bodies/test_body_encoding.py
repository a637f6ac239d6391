"""The characters of bodies and answers, at every endpoint."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.http.http_edge import make_edge
from tests.support.http.tool_models import hermes_model

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hé"}], "max_tokens": 1},
    "/v1/completions": {"prompt": "Hé", "max_tokens": 1},
    "/v1/responses": {"input": "Hé", "max_output_tokens": 16},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hé"}], "max_tokens": 1},
    "/tokenize": {"prompt": "Hé"},
    "/detokenize": {"tokens": [2]},
}


@pytest.mark.covers("W03")
@pytest.mark.parametrize("path", BODIES)
async def test_a_byte_order_mark_is_skipped(path: str) -> None:
    text = json.dumps(BODIES[path], ensure_ascii=False)
    async with make_edge().client() as client:
        plain = await client.post(path, content=text.encode())
        marked = await client.post(path, content=text.encode("utf-8-sig"))
        assert plain.status_code == marked.status_code == 200, marked.text
        if path == "/tokenize":
            assert marked.json() == plain.json()


@pytest.mark.covers("W03")
@pytest.mark.parametrize("path", BODIES)
async def test_another_encoding_is_named(path: str) -> None:
    text = json.dumps(BODIES[path], ensure_ascii=False)
    async with make_edge().client() as client:
        for encoding in ("utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"):
            reply = await client.post(path, content=text.encode(encoding))
            assert reply.status_code == 400
            message = reply.json()["error"]["message"]
            assert f"the body is encoded in {encoding[:6].upper()}: wanted UTF-8" in message
        for broken in (b"\xff", b"\0{}"):
            assert (await client.post(path, content=broken)).status_code == 400


@pytest.mark.covers("W12")
@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "cp850"])
async def test_a_body_in_an_encoding_of_one_byte_is_told_so(path: str, encoding: str) -> None:
    text = json.dumps({"x": "Perché?"} | BODIES[path], ensure_ascii=False).encode(encoding)
    async with make_edge().client() as client:
        reply = await client.post(path, content=text)
    assert reply.status_code == 400
    at = text.index("é".encode(encoding))
    wanted = f"the body is not in UTF-8: byte {text[at]:#04x} at {at}"
    assert reply.json()["error"]["message"].startswith(wanted)


@pytest.mark.covers("W13")
@pytest.mark.parametrize("path", BODIES)
async def test_answers_and_errors_say_their_encoding(path: str) -> None:
    wanted = "application/json; charset=utf-8"
    async with make_edge().client() as client:
        for body in (BODIES[path], {}, BODIES[path] | {"model": "é"}):
            assert (await client.post(path, json=body)).headers["content-type"] == wanted
        for other in ("/v1/models", "/v1/models/é", "/nothing", "/health", "/ready", "/v1/cluster"):
            assert (await client.get(other)).headers["content-type"] == wanted


# --- characters that are cut ----------------------------------------------------------------------

CUT: list[tuple[str, str]] = [
    (r"Hi \ud83d there", "Hi \ufffd there"),
    (r"Hi \ude00 there", "Hi \ufffd there"),
    (r"\uD83D\ud83d\ude00\ud83d", "\ufffd\U0001f600\ufffd"),
    (r"\ude00\ud83d", "\ufffd\ufffd"),
    (r"\\ud83d\ud83d\\\ud83d", "\\ud83d\ufffd\\\ufffd"),
    (r"\ud83d\n\u00e9\ud83d\u00e9", "\ufffd\n\u00e9\ufffd\u00e9"),
    (r"\ud7ff\ue000\ud83d", "\ud7ff\ue000\ufffd"),
]
"""Texts as JSON has them, with half of a character, and what they are."""


@pytest.mark.covers("W11")
@pytest.mark.parametrize(("written", "text"), CUT)
async def test_half_of_a_character_is_shown_as_such(written: str, text: str) -> None:
    edge = make_edge()
    async with edge.client() as client:
        cut = await client.post("/tokenize", content=f'{{"prompt": "{written}"}}')
        whole = await client.post("/tokenize", json={"prompt": text})
    assert cut.status_code == whole.status_code == 200, cut.text
    assert cut.json() == whole.json()


@pytest.mark.covers("W11")
@pytest.mark.parametrize("path", [path for path in BODIES if path != "/detokenize"])
async def test_half_of_a_character_spoils_no_request(path: str) -> None:
    text = json.dumps(BODIES[path]).replace(r"H\u00e9", r"H\ud83d")
    assert r"\ud83d" in text
    async with make_edge().client() as client:
        assert (await client.post(path, content=text)).status_code == 200
        broken = await client.post(path, content=text[:-1])
        assert broken.status_code == 400
        assert "not valid JSON" in broken.json()["error"]["message"]


@pytest.mark.covers("W11")
async def test_a_schema_that_is_text_may_hold_half_of_a_character() -> None:
    grammars = []
    for name in (r"\ud83d", "\ufffd"):
        edge = make_edge()
        schema = f'{{"properties": {{"{name}": {{"const": "{name}"}}}}}}'
        async with edge.client() as client:
            body = {"prompt": "Hi", "guided_json": schema}
            reply = await client.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        grammar = edge.generator.calls[-1].sampling.grammar
        assert grammar is not None
        grammars.append(json.loads(grammar.text))
    assert grammars[0] == grammars[1]


@pytest.mark.covers("W11")
async def test_arguments_of_a_call_may_hold_half_of_a_character() -> None:
    prompts = []
    for argument in (r"\ud83d", "\ufffd"):
        function = {"name": "f", "arguments": f'{{"a": "{argument}", "{argument}": 1}}'}
        call = {"id": "1", "type": "function", "function": function}
        messages = [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "ok"},
        ]
        async with make_edge(model=hermes_model()).client() as client:
            reply = await client.post("/tokenize", json={"messages": messages})
        assert reply.status_code == 200, reply.text
        prompts.append(reply.json()["tokens"])
    assert prompts[0] == prompts[1]
