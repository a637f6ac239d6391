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
        {"properties": (p := {f"p{i}": {"type": "string"} for i in range(1500)}), "required": [*p]}
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

BOUNDED = {
    "many optional properties in Lark": lark(
        "start: %json " + json.dumps({"properties": many(3500)})
    ),
    "many optional properties behind a text": lark(
        'start: "a" x\nx: %json ' + json.dumps({"properties": many(3500)})
    ),
    "many optional properties in nested Lark": lark(
        "start: %lark {\nstart: %json " + json.dumps({"properties": many(3500)}) + "\n}"
    ),
    "one required name many times": schema({"properties": many(3000), "required": ["p0"] * 3000}),
    "a large remainder": schema({"type": "integer", "multipleOf": 1_000_003}),
    "a remainder of many digits": schema({"type": "number", "multipleOf": 0.1234567}),
    "the least integer": schema({"const": -(2**63)}),
    "an integer that rounds to it": schema({"enum": [1, 2 - 2**63]}),
    "the least integer in Lark": lark('start: %json {"const": -9223372036854775808}'),
    "many patterns at once": schema({"allOf": [
        {"type": "string", "pattern": f".*{chr(97 + i)}.{{10}}"} for i in range(26)]}),
    "many levels in Lark": lark("start: %json " + '{"items": ' * 70 + "{}" + "}" * 70),
    "very many schemas": lark("start: " + " | ".join(["%json {}"] * 300)),
}  # fmt: skip
"""They are refused before they are compiled, by what is counted of them."""

SIBLINGS = {
    "patterns of names": schema({"patternProperties": {
        f".*{chr(97 + i)}.{{10}}": {"type": "string"} for i in range(20)}}),
    "names with a pattern": schema({"type": "object", "propertyNames": {"pattern": ".*a.{18}"}}),
    "many items": schema({"type": "array", "items": {"type": "integer"}, "minItems": 100_000}),
    "many first items": schema({"type": "array", "prefixItems": [{"type": "integer"}] * 4000}),
    "a list in a list": schema({"type": "array", "maxItems": 10**6, "items": {
        "type": "array", "maxItems": 10**6, "items": {"type": "array", "minItems": 10**6}}}),
    "a long text": schema({"type": "string", "minLength": 50_000, "maxLength": 100_000}),
    "a long text with a pattern": schema({"pattern": "^[a-z]*x.{50}$", "minLength": 500}),
    "an enum of long texts": schema({"enum": ["x" * 60_000, "x" * 59_999 + "y"]}),
    "a long literal": lark('start: "' + "ab" * 60_000 + '"'),
    "a long literal behind a choice": lark('start: /[ab]{99}/ "' + "ab" * 60_000 + '"'),
    "as many formats": schema({"allOf": [
        {"format": one} for one in ("uuid", "email", "date-time", "uri", "hostname")]}),
    "bounds of bounds": schema({"allOf": [
        {"type": "number", "minimum": 1.23456789 + i, "maximum": 98765.4321 + i}
        for i in range(300)]}),
    "remainders within bounds": schema(
        {"type": "integer", "multipleOf": 10_007, "minimum": 12_345_678, "maximum": 9 * 10**15}),
    "remainders of decimals": schema({"type": "number", "multipleOf": 0.00003}),
    "a product of choices": schema({"allOf": [
        {"anyOf": [{"properties": {f"x{i}{j}": {"type": "string"}}} for j in range(4)]}
        for i in range(6)]}),
    "one of many": schema({"oneOf": [
        {"properties": {f"x{i}": {}}, "required": [f"x{i}"]} for i in range(200)]}),
    "not and if": schema({"not": {"not": {"pattern": ".*a.{18}"}}, "if": {}, "then": {}}),
    "contains": schema({"contains": {"pattern": ".*a.{18}"}, "minContains": 10**6}),
    "a tree": schema({"$defs": {"t": {"properties": {
        "l": {"$ref": "#/$defs/t"}, "r": {"$ref": "#/$defs/t"}}}}, "$ref": "#/$defs/t"}),
    "every letter": Grammar(
        GrammarKind.REGEX, "|".join(rf"\p{{L}}{{{i}}}\p{{N}}" for i in range(300))),
    "any word": Grammar(GrammarKind.REGEX, r"(\w|\d|\s|\W){0,1000}x\w{200}"),
    "states that double": Grammar(GrammarKind.REGEX, ".*a.{300}"),
    "many groups": Grammar(GrammarKind.REGEX, "(" * 200 + "a" + ")" * 200),
    "both at once": lark(
        "start: A\nA: " + " & ".join(f"/.*{chr(97 + i)}.{{10}}/" for i in range(26))),
    "neither": lark("start: A\nA: ~/(.*a.{20}|.*b.{20})/ & /(.*c.{18})/"),
    "ignored text": lark('start: a*\na: "x"\n%ignore /(.*a.{18})/'),
    "parts of a text": lark('start: %regex {"substring_chars": "' + "abc" * 20_000 + '"}'),
    "a sequence": lark("start: " + " ".join(['"a"'] * 20_000)),
    "optional texts": lark("start: " + " ".join(f'"a{i}"?' for i in range(3000))),
    "a chain within its stack": lark(
        "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(1000)) + '\nr1000: "a"'),
    "many tokens": lark("start: T0\n" + "\n".join(f'T{i}: "a" T{i + 1}' for i in range(900))
        + '\nT900: "b"'),
}  # fmt: skip
"""Grammars of the same kinds; each is followed or refused, and none of its steps takes long."""
