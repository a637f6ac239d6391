"""`/openapi.json` is made beside the event loop, which goes on with streams meanwhile."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from router.http import api_docs
from router.http.documented_api import documented_api
from tests.support.http.http_edge import make_edge, plays


async def test_the_description_is_made_on_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    makers: list[int] = []

    def noted(*given: Any) -> Any:
        makers.append(threading.get_ident())
        return documented_api(*given)

    monkeypatch.setattr(api_docs, "documented_api", noted)
    async with make_edge(plays([])).client() as client:
        first, again = await client.get("/openapi.json"), await client.get("/openapi.json")
    assert first.json() == again.json()
    assert len(makers) == 1
    assert makers[0] != threading.get_ident()
