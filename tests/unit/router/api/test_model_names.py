"""A model that has several names answers to each, and calls itself by the first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from router.text.text_model import TextModel
from tests.support.http.edge_model import write_model_folder
from tests.support.http.http_edge import Edge, make_edge

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT),
    ("/v1/completions", {"prompt": "Hi"}),
    ("/v1/responses", {"input": "Hi"}),
    ("/v1/messages", {**CHAT, "max_tokens": 4}),
    ("/tokenize", {"prompt": "Hi"}),
    ("/detokenize", {"tokens": [5]}),
]


@pytest.fixture
def edge(tmp_path: Path) -> Edge:
    return make_edge(model=TextModel.load(write_model_folder(tmp_path), "tiny,demo", 0))


@pytest.mark.parametrize(("path", "body"), REQUESTS)
async def test_each_name_is_served(path: str, body: dict[str, Any], edge: Edge) -> None:
    async with edge.client() as client:
        for name in ("tiny", "demo"):
            answer = await client.post(path, json={**body, "model": name})
            assert answer.status_code == 200, answer.text
            assert answer.json().get("model", "tiny") == "tiny"
        refused = await client.post(path, json={**body, "model": "tiny,demo"})
    assert refused.status_code == 404


async def test_the_list_has_each_name_the_first_one_first(edge: Edge) -> None:
    async with edge.client() as client:
        listed = (await client.get("/v1/models")).json()["data"]
        found = [(await client.get(f"/v1/models/{name}")).json() for name in ("tiny", "demo")]
    assert [model["id"] for model in listed] == ["tiny", "demo"]
    assert found == listed
