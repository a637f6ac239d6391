"""Lark expressions of the texts that a schema takes, as they are and not as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from grammars.dates import DATE
from grammars.look_around import without_look_around
from grammars.texts import ascii_regex
from router.tools.tagged.tags import container_brackets, scalar_pattern

ANY = r"(.|\n)*"
_FORMATS = {
    "date": f"{DATE}$",
    "date-time": f"{DATE}[Tt](?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\\.[0-9]+)?"
    "(?:[Zz]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])$",
    "time": "^(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\\.[0-9]+)?"
    "(?:[Zz]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])$",
    "uuid": "^[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}$",
}
"""The patterns of the formats that are enforced."""
_MOST_CHARS = 100_000
"""A larger bound of the length of a text is none."""
_EDGES = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|[()|]|.", re.DOTALL)


def without(text: str) -> str:
    """Return the expression of all texts in which `text` is not."""
    return f"~/{ANY}{pattern_of(text)}{ANY}/"


def pattern_of(text: str) -> str:
    """Return the pattern of a text between slashes."""
    # `re.escape` puts a backslash before a line break, which a Lark pattern may not hold.
    return re.escape(text).replace("/", r"\/").replace("\\\n", r"\n")


def text_expressions(
    schema: Mapping[str, Any], end: str, others: frozenset[str]
) -> tuple[str, str]:
    """Return the expression of the texts of a schema, and the same without what may leave none:
    its pattern, and values and lengths that do not go together, or have `end` in them.

    `end` is in no text. `others` are the kinds of values that may stand there instead of a text: no
    text is the JSON of a scalar of these, or begins as a list or an object of these.
    """
    part = dict(schema)
    without_look_around(part)
    if part.get("format") in _FORMATS and "pattern" not in part:
        part["pattern"] = _FORMATS[part["format"]]
    values, (least, most) = _values(part), _lengths(part)
    terms = [_one_of(values), _within(least, most)]
    writable = None if values is None else [value for value in values if end not in value]
    fitting = None if writable is None else [
        value for value in writable if least <= len(value) <= (len(value) if most is None else most)
    ]  # fmt: skip
    has_lengths = fitting != [] and (most is None or least <= most)
    weaker_terms = [_one_of(values) if writable else "", terms[1] if has_lengths else ""]
    pattern = part.get("pattern")
    if isinstance(pattern, str):
        terms.append(_searched(pattern))
    excluded = [without(end)]
    if scalar := scalar_pattern(others):
        excluded.append(f"~/{scalar}/")
    if brackets := container_brackets(others):
        excluded.append(rf"~/[{re.escape(brackets)}]{ANY}/")
    return _all_of(terms, excluded), _all_of(weaker_terms, excluded)


def may_be_empty(schema: Mapping[str, Any]) -> bool:
    """Return whether a schema of texts may have none: two of its keywords may not go together, or
    all that it takes may have the tag that ends a text in them."""
    return len(schema) > 1 or ("format" not in schema and "/" in str(schema.get("pattern", "/")))


def _all_of(terms: Sequence[str], excluded: Sequence[str]) -> str:
    return " & ".join([*([term for term in terms if term] or [f"/{ANY}/"]), *excluded])


def _values(part: Mapping[str, Any]) -> list[str] | None:
    """Return the texts that a schema lists; None: it lists none."""
    values = [part["const"]] if "const" in part else part.get("enum")
    return [one for one in values if isinstance(one, str)] if isinstance(values, list) else None


def _one_of(values: Sequence[str] | None) -> str:
    if values is None:
        return ""
    texts = [f"/{pattern_of(value)}/" if value else '""' for value in values]
    return f"({' | '.join(texts)})"


def _lengths(part: Mapping[str, Any]) -> tuple[int, int | None]:
    return _length(part, "minLength") or 0, _length(part, "maxLength")


def _within(least: int, most: int | None) -> str:
    if not least and most is None:
        return ""
    if most is not None and least > most:
        return rf"/(.|\n){{{least}}}/ & /(.|\n){{0,{most}}}/"
    return rf"/(.|\n){{{least},{'' if most is None else most}}}/"


def _length(part: Mapping[str, Any], keyword: str) -> int | None:
    value = part.get(keyword)
    if isinstance(value, int | float) and 0 <= value <= _MOST_CHARS:
        return int(value)
    return None


def _searched(pattern: str) -> str:
    """Return the expression of texts in which a pattern is found, as JSON schemas mean it."""
    found = (f"/{_whole(one)}/" for one in _alternatives(pattern))
    return f"({' | '.join(found)})"


def _whole(pattern: str) -> str:
    before = behind = ANY
    if pattern.startswith("^"):
        before, pattern = "", pattern[1:]
    if re.search(r"(?<!\\)(?:\\\\)*\$\Z", pattern):
        behind, pattern = "", pattern[:-1]
    return f"{before}({ascii_regex(pattern)}){behind}"


def _alternatives(pattern: str) -> Iterator[str]:
    """Yield the alternatives of a pattern, cut where no bracket is open."""
    begin = depth = 0
    for piece in _EDGES.finditer(pattern):
        depth += {"(": 1, ")": -1}.get(piece[0], 0)
        if piece[0] == "|" and not depth:
            yield pattern[begin : piece.start()]
            begin = piece.end()
    yield pattern[begin:]


def literal(text: str) -> str:
    """Return the expression of a text; '' for none."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f") if text else ""
