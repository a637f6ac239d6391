"""Messages for templates in which the user and the assistant take turns, and the user begins.

Such templates refuse two messages of one role in a row; others, a conversation without a user. What
a template refuses is found by rendering small conversations when it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common.errors import InvalidRequest

Messages = Sequence[Mapping[str, Any]]

_USER = {"role": "user", "content": "Hi"}
_ASSISTANT = {"role": "assistant", "content": "Hello"}
_SILENT = {"role": "user", "content": ""}
_SYSTEM = {"role": "system", "content": "Be brief."}
_JOINED = ("content", "reasoning_content")


@dataclass(frozen=True, slots=True)
class TurnTaking:
    """What a template refuses: two messages in a row of the roles `joined`, an assistant that
    begins, messages of the system alone, and any others of which none is the user's."""

    joined: frozenset[str] = frozenset()
    user_begins: bool = False
    answers_system: bool = True
    needs_user: bool = False

    def fitted(self, messages: Messages) -> Messages:
        """Return messages that the template takes, with the same text.

        What it refuses in a row is one message. Where the user is missing, before an assistant that
        begins or behind the system, a message of the user says nothing. Calls and their results
        stay as they are.
        """
        fitted: list[Mapping[str, Any]] = []
        for message in messages:
            if fitted and self._is_one(fitted[-1], message):
                fitted[-1] = _in_one(fitted[-1], message)
            else:
                fitted.append(message)
        roles = [one["role"] for one in fitted]
        first = next((at for at, role in enumerate(roles) if role != "system"), len(roles))
        if self._lacks_user(roles, roles[first:]):
            fitted.insert(first, _SILENT)
        return fitted

    def _lacks_user(self, roles: Sequence[str], behind_system: Sequence[str]) -> bool:
        if not behind_system:
            return not self.answers_system
        if self.user_begins and behind_system[0] == "assistant":
            return True
        return self.needs_user and "user" not in roles

    def _is_one(self, message: Mapping[str, Any], following: Mapping[str, Any]) -> bool:
        is_text = "tool_calls" not in message and "tool_calls" not in following
        return message["role"] == following["role"] and message["role"] in self.joined and is_text


def turns_by(render: Callable[[Messages], str]) -> TurnTaking:
    """Return what a template refuses, which `render` renders, or refuses by `InvalidRequest`."""

    def takes(*messages: Mapping[str, Any]) -> bool:
        try:
            render(messages)
        except InvalidRequest:
            return False
        return True

    if not takes(_USER, _ASSISTANT, _USER):
        return TurnTaking()  # nothing is known of a template that takes no conversation
    joined = set()
    if not takes(_USER, _USER):
        joined.add("user")
    if not takes(_USER, _ASSISTANT, _ASSISTANT, _USER):
        joined.add("assistant")
    user_begins = not takes(_ASSISTANT, _USER) and takes(_SILENT, _ASSISTANT, _USER)
    answers_system = takes(_SYSTEM) or not takes(_SYSTEM, _SILENT)
    # Others take any message behind the system's.
    needs_user = not (user_begins or takes(_SYSTEM, _ASSISTANT))
    needs_user = needs_user and takes(_SYSTEM, _SILENT, _ASSISTANT)
    return TurnTaking(frozenset(joined), user_begins, answers_system, needs_user)


def _in_one(message: Mapping[str, Any], following: Mapping[str, Any]) -> Mapping[str, Any]:
    texts = {
        name: "\n\n".join(filter(None, (message.get(name), following.get(name))))
        for name in _JOINED
        if name in message or name in following
    }
    return {**message, **texts}
