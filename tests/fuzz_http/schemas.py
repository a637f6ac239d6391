"""JSON schemas whose keywords are combined at random."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from tests.fuzz_http.grammars import any_regex
from tests.fuzz_http.values import NUMBERS, any_text, any_value, changed

_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
_FORMATS = (
    *("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"),
    *("regex", "json-pointer", "unknown", "", "idn-email"),
)
_REFS = ("#", "#/$defs/a", "#/$defs/b", "#/definitions/a", "#/properties/a", "#a", "other.json", "")
_COUNTS = (0, 1, 2, 3, 5, 10, 100, 1000, 10**6, 10**9, 2**63, -1, 1.0, 1.5)
_FACTORS = (1, 2, 3, 7, 10, 97, 0.1, 0.01, 0.25, 99_991, 100_000, 1_000_003, 0, -1, 1e-7, 1e308)


def _numbers(keyword: str) -> Callable[[random.Random, int], dict[str, Any]]:
    return lambda rng, _: {keyword: rng.choice(NUMBERS[:34])}


def _counts(keyword: str) -> Callable[[random.Random, int], dict[str, Any]]:
    return lambda rng, _: {keyword: rng.choice(_COUNTS)}


def _one(keyword: str) -> Callable[[random.Random, int], dict[str, Any]]:
    return lambda rng, depth: {keyword: any_schema(rng, depth - 1)}


def _several(keyword: str) -> Callable[[random.Random, int], dict[str, Any]]:
    return lambda rng, depth: {
        keyword: [any_schema(rng, depth - 1) for _ in range(rng.choice((0, 1, 2, 2, 3, 4)))]
    }


def _named(keyword: str) -> Callable[[random.Random, int], dict[str, Any]]:
    def made(rng: random.Random, depth: int) -> dict[str, Any]:
        names = ["a", "b", "c", any_text(rng)[:50], f"p{rng.randrange(99)}"]
        if keyword == "patternProperties":
            names = [any_regex(rng) for _ in range(3)]
        chosen = names[: rng.randrange(len(names) + 1)]
        return {keyword: {name: any_schema(rng, depth - 1) for name in chosen}}

    return made


def _texts(keyword: str) -> Callable[[random.Random, int], dict[str, Any]]:
    return lambda rng, _: {
        keyword: rng.choice((["a"], ["a", "b"], ["a", "a"], ["z"], [], ["p1"], [1], "a"))
    }


_KEYWORDS: tuple[Callable[[random.Random, int], dict[str, Any]], ...] = (
    lambda rng, _: {"type": rng.choice(_TYPES)},
    lambda rng, _: {"type": rng.choice(_TYPES)},
    lambda rng, _: {"type": rng.sample(_TYPES, rng.randrange(4))},
    lambda rng, _: {"enum": [any_value(rng, 1) for _ in range(rng.choice((0, 1, 2, 5, 60)))]},
    lambda rng, _: {"const": any_value(rng, 2)},
    lambda rng, _: {"pattern": any_regex(rng)},
    lambda rng, _: {"format": rng.choice(_FORMATS)},
    lambda rng, _: {"$ref": rng.choice(_REFS)},
    lambda rng, _: {"multipleOf": rng.choice(_FACTORS)},
    lambda rng, _: {"additionalProperties": rng.random() < 0.5},
    lambda rng, _: {"uniqueItems": rng.random() < 0.5},
    lambda rng, _: {rng.choice(("title", "description", "$id", "$anchor")): any_text(rng)[:200]},
    lambda rng, _: {rng.choice(("default", "examples", "x-own", "$schema")): any_value(rng, 2)},
    *map(_numbers, ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")),
    *map(_counts, ("minItems", "maxItems", "minLength", "maxLength", "minProperties")),
    *map(_counts, ("maxProperties", "minContains", "maxContains")),
    *map(_one, ("items", "items", "additionalProperties", "not", "if", "then", "else", "contains")),
    *map(_one, ("propertyNames", "additionalItems", "unevaluatedProperties", "unevaluatedItems")),
    *map(_several, ("anyOf", "oneOf", "allOf", "prefixItems", "items")),
    *map(_named, ("properties", "properties", "properties", "patternProperties")),
    *map(_named, ("dependentSchemas", "$defs", "definitions", "dependencies")),
    *map(_texts, ("required", "required")),
)


def any_schema(rng: random.Random, depth: int = 3) -> Any:
    """Return a schema: keywords that may contradict each other, at times one that is none."""
    if depth <= 0 or rng.random() < 0.08:
        return rng.choice(({}, True, False, {"type": "integer"}, {"type": "string"}, {"$ref": "#"}))
    made: dict[str, Any] = {}
    for _ in range(rng.choice((1, 1, 2, 2, 3, 4, 7))):
        made |= rng.choice(_KEYWORDS)(rng, depth)
    if rng.random() < 0.1:
        made["$defs"] = {name: any_schema(rng, depth - 1) for name in ("a", "b")}
    return changed(rng, made, 1) if rng.random() < 0.05 else made


def likely_schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    """Return a schema that is followed: of the kind that clients send."""
    kind = rng.randrange(6 if depth > 0 else 4)
    if kind == 0:
        return {"type": "integer", "minimum": rng.choice((0, -5)), "maximum": rng.choice((9, 99))}
    if kind == 1:
        return {"enum": rng.sample(["a", "b", "cc", 1, None, True], rng.randrange(1, 6))}
    if kind == 2:
        return {"type": "string", "maxLength": rng.choice((1, 5, 20))}
    if kind == 3:
        return {"type": "string", "format": rng.choice(_FORMATS[:10])}
    if kind == 4:
        items = likely_schema(rng, depth - 1)
        return {"type": "array", "items": items, "maxItems": rng.choice((0, 1, 3))}
    names = rng.sample(["a", "b", "c", "d e", "é"], rng.randrange(1, 5))
    return {
        "type": "object",
        "properties": {name: likely_schema(rng, depth - 1) for name in names},
        "required": names[: rng.randrange(len(names) + 1)],
        "additionalProperties": rng.random() < 0.3,
    }
