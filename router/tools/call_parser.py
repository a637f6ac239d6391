"""An answer's text to text and calls, whatever pieces it comes in.

Text is held back only while it may begin a call, and white space while a call may follow it: there
it is left out. A call is reported with its name, and its arguments as they come. What looks like a
call but is none is text, and so is a call of a function that may not be called. An answer that is
cut off before the arguments of a call ends before it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from enum import Enum

from router.tools.call_format import ArgumentsReader, CallFormat
from router.tools.call_head import CallHead, MatchedHead
from router.tools.parts import CallArguments, CallStart, Part, TextPart
from router.tools.tagged.kinds import ArgumentKinds
from router.tools.thinking import LeadingSpace, num_maybe_tag

_PIECES = re.compile(r"\}|[^}\s]+")
"""The pieces of what ends a call, between which white space may stand."""


class _State(Enum):
    TEXT = "text, in which a call may begin"
    HEAD = "after a trigger"
    ARGUMENTS = "inside the arguments"
    TAIL = "after the arguments"
    NEXT = "where another call, or the end of all, follows a call"


class CallParser:
    """Parses one answer in one format."""

    def __init__(
        self,
        form: CallFormat,
        names: Collection[str],
        kinds: Mapping[str, ArgumentKinds],
        *,
        is_alone: bool,
    ) -> None:
        """Begin an answer that may call the functions `names`, whose arguments have `kinds`.

        `is_alone`: it holds calls from its beginning on, or none.
        """
        self._kinds = kinds
        self._names = frozenset(names)
        self._form = form
        self._is_alone = is_alone or not form.trigger
        self._state = _State.TEXT
        self._space = LeadingSpace()
        self._held = ""
        """Text that is not reported yet; in TEXT and HEAD after `_space`, without white space."""
        self._is_text = False  # where calls stand alone, none can follow text
        self._parts: list[Part] = []
        self._head = CallHead(form, form.opening)
        self._arguments: ArgumentsReader = form.reader(ArgumentKinds())
        self._num_in_head = 0
        self._tail: list[str] = []
        self.num_calls = 0

    def push(self, text: str) -> list[Part]:
        """Add text; return the parts that are certain now."""
        self._held += text
        while self._held and self._step():
            pass
        return self._taken()

    @property
    def is_in_call(self) -> bool:
        """Whether a call has begun whose arguments are not whole."""
        return self._state is _State.HEAD or self.is_in_arguments

    @property
    def is_in_arguments(self) -> bool:
        """Whether the arguments of a call have begun and are not whole."""
        return self._state is _State.ARGUMENTS

    def flush(self) -> list[Part]:
        """End the answer; return what was held. A call that is not whole stays as it is."""
        held, self._held = self._space.take() + self._held, ""
        # White space after the last call is no answer.
        if self._state is _State.TEXT and (held.strip() or not self.num_calls):
            self._add_text(held)
        return self._taken()

    def _step(self) -> bool:
        """Take something off the held text; return False where more text must come first."""
        match self._state:
            case _State.TEXT:
                return self._find_call()
            case _State.HEAD:
                return self._take_head()
            case _State.ARGUMENTS:
                return self._take_arguments()
            case _State.TAIL:
                return self._take_tail()
            case _State.NEXT:
                return self._take_next()

    def _find_call(self) -> bool:
        trigger, held = self._form.trigger, self._space.push(self._held)
        before, is_call, num_maybe = held, False, 0
        if self.num_calls < self._form.most_calls and not self._is_text:
            if self._is_alone:
                is_call = bool(held) and held.startswith(trigger)
                self._is_text = not is_call and not trigger.startswith(held)
                before = held if self._is_text else ""
            else:
                before, found, _ = held.partition(trigger)
                is_call = bool(found)
                num_maybe = 0 if is_call else num_maybe_tag(held, trigger)
        text = before[: len(before) - num_maybe].rstrip()
        self._add_text(text)
        self._held = self._space.push(held[len(text) :])
        if is_call:
            self._begin_head(self._form.opening, len(trigger))
        return is_call

    def _begin_head(self, opening: str, num_before: int) -> None:
        """Match a head behind the first characters that are held."""
        self._state = _State.HEAD
        self._head = CallHead(self._form, opening)
        self._num_in_head = num_before

    def _take_head(self) -> bool:
        for at in range(self._num_in_head, len(self._held)):
            found = self._head.push(self._held[at])
            if isinstance(found, MatchedHead) and found.name in self._names:
                self._parts.append(CallStart(self.num_calls, found.name))
                self.num_calls += 1
                self._space.take()
                self._begin(_State.ARGUMENTS, at + 1 - found.num_first)
                kinds = self._kinds.get(found.name, ArgumentKinds())
                self._arguments = self._form.reader(kinds)
                return True
            if found is not True:
                self._is_text = self._is_alone
                self._add_text(self._held[:1])
                self._begin(_State.TEXT, 1)
                return True
        self._num_in_head = len(self._held)
        return False

    def _take_arguments(self) -> bool:
        text, end = self._arguments.take(self._held)
        if text:
            self._parts.append(CallArguments(self.num_calls - 1, text))
        is_over = self._arguments.is_over
        self._begin(_State.ARGUMENTS, end)
        if is_over:
            self._tail = _PIECES.findall(self._form.end)
            self._state = _State.TAIL if self._tail else self._behind_call()
        return is_over

    def _behind_call(self) -> _State:
        return _State.NEXT if self._form.following else _State.TEXT

    def _take_tail(self) -> bool:
        self._held = self._held.lstrip()
        wanted = self._tail[0]
        if self._held.startswith(wanted):
            del self._tail[0]
            self._held = self._held[len(wanted) :]
        elif wanted.startswith(self._held):
            return False
        else:
            self._tail.clear()
        if not self._tail:
            self._state = self._behind_call()
        return True

    def _take_next(self) -> bool:
        self._held = self._held.lstrip()
        closing = self._form.closing.strip()
        if closing and self._held.startswith(closing):
            self._begin(_State.TEXT, len(closing))
        elif not self._held or closing.startswith(self._held):
            return False
        elif self.num_calls < self._form.most_calls:
            self._begin_head(self._form.following, 0)
        else:
            self._state = _State.TEXT
        return True

    def _begin(self, state: _State, at: int) -> None:
        self._state = state
        self._held = self._held[at:]

    def _add_text(self, text: str) -> None:
        """Report text, if there is any, with the white space before it."""
        if text:
            self._parts.append(TextPart(self._space.take() + text))

    def _taken(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts
