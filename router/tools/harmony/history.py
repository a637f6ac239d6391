"""Earlier messages, tools and efforts as the chat templates of gpt-oss take them.

Such a template has what was thought in `thinking`, takes one call of a message and leaves out its
other ones, writes the name of the last call before it to each result, and refuses a text beside
what was thought before a call. It fails on functions and arguments without a description, and on a
default value that is no text of an argument with `enum` or `oneOf`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]

NO_THINKING = "low"
"""What the models are told that are not to think: they always do."""
EFFORTS = {
    "none": NO_THINKING,
    "minimal": "low",
    "xhigh": "high",
    "max": "high",
    "ultra": "high",
}
"""What the models are told in place of efforts that they do not know."""


def history(messages: Sequence[Message], *, is_continued: bool = False) -> list[Message]:
    """Return messages in which each call is one message, followed by its result.

    Results come after their calls, in the order of these. Answers without text and calls are left
    out: an empty text of `final` would end the thinking before it. With `is_continued` the last
    message is a text that goes on, whose calls are left out.
    """
    messages = _said(messages, is_continued) or messages
    made: list[Message] = []
    at = 0
    while at < len(messages):
        message = messages[at]
        at += 1
        first_result = at
        while message.get("tool_calls") and at < len(messages) and messages[at]["role"] == "tool":
            at += 1
        made += _turn(message, messages[first_result:at])
    return made


def _said(messages: Sequence[Message], is_continued: bool) -> list[Message]:
    """Return what was said or called, and the text that goes on."""
    whole = messages[:-1] if is_continued else messages
    said = [
        one
        for one in whole
        if one["role"] != "assistant" or one.get("tool_calls") or one["content"]
    ]
    if is_continued:
        said.append({name: one for name, one in messages[-1].items() if name != "tool_calls"})
    return said


def _turn(message: Message, results: Sequence[Message]) -> Iterator[Message]:
    thought = message.get("reasoning_content")
    calls = message.get("tool_calls") or ()
    if not calls:
        yield {**message, "thinking": thought} if thought else message
        return
    left = list(results)
    for number, call in enumerate(calls):
        made: dict[str, Any] = {"role": message["role"], "content": "", "tool_calls": [call]}
        if number == 0:
            made |= _before_call(thought, message["content"])
        yield made
        is_last = number == len(calls) - 1
        while left and (is_last or _is_of(left[0], call)):
            yield left.pop(0)
            if not is_last:
                break


def _before_call(thought: str | None, text: str) -> dict[str, Any]:
    """Return what stands before a call: the template takes one text of it."""
    if not thought:
        return {"content": text}
    return {"content": "", "thinking": "\n\n".join(filter(None, (thought, text)))}


def _is_of(result: Message, call: Message) -> bool:
    """Return whether a result is of a call; one without an id is of the next one."""
    named = result.get("tool_call_id")
    return named is None or call.get("id") is None or named == call["id"]


def described(tools: Sequence[Message]) -> list[Message]:
    """Return functions that a template can write, with the same meaning."""
    return [{**tool, "function": _function(tool["function"])} for tool in tools]


def _function(function: Message) -> Message:
    parameters = function.get("parameters") or {}
    made = {"description": "", **function}
    properties = parameters.get("properties")
    if isinstance(properties, Mapping):
        told = {name: _argument(one) for name, one in properties.items()}
        made["parameters"] = {**parameters, "properties": told}
    return made


def _argument(schema: Any) -> Message:
    if not isinstance(schema, Mapping):
        return {"description": ""}
    made = {"description": "", **schema}
    if not isinstance(made["description"], str):
        made["description"] = ""
    default = made.get("default")
    if not isinstance(default, str) and "default" in made and ("enum" in made or "oneOf" in made):
        made["default"] = json.dumps(default, ensure_ascii=False)
    return made
