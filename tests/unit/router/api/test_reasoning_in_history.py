"""What an assistant thought in an earlier turn goes to the template, by either name."""

from __future__ import annotations

from typing import Any

import pytest

from router.api.bodies.chat_messages import template_messages
from router.api.bodies.schemas import ChatBody, parse_fields


@pytest.mark.parametrize(
    ("given", "thought"),
    [
        ({"reasoning_content": "a"}, "a"),
        ({"reasoning": "b"}, "b"),
        ({"reasoning": "b", "reasoning_content": "a"}, "a"),
        ({"reasoning": None}, None),
        ({}, None),
    ],
)
def test_reasoning_of_the_history(given: dict[str, Any], thought: str | None) -> None:
    message = {"role": "assistant", "content": "yes", **given}
    (plain,) = template_messages(parse_fields(ChatBody, {"messages": [message]}).messages)
    assert plain.get("reasoning_content") == thought
