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


def lark(text: str) -> Grammar:
    """A Lark grammar."""
    return Grammar(GrammarKind.LARK, text)


def many(count: int) -> dict[str, Any]:
    """Properties that are all optional."""
    return {f"p{i}": {"type": "integer"} for i in range(count)}


CRASHING = {
    "a chain of rules": lark(
        "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(6000)) + '\nr6000: "a"'
    ),
    "a chain of tokens": lark(
        "start: T0\n" + "\n".join(f"T{i}: T{i + 1}" for i in range(5000)) + '\nT5000: "a"'
    ),
    "a ring of rules": lark(
        "start: " + " | ".join(f"r{i}" for i in range(3000)) + "\n"
        + "\n".join(f'r{i}: "a" r{(i + 1) % 3000} | "b{i}"' for i in range(3000))
    ),
    "a longer chain of references": schema({"$defs": {
        **{f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(3000)}, "d3000": {}},
        "$ref": "#/$defs/d0"}),
}  # fmt: skip
"""Their recursion takes more stack than a router's trial has."""

LONG = {
    "patterns that multiply": schema({"$defs": {
        **{f"d{i}": {"allOf": [
            {"$ref": f"#/$defs/d{i + 1}"}, {"pattern": f".*{chr(97 + i)}.{{10}}"}]}
            for i in range(26)},
        "d26": {"type": "string"}}, "$ref": "#/$defs/d0"}),
    "remainders that multiply": schema(
        {"allOf": [{"type": "integer", "multipleOf": part} for part in (97, 101, 103, 107)]}
    ),
    "many remainders": schema(
        {"anyOf": [{"type": "integer", "multipleOf": 99_000 + part} for part in (1, 3, 7, 9, 11)]}
    ),
}  # fmt: skip
"""They meet a limit of their trial: of CPU, of memory, or of what they weigh."""
