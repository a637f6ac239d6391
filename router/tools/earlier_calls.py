"""Earlier calls and their results as chat templates take them.

Some templates want the arguments of a call as an object, others join them as text. Some take short
ids alone, or leave a call out beside a text. Which form one takes is found by rendering a small
conversation. Most write no ids: there a result belongs to the call whose place
among the calls it has among the results.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from common.errors import InvalidRequest

Messages = Sequence[Mapping[str, Any]]
_LOST = "[no result]"


@dataclass(frozen=True, slots=True)
class CallsForm:
    """The form in which a template takes earlier calls: whether their arguments are texts, and not
    objects, and whether their ids are short."""

    has_texts: bool = False
    has_short_ids: bool = False


_FORMS = tuple(CallsForm(*one) for one in product((False, True), repeat=2))
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
"""The ids that Mistral's templates take."""

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


def form_by(render: Callable[[Messages], str]) -> CallsForm | None:
    """Return what a template takes, which `render` renders, or refuses with `InvalidRequest`.

    None: it shows earlier calls in no form.
    """
    return next((form for form in _FORMS if _is_shown(render, form)), None)


def _is_shown(render: Callable[[Messages], str], form: CallsForm) -> bool:
    return all(_is_shown_beside(content, render, form) for content in _TEXTS)


def _is_shown_beside(content: str, render: Callable[[Messages], str], form: CallsForm) -> bool:
    called = {"role": "assistant", "content": content, "tool_calls": [_CALL]}
    try:
        text = render(in_form([_ASKED, called, _RESULT], form))
    except InvalidRequest:
        return False
    return _PYTHON not in text and all(one in text for one in _TOLD)


def in_form(messages: Messages, form: CallsForm) -> Messages:
    """Return messages, whose calls have objects for arguments, in the form of a template."""
    if form == CallsForm():
        return messages
    return [_message_in_form(one, form) for one in messages]


def _message_in_form(message: Mapping[str, Any], form: CallsForm) -> Mapping[str, Any]:
    made = dict(message)
    if calls := message.get("tool_calls"):
        made["tool_calls"] = [_call_in_form(call, form) for call in calls]
    if form.has_short_ids and "tool_call_id" in message:
        made["tool_call_id"] = _short_id(message["tool_call_id"])
    return made


def _call_in_form(call: Mapping[str, Any], form: CallsForm) -> Mapping[str, Any]:
    made = dict(call)
    if form.has_texts:
        function = call["function"]
        arguments = json.dumps(function["arguments"], ensure_ascii=False)
        made["function"] = {**function, "arguments": arguments}
    if form.has_short_ids:
        made["id"] = _short_id(call.get("id"))
    return made


def _short_id(given: Any) -> str:
    """Return an id of 9 letters and digits: the same one for a call and its result."""
    if isinstance(given, str) and _SHORT_ID.fullmatch(given):
        return given
    return hashlib.sha256(str(given).encode(errors="replace")).hexdigest()[:9]


def with_results_in_order(messages: Messages) -> list[Mapping[str, Any]]:
    """Return messages with each result after its calls, in their order.

    Clients that run calls at the same time write results as they come, or something in between, or
    lose one: before a result that came, `_LOST` stands for it. A result belongs to the last call
    before it that has its id and no result yet. One without an id belongs to the first call of the
    last answer with calls that has no result of its own; if it names a function, to the first such
    call of that. Any other one stays where it is.
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
        """Take a result without an id, which gets that of its call; False: it is of none."""
        named = result.get("name")
        for at, call in enumerate(self.calls):
            if at not in self.results and named in (None, call["function"]["name"]):
                known = {} if call.get("id") is None else {"tool_call_id": call["id"]}
                self.results[at] = {**result, **known}
                return True
        return False

    def results_in_order(self) -> Iterator[Mapping[str, Any]]:
        """Yield the results, and what stands for those that are lost."""
        for at in range(max(self.results, default=-1) + 1):
            if at in self.results:
                yield self.results[at]
            elif self.calls[at].get("id") is not None:
                yield {"role": "tool", "content": _LOST, "tool_call_id": self.calls[at]["id"]}
