"""Grammars that would take unbounded time or memory, if nothing bounded them."""

from __future__ import annotations

import json
from typing import Any

from common.grammar import Grammar, GrammarKind


def schema(value: Any) -> Grammar:
    """A JSON schema."""
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(value))


def doubling(count: int) -> dict[str, Any]:
    """References that would double with each definition if they were written out."""
    parts: dict[str, Any] = {
        f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"allOf": [
            {"$ref": f"#/$defs/d{i + 1}"}, {"properties": {f"x{i}": {}}}]}]}
        for i in range(count)
    }  # fmt: skip
    return {"$defs": {**parts, f"d{count}": {"type": "object"}}, "$ref": "#/$defs/d0"}


HOSTILE = {
    "doubling references": schema(doubling(40)),
    "a chain of references": schema({"$defs": {
        **{f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(2000)}, "d2000": {}},
        "$ref": "#/$defs/d0"}),
    "itself": schema({"$ref": "#"}),
    "two that name each other": schema(
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
    ),
    "many properties": schema(
        {"properties": (p := {f"p{i}": {"type": "string"} for i in range(3000)}), "required": [*p]}
    ),
    "a long enum": schema({"enum": [f"value {i}" for i in range(6000)]}),
    "huge counts": schema({"type": "array", "minItems": 10**9, "items": {"minLength": 10**9}}),
    "a pattern of patterns": schema({"type": "string", "pattern": "((a{1,99}){1,99}){1,99}"}),
    "a catastrophic pattern": schema({"type": "string", "pattern": "^(([a-z])+.)+[A-Z]([a-z])+$"}),
    "nested repetition": Grammar(GrammarKind.REGEX, "(x+x+)+y"),
    "repeated repetition": Grammar(GrammarKind.REGEX, "((((a{0,999}){0,999}){0,999}){0,999})b"),
    "many alternatives": Grammar(GrammarKind.REGEX, "|".join(f"{i}x" for i in range(12_000))),
    "deep parentheses": Grammar(GrammarKind.REGEX, "(" * 30_000 + "a" + ")" * 30_000),
    "an ambiguous grammar": Grammar(GrammarKind.LARK, 'start: a\na: a a | "x" | '),
    "deep rules": Grammar(GrammarKind.LARK, "start: " + "(" * 20_000 + '"a"' + ")" * 20_000),
}  # fmt: skip
