"""Models that are odd in one way, each through `pdserve up`: chats, completions, tools and JSON."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.models.odd_models import (
    ODD,
    answer,
    check_chats,
    check_completions,
    make_odd_model,
    served,
)


@pytest.mark.parametrize("name", ODD)
def test_a_model_that_is_odd_in_one_way(name: str, tmp_path: Path) -> None:
    with served(make_odd_model(tmp_path / "odd", name), tmp_path) as client:
        check_completions(client)
        chat = {"messages": [{"role": "user", "content": "ab"}], "max_tokens": 20}
        if name == "has no template":
            reply = client.post("chat/completions", json=chat)
            assert reply.status_code == 400
            assert "/v1/completions" in reply.text
        elif name == "thinks in its template":
            message = answer(client, "chat/completions", **chat)["choices"][0]["message"]
            assert message["reasoning_content"]
        else:
            check_chats(client)
