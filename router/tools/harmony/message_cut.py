"""An answer's text cut into messages, whatever pieces it comes in, with nothing left out.

A message is a header, `MESSAGE`, and a text up to the next tag that ends it. It is

- a call, where it goes to a function that may be called, on whatever channel, and its text is a
  JSON object or nothing;
- thinking, where it is on the channel `analysis`;
- text for the user in any other case: on `final`, on `commentary` (which models write between
  calls), on channels that nobody defined, and to recipients that are none.

A text where a header should stand, that no message follows, is text for the user too.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from enum import Enum
from typing import NamedTuple

from router.tools.harmony.header import (
    MAX_HEADER_CHARS,
    Header,
    is_cut_header,
    read_header,
    text_without_message,
)
from router.tools.harmony.tags import (
    ANALYSIS,
    CALL_TAG,
    CHANNEL,
    CHANNEL_TAG,
    CONSTRAIN,
    END_TAG,
    MARKS,
    MESSAGE,
    MESSAGE_TAG,
    RETURN_TAG,
    ROLE,
    START,
    START_TAG,
    marked,
)
from router.tools.thinking import LeadingSpace

_TAGS = re.compile(f"[{''.join(MARKS.values())}]")
_THOUGHT_HEADER = f"{CHANNEL_TAG}{ANALYSIS}{MESSAGE_TAG}"
_MESSAGE_ENDS = (END_TAG, CALL_TAG, RETURN_TAG)


class Place(Enum):
    """Where in a message an answer begins: it is not of this format; before a message; in its
    header, behind the role; in what is thought; or in a text for the user."""

    NONE = "none"
    BETWEEN = "between"
    HEADER = "header"
    THOUGHT = "thought"
    TEXT = "text"


class PieceKind(Enum):
    """What a piece of an answer is; the first one is of no message's text."""

    FRAME = "frame"
    THOUGHT = "thought"
    TEXT = "text"
    CALL = "call"


class Piece(NamedTuple):
    """A piece of an answer: `raw` as it is written, and `text` as it is meant.

    `begins` a message's text. `function` is the one that a call goes to.
    """

    kind: PieceKind
    raw: str
    text: str = ""
    begins: bool = False
    function: str = ""


class _State(Enum):
    HEADER = "before a message, or in its header"
    CALL = "in a message to a function, before its first character"
    BODY = "in the text of a message"


def place_behind(prompt: str) -> Place:
    """Return where an answer behind the text of `prompt` begins."""
    tail = prompt.rpartition(START_TAG)[2]
    header, message, body = tail.partition(MESSAGE_TAG)
    if not message:
        return Place.HEADER
    if any(end in body for end in _MESSAGE_ENDS):
        return Place.BETWEEN
    channel = read_header(marked(f"{START_TAG}{header}")).channel
    return Place.THOUGHT if channel == ANALYSIS else Place.TEXT


def text_before_thought(place: Place) -> str | None:
    """Return what an answer at `place` writes before it thinks; None: it has begun to answer."""
    match place:
        case Place.HEADER:
            return _THOUGHT_HEADER
        case Place.BETWEEN:
            return f"{START_TAG}{ROLE}{_THOUGHT_HEADER}"
        case Place.THOUGHT:
            return ""
        case _:
            return None


