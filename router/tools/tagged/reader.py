"""Arguments between tags to the JSON of an object, whatever pieces they come in."""

from __future__ import annotations

import json
import re
from enum import Enum

from router.tools.json_extent import JsonExtent
from router.tools.tagged.kinds import ArgumentKinds
from router.tools.tagged.tags import Tags, container_brackets, may_become_scalar, scalar_pattern
from router.tools.thinking import num_maybe_tag

MAX_KEY_CHARS = 256
"""A longer name that the schema does not have ends the arguments: a name is held until it is
whole."""


class _State(Enum):
    NEXT = "an argument, or the end, may come"
    KEY = "inside a name"
    FIRST = "before what tells the kind of a value"
    TEXT = "inside a text"
    CONTAINER = "inside a list or an object"
    END = "behind a list or an object"


class TaggedArguments:
    """Reads the arguments of one call. Their JSON comes as they do, and is whole at their end."""

    def __init__(self, tags: Tags, kinds: ArgumentKinds) -> None:
        """Begin before the first argument, or before what ends the call."""
        self._tags = tags
        self._kinds = kinds
        self._most_key_chars = max([MAX_KEY_CHARS, *map(len, kinds.named)])
        # Of names with the tag that ends a name in them, the schema tells where they end.
        with_tag = (name for name in kinds.named if tags.after_key in name)
        self._keys_with_tag = sorted(with_tag, key=len)
        self._state = _State.NEXT
        self._has_any = False
        self._of_value: frozenset[str] = frozenset()
        self._extent = JsonExtent()
        self.is_over = False

    def take(self, text: str) -> tuple[str, int]:
        """Return the JSON that is certain now, and how many characters of `text` it took.

        What it did not take comes again, with more behind it.
        """
        pieces: list[str] = []
        at = 0
        while not self.is_over:
            taken = self._step(text[at:], pieces)
            if taken is None:
                break
            at += taken
        return "".join(pieces), at

    def _step(self, text: str, pieces: list[str]) -> int | None:
        """Take something; return how many characters, or None where more must come first."""
        match self._state:
            case _State.NEXT:
                return self._next(text, pieces)
            case _State.KEY:
                return self._key(text, pieces)
            case _State.FIRST:
                return self._first(text, pieces)
            case _State.TEXT:
                return self._text(text, pieces)
            case _State.CONTAINER:
                return self._container(text, pieces)
            case _State.END:
                return self._end(text, pieces)

    def _next(self, text: str, pieces: list[str]) -> int | None:
        bare = text.lstrip()
        num_space, before = len(text) - len(bare), self._tags.before_key
        if bare.startswith(before):
            self._state = _State.KEY
            return num_space + len(before)
        if before.startswith(bare):
            return None
        self._finish(pieces)
        return num_space

    def _finish(self, pieces: list[str]) -> None:
        pieces.append("}" if self._has_any else "{}")
        self.is_over = True

    def _key(self, text: str, pieces: list[str]) -> int | None:
        name, after, _ = text.partition(self._tags.after_key)
        for key in self._keys_with_tag:
            if text.startswith(key + self._tags.after_key):
                name = key
            elif (key + self._tags.after_key).startswith(text):
                return None
        num_maybe = 0 if after else num_maybe_tag(name, self._tags.after_key)
        if len(name) - num_maybe > self._most_key_chars:
            self._finish(pieces)
            return 0
        if not after:
            return None
        pieces.append(f"{', ' if self._has_any else '{'}{_quoted(name)}: ")
        self._has_any = True
        self._of_value = self._kinds.of(name)
        self._state = _State.FIRST
        return len(name) + len(after)

    def _first(self, text: str, pieces: list[str]) -> int | None:
        value, end, _ = text.partition(self._tags.end)
        if end:
            scalar = scalar_pattern(self._of_value)
            if scalar and re.fullmatch(scalar, value):
                pieces.append(value)
                self._state = _State.NEXT
                return len(value) + len(end)
        num_held = 0 if end else num_maybe_tag(value, self._tags.end)
        begun = value[: len(value) - num_held]
        if begun and begun[0] in container_brackets(self._of_value):
            self._extent = JsonExtent()
            self._state = _State.CONTAINER
            return 0
        if not end and may_become_scalar(begun, self._of_value):
            return None
        if not end and not begun:
            return None
        pieces.append('"')
        self._state = _State.TEXT
        return 0

    def _text(self, text: str, pieces: list[str]) -> int | None:
        value, end, _ = text.partition(self._tags.end)
        num_held = 0 if end else num_maybe_tag(value, self._tags.end)
        value = value[: len(value) - num_held]
        pieces.append(_quoted(value)[1:-1])
        if not end:
            return len(value) or None
        pieces.append('"')
        self._state = _State.NEXT
        return len(value) + len(end)

    def _container(self, text: str, pieces: list[str]) -> int | None:
        taken = self._extent.end_in(text)
        pieces.append(text[:taken])
        if self._extent.is_over:
            self._state = _State.END
        return taken or None

    def _end(self, text: str, pieces: list[str]) -> int | None:
        end = self._tags.end
        if text.startswith(end):
            self._state = _State.NEXT
            return len(end)
        if end.startswith(text):
            return None
        self._finish(pieces)
        return 0


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
