"""The answer as a list of items, one for each thought, text and call: of APIs that have it so.

An item begins, gets more text, and ends before the next one begins. There is one choice.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

from common.request import FinishReason
from router.api.answers.chat_and_completions import AnswerHead, WholeChoice
from router.api.bodies.client_tools import TEXT_ARGUMENT, ClientTool
from router.api.planning.planner import RequestPlan
from router.http.sse import PING
from router.text.output.choice_text import Delta
from router.text.output.usage import Usage
from router.tools.answer_parser import AnswerParser
from router.tools.parts import CallArguments, CallStart, Part, TextPart, ThinkingPart, apart
from router.tools.text_argument import TextArgument


class ItemKind(Enum):
    """The kind of an item."""

    THINKING = "thinking"
    TEXT = "text"
    CALL = "call"


@dataclass(slots=True)
class Item:
    """Item number `number` of an answer.

    `name` and `namespace` are those of a call's tool. A call of a tool that takes text has a
    `reader`, which reads it out of the arguments.
    """

    number: int
    kind: ItemKind
    name: str = ""
    namespace: str | None = None
    reader: TextArgument | None = None
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The text so far: of a call, its arguments, or its text."""
        return "".join(self.pieces)


class ItemsFormat(ABC):
    """Turns the deltas of one choice into events about items, or all of them into one object.

    With `begins_early` the first events say nothing that is known with the first token alone.
    """

    ping = PING
    begins_early = True

    def __init__(self, head: AnswerHead, plan: RequestPlan, usage: Usage) -> None:
        """Set the format up; `usage` is that of the answer so far."""
        self._head = head
        self._usage = usage
        self._parser = AnswerParser(plan.syntax)
        self._repeated = plan.shape.repeated
        self._client_tools = plan.shape.client_tools
        self._has_thought_codes = plan.shape.has_thought_codes
        self._items: list[Item] = []
        self._has_begun = False
        self._finish: FinishReason | None = None
        self._stop_reason: str | int | None = None

    def begin(self) -> bytes:
        """Return the first events of a stream, where they need no token."""
        return b"".join(self._first_events()) if self.begins_early else b""

    def events(self, index: int, deltas: Sequence[Delta]) -> bytes:
        """Return the events for these deltas; empty when they show nothing."""
        return b"".join(self._events(deltas))

    def whole(self, choices: Sequence[WholeChoice]) -> Iterator[str]:
        """Yield the JSON of the answer."""
        (choice,) = choices
        self._finish, self._stop_reason = choice.finish_reason, choice.stop_reason
        for part in self._parser.push("".join(choice.text), is_last=True):
            self._take(part)
        yield self._answer()

    def end_of_stream(self) -> bytes:
        """Return the last events."""
        return b"".join(self._end())

    def _events(self, deltas: Sequence[Delta]) -> Iterator[bytes]:
        yield from self._first_events()
        for delta in deltas:
            is_last = delta.details.finish_reason is not None
            for part in self._parser.push(delta.text, is_last=is_last):
                earlier = self._items[-1] if self._items else None
                item, more = self._take(part)
                if item is not earlier:
                    if earlier:
                        yield from self._close(earlier)
                    yield from self._open_item(item)
                if more:
                    yield self._more(item, more)
            if delta.details.finish_reason is not None:
                self._finish = delta.details.finish_reason
                self._stop_reason = delta.details.stop_reason
                if self._items:
                    yield from self._close(self._items[-1])

    def _first_events(self) -> Iterator[bytes]:
        """Yield the first events, once."""
        if not self._has_begun:
            self._has_begun = True
            yield from self._begin()

    def _take(self, part: Part) -> tuple[Item, str]:
        """Add a part to its item, which may be a new one; return the item and the part's text."""
        match part:
            case CallStart(_, name):
                tool = self._client_tools.get(name, ClientTool(name))
                reader = TextArgument(TEXT_ARGUMENT) if tool.is_custom else None
                number = len(self._items)
                self._items.append(Item(number, ItemKind.CALL, tool.name, tool.namespace, reader))
                return self._items[-1], ""
            case ThinkingPart(text, is_apart):
                item = self._item_of(ItemKind.THINKING)
                text = apart(text, is_apart and bool(item.pieces))
            case TextPart(text, is_apart):
                item = self._item_of(ItemKind.TEXT)
                text = apart(text, is_apart and bool(item.pieces))
            case CallArguments(_, text):
                item = self._items[-1]
                text = item.reader.push(text) if item.reader else text
        item.pieces.append(text)
        return item, text

    def _item_of(self, kind: ItemKind) -> Item:
        if not self._items or self._items[-1].kind is not kind:
            self._items.append(Item(len(self._items), kind))
        return self._items[-1]

    @abstractmethod
    def _begin(self) -> Iterator[bytes]:
        """Yield the first events of a stream."""

    @abstractmethod
    def _open_item(self, item: Item) -> Iterator[bytes]: ...

    @abstractmethod
    def _more(self, item: Item, text: str) -> bytes: ...

    @abstractmethod
    def _close(self, item: Item) -> Iterator[bytes]: ...

    @abstractmethod
    def _end(self) -> Iterator[bytes]:
        """Yield the last events of a stream, when all tokens are counted."""

    @abstractmethod
    def _answer(self) -> str:
        """Return the JSON of the whole answer."""
