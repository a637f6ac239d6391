"""Keywords of JSON schemas whose value asks for nothing, or for what another keyword says.

llguidance refuses the keywords that it does not have, whatever they ask for. Writers of schemas
write many of them always: `uniqueItems: false`, or `propertyNames: {"type": "string"}`. PHP writes
an object without fields as an empty list, such as the properties of a tool without parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from grammars.places import LISTED_PARTS, NAMED_PARTS, SINGLE_PARTS

_ANNOTATIONS = frozenset(
    (
        *("title", "description", "default", "examples", "example", "deprecated", "readOnly"),
        *("writeOnly", "$comment", "$id", "$anchor", "$schema", "$defs", "definitions"),
        *("contentEncoding", "contentMediaType", "contentSchema"),
    )
)
_DRAFTS = frozenset(
    (
        *(f"http://json-schema.org/draft-0{number}/schema" for number in (4, 6, 7)),
        *(f"https://json-schema.org/draft/{year}/schema" for year in ("2019-09", "2020-12")),
    )
)
"""The meta-schemas that llguidance knows; it would fetch another one."""
_FORMATS = frozenset(
    (
        *("date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uri"),
        *("uuid", "idn-email", "idn-hostname", "uri-reference", "iri", "iri-reference"),
        *("uri-template", "json-pointer", "relative-json-pointer", "regex"),
    )
)
"""The formats of JSON Schema. Others, such as int64 or password, are notes for people."""
_OBJECTS = frozenset(
    (
        *(*NAMED_PARTS, *SINGLE_PARTS, "dependentRequired", "dependencies", "propertyNames"),
        *("unevaluatedProperties", "unevaluatedItems", "contains"),
    )
) - {"items"}
"""Keywords whose value is an object, or may be one, and never a list."""
_NOTES = ("title", "description", "$comment")
"""Texts for people and models: most of what a tool's schema is, and nothing of what it takes."""
_SIZES = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")


def fill_empty_lists(part: dict[str, Any]) -> None:
    """Put an object in the place of each empty list where one is wanted, in one part of a schema.

    The lists and objects that it has are replaced, not changed.
    """
    for keyword, value in part.items():
        if keyword in _OBJECTS and value == []:
            part[keyword] = {}
        elif keyword in NAMED_PARTS and isinstance(value, Mapping):
            part[keyword] = {name: {} if one == [] else one for name, one in value.items()}
        elif keyword in LISTED_PARTS and isinstance(value, list):
            part[keyword] = [{} if one == [] else one for one in value]


def drop_nothings(part: dict[str, Any]) -> None:
    """Take such keywords out of one part of a schema, the parts in it not included."""
    fill_empty_lists(part)
    for keyword, is_nothing in _NOTHING.items():
        if keyword in part and is_nothing(part[keyword]):
            del part[keyword]
    for keyword in _NOTES:
        if isinstance(part.get(keyword), str):
            del part[keyword]
    for keyword in _SIZES:
        value = part.get(keyword)
        if isinstance(value, float) and value.is_integer():
            part[keyword] = int(value)
    most = part.get("maxItems")
    if part.get("uniqueItems") is True and isinstance(most, int) and most <= 1:
        del part["uniqueItems"]
    _drop_condition(part)
    _drop_contained(part)
    anchor = part.pop("$dynamicAnchor", None)  # without dynamic references it is one
    if anchor is not None:
        part.setdefault("$anchor", anchor)


def _drop_condition(part: dict[str, Any]) -> None:
    if "if" not in part or all(_is_any(part.get(name, True)) for name in ("then", "else")):
        for name in ("if", "then", "else"):
            part.pop(name, None)


def _drop_contained(part: dict[str, Any]) -> None:
    """Items that must be in a list, of any kind: their number is that of the list's items."""
    least, most = part.get("minContains", 1), part.get("maxContains")
    if "contains" not in part:
        kept = False
    elif _is_any(part["contains"]):
        kept = not (_is_size(least) and (most is None or _is_size(most)))
        kept = kept or not all(_is_size(part.get(name, 0)) for name in ("minItems", "maxItems"))
        if not kept:
            part["minItems"] = max(least, part.get("minItems", 0))
            if most is not None:
                part["maxItems"] = min(most, part.get("maxItems", most))
    else:
        kept = least != 0 or isinstance(least, bool) or most is not None
    if not kept:
        for name in ("contains", "minContains", "maxContains"):
            part.pop(name, None)


def _is_any(schema: object) -> bool:
    """Return whether every value is one of `schema`."""
    if isinstance(schema, Mapping):
        return _ANNOTATIONS.issuperset(schema)
    return schema is True


def _is_any_text(schema: object) -> bool:
    """Return whether every text is one of `schema`."""
    if not isinstance(schema, Mapping):
        return schema is True
    kind = schema.get("type", "string")
    takes_texts = kind == "string" or (isinstance(kind, list) and "string" in kind)
    return takes_texts and _is_any({key: one for key, one in schema.items() if key != "type"})


def _are_any(dependencies: object) -> bool:
    """Return whether nothing depends on any property."""
    return isinstance(dependencies, Mapping) and all(
        one == [] or _is_any(one) for one in dependencies.values()
    )


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


_NOTHING: Mapping[str, Callable[[Any], bool]] = {
    "uniqueItems": lambda value: value is False,
    "not": lambda value: value is False,
    "propertyNames": _is_any_text,
    "unevaluatedProperties": _is_any,
    "unevaluatedItems": _is_any,
    "dependentRequired": _are_any,
    "dependentSchemas": _are_any,
    "dependencies": _are_any,
    "$recursiveAnchor": lambda value: isinstance(value, bool),
    "$schema": lambda value: isinstance(value, str) and value.rstrip("#") not in _DRAFTS,
    "format": lambda value: isinstance(value, str) and value not in _FORMATS,
}
