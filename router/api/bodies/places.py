"""Where a client wrote the parts of a request that was translated into a chat.

An error about a chat names a path in it, such as `messages.1.content`. The client's own request
has that part elsewhere: it may be `messages.0.content`, `input.4.output` or `system`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from common.errors import InvalidRequest

_PATH = re.compile(r"(?<![\w.'\"/])\w+(?:\.\w+)*")
"""A field or a path in the text of an error; what stands in quotes and JSON pointers are none."""


class Places:
    """Paths of a chat, and for each the path in the client's request.

    A path that is not among them has the place of the longest one that it begins with.
    """

    def __init__(self, fields: Mapping[str, str]) -> None:
        """Begin with `fields`: the names of a chat's fields, with those that the client knows."""
        self._places = dict(fields)

    def put(self, path: str, place: str) -> None:
        """Note that `path` of the chat was written at `place`."""
        self._places[path] = place

    def of(self, path: str) -> str:
        """Return where the client wrote `path`; without a place, `path` itself."""
        head, tail = path, ""
        while head:
            if head in self._places:
                return self._places[head] + tail
            head, dot, name = head.rpartition(".")
            tail = dot + name + tail
        return path

    def in_words_of_client(self, error: InvalidRequest) -> InvalidRequest:
        """Return an error about the chat with the paths of the client's request."""
        text = _PATH.sub(lambda found: self.of(found.group()), str(error))
        return type(error)(text, param=error.param and self.of(error.param))
