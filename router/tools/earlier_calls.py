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
    before it that has its id and no result yet. One without an id belongs to the first call of the
    last answer with calls that has no result of its own, and its name if it has one. Any other one
    stays where it is.
    """
    turns: list[_Turn] = []
    waiting: defaultdict[Any, list[tuple[_Turn, int]]] = defaultdict(list)
    last_called: _Turn | None = None
    for message in messages:
        is_result, given = message["role"] == "tool", message.get("tool_call_id")
        if is_result and waiting[given]:
            turn, at = waiting[given].pop()
            turn.results[at] = message
            continue
        turn = _Turn(message, called=last_called if is_result and given is None else None)
        turns.append(turn)
        if turn.calls:
            last_called = turn
        for at, call in reversed([*enumerate(turn.calls)]):
            if call.get("id") is not None:
                waiting[call["id"]].append((turn, at))
    staying = [one for one in turns if one.called is None or not one.called.take(one.message)]
    return [message for one in staying for message in (one.message, *one.results_in_order())]


class _Turn:
    """A message, and the results of its calls by the number of the call.

    `called`: of a result without an id the last answer with calls.
    """

    def __init__(self, message: Mapping[str, Any], called: _Turn | None) -> None:
        self.message, self.called = message, called
        self.calls: Messages = message.get("tool_calls") or ()
        self.results: dict[int, Mapping[str, Any]] = {}

    def take(self, result: Mapping[str, Any]) -> bool:
        """Take a result without an id, which gets that of its call; False: no call is left."""
        at = next((n for n in range(len(self.calls)) if self._waits(n, result.get("name"))), None)
        if at is None:
            return False
        call_id = self.calls[at].get("id")
        self.results[at] = result if call_id is None else {**result, "tool_call_id": call_id}
        return True

    def _waits(self, number: int, name: str | None) -> bool:
        """Return whether a call has no result yet, and this name of a result, if there is one."""
        is_named = name is None or self.calls[number]["function"]["name"] == name
        return is_named and number not in self.results

    def results_in_order(self) -> Iterator[Mapping[str, Any]]:
        """Yield the results, and what stands for those that are lost."""
        for at in range(max(self.results, default=-1) + 1):
            if at in self.results:
                yield self.results[at]
            elif self.calls[at].get("id") is not None:
                yield {"role": "tool", "content": _LOST, "tool_call_id": self.calls[at]["id"]}
