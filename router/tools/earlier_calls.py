"""Earlier calls and their results as chat templates take them.

Some templates want the arguments of a call as an object, others join them as text. Some refuse ids
that other servers made, or leave a call out beside a text. Which form one takes is found by
rendering a small conversation. Most write no ids: there a result belongs to the call whose place
among the calls it has among the results.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

from common.errors import InvalidRequest

Messages = Sequence[Mapping[str, Any]]
_LOST = "[no result]"
_Results = dict[int, Mapping[str, Any]]
"""The results of one answer's calls, by the number of the call."""


class Arguments(Enum):
    """The form in which a template takes the arguments of earlier calls, if it takes calls."""

    OBJECTS = "objects"
    TEXTS = "texts"
    NONE = "none"


_ASKED = {"role": "user", "content": "Is it warm?"}
_CALL = {
    "id": "call_0a1b2c3d4e5f60718293_0",
    "type": "function",
    "function": {"name": "get_weather", "arguments": {"city": "Paris"}},
}
_TEXTS = ("", "Let me see.")
"""What stands beside the call: some templates show a call where there is no text alone."""
_RESULT = {"role": "tool", "content": "21 degrees", "tool_call_id": _CALL["id"]}
_TOLD = ("get_weather", "city", "Paris", "21 degrees")
_PYTHON = "{'city'"
"""How a template shows an object that it takes for a text."""


def arguments_by(render: Callable[[Messages], str]) -> Arguments:
    """Return what a template takes, which `render` renders, or refuses with `InvalidRequest`."""
    if _is_shown(render, Arguments.OBJECTS):
        return Arguments.OBJECTS
    return Arguments.TEXTS if _is_shown(render, Arguments.TEXTS) else Arguments.NONE


def _is_shown(render: Callable[[Messages], str], form: Arguments) -> bool:
    return all(_is_shown_beside(content, render, form) for content in _TEXTS)


def _is_shown_beside(content: str, render: Callable[[Messages], str], form: Arguments) -> bool:
    called = {"role": "assistant", "content": content, "tool_calls": [_CALL]}
    try:
        text = render(in_form([_ASKED, called, _RESULT], form))
    except InvalidRequest:
        return False
    return _PYTHON not in text and all(one in text for one in _TOLD)


def in_form(messages: Messages, form: Arguments) -> Messages:
    """Return messages, whose calls have objects for arguments, in the form of a template."""
    return [_with_texts(one) for one in messages] if form is Arguments.TEXTS else messages


def _with_texts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    calls = message.get("tool_calls")
    if not calls:
        return message
    return {**message, "tool_calls": [_with_text(call) for call in calls]}


def _with_text(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call["function"]
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def with_results_in_order(messages: Messages) -> list[Mapping[str, Any]]:
    """Return messages with each result after its calls, in their order.

    Clients that run calls at the same time write results as they come, or something in between, or
    lose one: before a result that came, `_LOST` stands for it. A result belongs to the last call
    before it that has its id and no result yet; where there is none, it stays where it is.
    """
    turns: list[tuple[Mapping[str, Any], _Results]] = []
    waiting: defaultdict[Any, list[tuple[_Results, int]]] = defaultdict(list)
    for message in messages:
        given = message.get("tool_call_id") if message["role"] == "tool" else None
        if waiting[given]:
            results, at = waiting[given].pop()
            results[at] = message
            continue
        results = {}
        turns.append((message, results))
        for at, call in reversed([*enumerate(_calls(message))]):
            if call.get("id") is not None:
                waiting[call["id"]].append((results, at))
    return [one for turn, results in turns for one in (turn, *_in_order(_calls(turn), results))]


def _calls(message: Mapping[str, Any]) -> Messages:
    return message.get("tool_calls") or ()


def _in_order(calls: Messages, results: _Results) -> Iterator[Mapping[str, Any]]:
    """Yield the results of an answer's calls, and what stands for those that are lost."""
    for at in range(max(results, default=-1) + 1):
        if at in results:
            yield results[at]
        elif calls[at].get("id") is not None:
            yield {"role": "tool", "content": _LOST, "tool_call_id": calls[at]["id"]}
