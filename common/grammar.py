"""A grammar that an answer must follow, as text, as it travels with a request."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from common.errors import InvalidRequest

MAX_GRAMMAR_BYTES = 256 << 10
"""Most bytes of a grammar in UTF-8: 256 tools of 1 KiB each, without what describes them."""


class GrammarKind(Enum):
    """What a grammar's text is: a JSON schema, a regular expression, or a Lark grammar."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Grammar:
    """The whole output, without the token that ends it, is a text that the grammar describes.

    Lark is that of llguidance, `start` its first rule. `source` is the field of the body that asked
    for it; it names the field of an error and does not travel to nodes. Raises `InvalidRequest` for
    a text that is empty or longer than `MAX_GRAMMAR_BYTES`.
    """

    kind: GrammarKind
    text: str
    source: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        try:
            size = len(self.text.encode())
        except UnicodeEncodeError:
            raise InvalidRequest(
                f"the {self.kind.value} is not valid Unicode: it holds half of a surrogate pair",
                param=self.source or None,
            ) from None
        if not 0 < size <= MAX_GRAMMAR_BYTES:
            raise InvalidRequest(
                f"the {self.kind.value} has {size} bytes: wanted 1 to {MAX_GRAMMAR_BYTES}",
                param=self.source or None,
            )
