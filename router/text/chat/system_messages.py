"""Messages of the system, for templates that do not take them.

Some templates refuse all of them, or those beside the first one, others leave these out. Which one
a template does is found by rendering small conversations when it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from common.errors import InvalidRequest

Messages = Sequence[Mapping[str, Any]]


class Treatment(IntEnum):
    """What a template does with a message of the system; the best one last."""

    REFUSED = 0
    LEFT_OUT = 1
    RENDERED = 2


@dataclass(frozen=True, slots=True)
class SystemMessages:
    """What becomes of a first and a second message of the system, and of `later` ones among the
    others."""

    first: Treatment = Treatment.RENDERED
    second: Treatment = Treatment.RENDERED
    later: Treatment = Treatment.RENDERED

    def fitted(self, messages: Messages, *, keeps_all: bool) -> Messages:
        """Return messages that the template takes, with the same text.

        What it refuses goes into the first message; with `keeps_all` also what it leaves out. That
        is the user's, where it refuses the system's.
        """
        if self.first is Treatment.REFUSED:
            return _of_user(messages) if any(map(_is_system, messages)) else messages
        worst = Treatment.LEFT_OUT if keeps_all else Treatment.REFUSED
        num_leading = 0
        while num_leading < len(messages) and _is_system(messages[num_leading]):
            num_leading += 1
        if self.later <= worst and any(map(_is_system, messages[num_leading:])):
            return _in_one(messages)
        if self.second <= worst and num_leading > 1:
            return [*_in_one(messages[:num_leading]), *messages[num_leading:]]
        return messages


def treatment_by(render: Callable[[Messages], str]) -> SystemMessages:
    """Return what a template does, which `render` renders. It raises `InvalidRequest` to refuse."""
    first, second, asked = _message("system", "One"), _message("system", "Two"), _message("user")
    if _treatment(render, [first, asked]) is Treatment.REFUSED:
        takes_user = _treatment(render, [asked]) is not Treatment.REFUSED
        return SystemMessages(Treatment.REFUSED) if takes_user else SystemMessages()
    return SystemMessages(
        second=_treatment(render, [first, second, asked]),
        later=max(
            _treatment(render, [first, asked, second]),
            _treatment(render, [first, asked, _message("assistant"), second, asked]),
        ),
    )


def _treatment(render: Callable[[Messages], str], messages: Messages) -> Treatment:
    """Return what becomes of the messages of the system in `messages`."""
    try:
        text = render(messages)
    except InvalidRequest:
        return Treatment.REFUSED
    has_all = all(one["content"] in text for one in messages if _is_system(one))
    return Treatment.RENDERED if has_all else Treatment.LEFT_OUT


def _message(role: str, content: str = "Hi") -> Mapping[str, Any]:
    return {"role": role, "content": content}


def _is_system(message: Mapping[str, Any]) -> bool:
    return bool(message["role"] == "system")


def _of_user(messages: Messages) -> list[Mapping[str, Any]]:
    """Return `messages` with what the system says before what the user says first.

    Where neither says anything the user's message is left out, unless it is the only one.
    """
    (system, *others) = _in_one(messages)
    begins = bool(others) and others[0]["role"] == "user"
    user = others.pop(0) if begins else _message("user", "")
    text = "\n\n".join(filter(None, (system["content"], user["content"])))
    is_silent = not begins and not text
    return others if is_silent and others else [{**user, "content": text}, *others]


def _in_one(messages: Messages) -> list[Mapping[str, Any]]:
    """Return `messages` with those of the system as one, before the others."""
    texts = [message["content"] for message in messages if _is_system(message)]
    others = [message for message in messages if not _is_system(message)]
    return [_message("system", "\n\n".join(filter(None, texts))), *others]
