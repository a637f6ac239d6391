"""What a grammar was written from, so that an error names the field at fault and not the whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from common.grammar import Grammar


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaPart:
    """A JSON schema within a grammar; `source` is its field.

    With `is_lenient` what cannot be enforced of it is left out, where that is possible. A schema of
    texts that are not JSON is the expression `terminal`, and `weaker` without what may leave no
    text; '': it is JSON. `may_be_empty`: the terminal may have no text, where one must come.
    """

    schema: Mapping[str, Any]
    source: str
    is_lenient: bool
    terminal: str = ""
    weaker: str = ""
    may_be_empty: bool = False


@dataclass(frozen=True, slots=True)
class GrammarParts:
    """The grammar that a request asks for, and the schemas of its tools' arguments.

    None and () where the grammar is the only part of itself.
    """

    asked: Grammar | None = None
    schemas: tuple[SchemaPart, ...] = ()


NO_PARTS = GrammarParts()
