"""What the header of a message says: its channel, and to whom it goes.

` to=functions.NAME<|channel|>commentary json`, `<|channel|>commentary to=functions.NAME
<|constrain|>json`, or less of it, in any order. Models also write channels and types that nobody
defined, and some words more.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from router.tools.harmony.tags import (
    ANALYSIS,
    CHANNEL,
    COMMENTARY,
    CONSTRAIN,
    FINAL,
    NAMESPACE,
    ROLE,
    START,
)

MAX_HEADER_CHARS = 256
"""The longest header: a name has at most 128 characters."""

_RECIPIENT = re.compile(r"(?:^|(?<=\s))to=(\S*)")
_WORD = re.compile(r"\s*(\S+)")
_CHANNELS = (ANALYSIS, COMMENTARY, FINAL)
_TO = "to="


class Header(NamedTuple):
    """A header, whole or not. `rest` is what is neither role, channel nor recipient."""

    channel: str
    recipient: str
    rest: str

    @property
    def function(self) -> str:
        """The name of the function that the message goes to, if it goes to one."""
        return self.recipient.removeprefix(NAMESPACE)


def read_header(text: str) -> Header:
    """Return what a header says, which is the text with marks before a message."""
    before, mark, behind = text.rpartition(CHANNEL)
    channel = ""
    if mark and (word := _WORD.match(behind.replace(CONSTRAIN, " "))):
        channel, behind = word[1], behind[word.end() :]
    if before.startswith(START):
        before = before[1:].lstrip().removeprefix(ROLE)
    elif not mark and behind.startswith(START):
        behind = behind[1:].lstrip().removeprefix(ROLE)
    rest = " ".join((before, behind)) if before else behind
    rest = rest.replace(CHANNEL, " ").replace(CONSTRAIN, " ").replace(START, " ")
    found = _RECIPIENT.search(rest)
    recipient = found[1] if found else ""
    if found:
        rest = rest[: found.start()] + rest[found.end() :]
    return Header(channel, recipient, rest)


def is_cut_header(text: str) -> bool:
    """Return whether a text without a message behind it is the beginning of a header.

    Else a model has written its text without one: more than the one word that names a type.
    """
    is_begun = text.startswith(START) or CHANNEL in text or text.lstrip().startswith(_TO)
    if not is_begun:
        return f" {_TO}".startswith(text)
    return len(read_header(text).rest.split()) <= 1


def text_without_message(text: str) -> str:
    """Return what is shown of a header that no message follows: all but its role and channel.

    White space alone is nothing.
    """
    if not text.startswith(START) and CHANNEL not in text:
        return text.replace(CONSTRAIN, "") if text.strip() else ""
    header = read_header(text)
    words = [header.rest] if header.channel in _CHANNELS else [header.channel, header.rest]
    if header.recipient:
        words.append(_TO + header.recipient)
    shown = " ".join(one.strip() for one in words if one.strip())
    return shown + text[len(text.rstrip()) :] if shown else ""