class MessageCut:
    """Cuts one answer. It holds back less than a header, and white space before a call's text."""

    def __init__(self, place: Place, functions: Collection[str]) -> None:
        """Begin an answer at `place` that may call `functions`."""
        self._functions = frozenset(functions)
        self._state = _State.BODY if place in (Place.THOUGHT, Place.TEXT) else _State.HEADER
        self._kind = PieceKind.THOUGHT if place is Place.THOUGHT else PieceKind.TEXT
        self._begins = True
        self._function = ""
        self._held = ""
        """The header so far, in HEADER."""
        self._space = LeadingSpace()

    @property
    def kind(self) -> PieceKind | None:
        """What the text is that comes next; None where that is not known yet."""
        return self._kind if self._state is _State.BODY else None

    @property
    def is_before_call(self) -> bool:
        """Whether a call has begun whose text has not."""
        return self._state is _State.CALL

    def push(self, text: str, *, is_last: bool = False) -> list[Piece]:
        """Add text; return the pieces that are certain now. With `is_last` nothing is held."""
        pieces: list[Piece] = []
        at = 0
        while at < len(text):
            found = _TAGS.search(text, at)
            end = found.start() if found else len(text)
            if end > at:
                self._take_text(text[at:end], pieces)
            if found:
                self._take_tag(found[0], pieces)
                end += 1
            at = end
        if is_last:
            self._end(pieces)
        return [one for one in pieces if one.raw or one.begins]

    def _take_text(self, text: str, pieces: list[Piece]) -> None:
        if self._state is _State.HEADER:
            room = MAX_HEADER_CHARS + 1 - len(self._held)
            self._held += text[:room]
            text = text[room:]
            if len(self._held) > MAX_HEADER_CHARS:
                self._give_up(pieces)
            if not text:
                return
        if self._state is _State.CALL:
            text = self._space.push(text)
            if not text:
                return
            space, self._state = self._space.take(), _State.BODY
            if text.startswith("{"):
                pieces.append(Piece(PieceKind.FRAME, space))
                self._kind = PieceKind.CALL
            else:
                text = space + text
        pieces.append(Piece(self._kind, text, text, self._begins, self._function_of_call()))
        self._begins = False

    def _function_of_call(self) -> str:
        return self._function if self._kind is PieceKind.CALL else ""

    def _take_tag(self, tag: str, pieces: list[Piece]) -> None:
        if self._state is _State.HEADER:
            self._take_tag_of_header(tag, pieces)
        elif tag in (MESSAGE, CONSTRAIN):
            pieces.append(Piece(PieceKind.FRAME, self._space.take() + tag))
        else:
            if self._state is _State.CALL:
                raw = self._space.take()
                pieces.append(Piece(PieceKind.CALL, raw, "", True, self._function))
            self._begin_header(tag, pieces)

    def _take_tag_of_header(self, tag: str, pieces: list[Piece]) -> None:
        if tag in (CHANNEL, CONSTRAIN):
            self._held += tag
            if len(self._held) > MAX_HEADER_CHARS:
                self._give_up(pieces)
        elif tag == MESSAGE:
            pieces.append(Piece(PieceKind.FRAME, self._held + tag))
            self._open(read_header(self._held))
        else:
            self._show_held(pieces)
            self._begin_header(tag, pieces)

    def _begin_header(self, tag: str, pieces: list[Piece]) -> None:
        """Take the tag that ends a text, and may begin a header."""
        self._state = _State.HEADER
        is_of_header = tag in (START, CHANNEL)
        self._held = tag if is_of_header else ""
        if not is_of_header:
            pieces.append(Piece(PieceKind.FRAME, tag))

    def _open(self, header: Header) -> None:
        """Begin the text of a message."""
        self._kind = PieceKind.THOUGHT if header.channel == ANALYSIS else PieceKind.TEXT
        self._function = header.function
        is_call = self._function in self._functions
        self._state = _State.CALL if is_call else _State.BODY
        self._begins, self._held = True, ""

    def _give_up(self, pieces: list[Piece]) -> None:
        """Begin the text of a message with what is held, which is too long for a header."""
        channel = read_header(self._held).channel
        self._show_held(pieces)
        self._kind = PieceKind.THOUGHT if channel == ANALYSIS else PieceKind.TEXT
        self._state = _State.BODY

    def _show_held(self, pieces: list[Piece]) -> None:
        """Show what is held, which is no header, as the text of a message."""
        raw, self._held = self._held, ""
        text = text_without_message(raw)
        is_thought = read_header(raw).channel == ANALYSIS
        kind = PieceKind.THOUGHT if is_thought else PieceKind.TEXT
        pieces.append(Piece(kind if text else PieceKind.FRAME, raw, text, bool(text)))
        self._begins = not text

    def _end(self, pieces: list[Piece]) -> None:
        if self._state is _State.HEADER and not is_cut_header(self._held):
            self._show_held(pieces)
        pieces.append(Piece(PieceKind.FRAME, self._space.take() + self._held))
        self._held = ""
