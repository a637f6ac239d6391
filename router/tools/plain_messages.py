"""Calls and their results as plain messages, for chat templates that know neither."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from router.tools.fenced import FENCED, explanation

Message = dict[str, Any]


def plain_messages(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[Message]:
    """Return messages of the roles `system`, `user` and `assistant` alone, of text alone.

    The functions of `tools` are explained in the system message. Calls are the text that `FENCED`
    parses. Results that follow each other are one message of the user, with the functions' names.
    """
    called: list[tuple[str, str]] = []
    """The ids and functions of calls without a result; some servers number those of each answer."""
    plain: list[Message] = []
    is_result = False
    for message in messages:
        was_result, is_result = is_result, message["role"] == "tool"
        if is_result:
            name = _take(called, message.get("tool_call_id")) or message.get("name", "the function")
            text = f"Result of {name}:\n{message['content']}"
            if was_result:
                plain[-1]["content"] += f"\n\n{text}"
            else:
                plain.append({"role": "user", "content": text})
        else:
            calls = message.get("tool_calls", ())
            called += [(one["id"], one["function"]["name"]) for one in calls if "id" in one]
            plain.append(_with_calls(message))
    return _explained(plain, tools) if tools else plain


def _take(called: list[tuple[str, str]], call_id: str | None) -> str:
    """Take the first call with an id out of those without a result; return its function, or ''."""
    for at, (known_id, name) in enumerate(called):
        if known_id == call_id:
            del called[at]
            return name
    return ""


def _with_calls(message: Mapping[str, Any]) -> Message:
    plain = dict(message)
    texts = [plain["content"]] if plain["content"] else []
    for call in plain.pop("tool_calls", ()):
        function = call["function"]
        arguments = json.dumps(function["arguments"], ensure_ascii=False)
        texts.append(FENCED.call_text(function["name"], arguments))
    return plain | {"content": "\n".join(texts)}


def _explained(messages: list[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    text = explanation(tools)
    if messages[0]["role"] == "system":
        first = messages[0] | {"content": f"{messages[0]['content']}\n\n{text}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]
