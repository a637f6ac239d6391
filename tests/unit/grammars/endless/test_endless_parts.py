"""Schemas of which no value has an end are refused, and parts that are such never come."""

from __future__ import annotations

import json
from collections.abc import Iterable
from copy import deepcopy
from itertools import zip_longest
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import InvalidRequest
from common.grammar import Grammar, GrammarKind
from grammars.compiler import GrammarCompiler
from grammars.endless.endless_parts import end_endless
from grammars.parts import GrammarParts, SchemaPart
from grammars.schema_walk import copied_parts
from grammars.texts import json_rule
from tests.support.clocks.lines_run import lines_run
from tests.support.http.edge_model import grammars_of, tiny_model

NUMBER = {"type": "integer"}
NONE: dict[str, Any] = {
    "no constant": {"enum": []},
    "a constant of another type": {"type": "integer", "enum": ["a"]},
    "no type": {"type": []},
    "two types": {"allOf": [{"type": "string"}, {"type": "integer"}]},
    "no number": {"type": "number", "minimum": 2, "maximum": 1},
    "no text": {"type": "string", "minLength": 2, "maxLength": 1},
    "no list": {"type": "array", "minItems": 2, "maxItems": 1},
}
"""Schemas without values."""
ENDLESS: dict[str, Any] = {
    "itself": {"$ref": "#/$defs/x"},
    "each other": {"$ref": "#/$defs/y"},
    "a node that needs a node": {
        "type": "object",
        "properties": {"n": NUMBER, "next": {"$ref": "#/$defs/x"}},
        "required": ["n", "next"],
    },
    "a list that needs a list": {"type": "array", "items": {"$ref": "#/$defs/x"}, "minItems": 1},
    "a first item": {
        "type": "array",
        "prefixItems": [NUMBER, {"$ref": "#/$defs/x"}],
        "minItems": 2,
    },
    "a first item of older drafts": {
        "type": "array",
        "items": [NUMBER],
        "additionalItems": {"$ref": "#/$defs/x"},
        "minItems": 2,
    },
    "any name": {
        "type": "object",
        "additionalProperties": {"$ref": "#/$defs/x"},
        "required": ["other"],
    },
    "any one name": {
        "type": ["object"],
        "properties": {},
        "additionalProperties": {"$ref": "#/$defs/x"},
        "minProperties": 1,
    },
    "by a pattern": {
        "type": "object",
        "patternProperties": {"^n": {"$ref": "#/$defs/x"}},
        "additionalProperties": False,
        "required": ["n"],
    },
    "every choice": {"anyOf": [{"$ref": "#/$defs/y"}, {"$ref": "#/$defs/x"}]},
    "an anchor": {"$anchor": "tree", "type": "array", "items": {"$ref": "#tree"}, "minItems": 1},
    "an escaped name": {"$ref": "#/$defs/a~1b%20c"},
    "a type beside it": {
        "allOf": [
            {"type": "object"},
            {"properties": {"n": {"$ref": "#/$defs/x"}}, "required": ["n"]},
        ]
    },
    "a type around it": {
        "type": "object",
        "allOf": [{"properties": {"n": {"$ref": "#/$defs/x"}}, "required": ["n"]}],
    },
    "a type behind a reference": {
        "$ref": "#/$defs/object",
        "properties": {"n": {"$ref": "#/$defs/x"}},
        "required": ["n"],
    },
    "an object or a list": {
        "type": ["object", "array"],
        "properties": {"n": {"$ref": "#/$defs/x"}},
        "required": ["n"],
        "items": {"$ref": "#/$defs/x"},
        "minItems": 1,
    },
    "a name that is required beside it": {
        "type": "object",
        "properties": {"n": {"$ref": "#/$defs/x"}},
        "allOf": [{"required": ["n"]}],
    },
    "a name that is defined beside it": {
        "type": "object",
        "allOf": [{"properties": {"n": {"$ref": "#/$defs/x"}}}, {"required": ["n"]}],
    },
    "any name, beside another part": {
        "type": "object",
        "additionalProperties": {"$ref": "#/$defs/x"},
        "required": ["other"],
        "allOf": [{"minProperties": 1}],
    },
    "either of two names": {
        "type": "object",
        "properties": {"n": {"$ref": "#/$defs/x"}, "m": {"$ref": "#/$defs/y"}},
        "anyOf": [{"required": ["n"]}, {"required": ["m"]}],
    },
    **{
        f"itself or {name}": {
            "type": "object",
            "properties": {"n": {"anyOf": [{"$ref": "#/$defs/x"}, none]}},
            "required": ["n"],
        }
        for name, none in NONE.items()
    },
}


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return grammars_of(tiny_model())


def defined(part: Any) -> dict[str, Any]:
    """Definitions of which `x` is `part` and others go around through it."""
    x = {"$ref": "#/$defs/x"}
    return {"x": part, "y": dict(x), "a/b c": dict(x), "object": {"type": "object"}}


def behind(part: Any, *, required: bool) -> dict[str, Any]:
    """A schema of which `x` is behind other values."""
    names = ["before", "wrong"] if required else ["before"]
    return {
        "$defs": defined(part),
        "type": "object",
        "properties": {"before": NUMBER, "wrong": {"$ref": "#/$defs/x"}},
        "required": names,
        "additionalProperties": False,
    }


def asked(schema: Any) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema), "guided_json")


def follows(compiler: GrammarCompiler, schema: Any, text: str) -> bool:
    matcher = compiler.matcher(asked(schema))
    tokens = compiler.tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.covers("G22")
@pytest.mark.parametrize("name", ENDLESS)
def test_what_needs_a_value_without_an_end_is_refused(name: str, compiler: GrammarCompiler) -> None:
    for schema in (
        {"$defs": defined(ENDLESS[name]), "$ref": "#/$defs/x"},
        behind(ENDLESS[name], required=True),
    ):
        with pytest.raises(InvalidRequest, match=r"followed: #.*: (no text|Unsatisfiable)"):
            compiler.matcher(asked(schema))


@pytest.mark.covers("G22")
@pytest.mark.parametrize("name", ENDLESS)
def test_it_is_refused_behind_text_that_is_free(name: str, compiler: GrammarCompiler) -> None:
    text = f"start: /(.|\\n)*/ then\nthen: {json_rule(behind(ENDLESS[name], required=True))}\n"
    with pytest.raises(InvalidRequest, match="Unsatisfiable"):
        compiler.matcher(Grammar(GrammarKind.LARK, text, "response_format"))


@pytest.mark.covers("G22")
@pytest.mark.parametrize("name", ENDLESS)
def test_an_optional_value_without_an_end_never_comes(name: str, compiler: GrammarCompiler) -> None:
    schema = behind(ENDLESS[name], required=False)
    assert follows(compiler, schema, '{"before": 1}')
    matcher = compiler.matcher(asked(schema))
    assert not matcher.try_consume_tokens(compiler.tokenizer.tokenize_str(', "'))
    choices = {"$defs": defined(ENDLESS[name]), "anyOf": [{"$ref": "#/$defs/x"}, NUMBER]}
    assert follows(compiler, choices, "17")
    for start in ("{", "["):
        matcher = compiler.matcher(asked(choices))
        assert not matcher.try_consume_tokens(compiler.tokenizer.tokenize_str(start))


@pytest.mark.covers("G22")
@pytest.mark.parametrize("name", ENDLESS)
def test_a_tool_that_is_not_strict_is_served_without_the_reference(
    name: str, compiler: GrammarCompiler
) -> None:
    schema = behind(ENDLESS[name], required=True)
    rule = json_rule(schema, is_lenient=True)
    part = SchemaPart(schema=schema, source="tools.0.function.parameters", is_lenient=True)
    grammar = Grammar(GrammarKind.LARK, f"start: {rule}\n", "tools")
    assert compiler.check(grammar, GrammarParts(schemas=(part,))) == grammar
    made = json.loads(rule.removeprefix("%json "))
    assert made["properties"]["before"] == NUMBER
    assert made["required"] == ["before", "wrong"]


@pytest.mark.covers("G22")
@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (
            {
                "type": "object",
                "properties": {"next": {"$ref": "#"}},
                "additionalProperties": False,
            },
            '{"next": {"next": {}}}',
        ),
        ({"type": "array", "items": {"$ref": "#"}}, "[[], [[]]]"),
        ({"anyOf": [{"type": "array", "items": {"$ref": "#"}, "minItems": 1}, NUMBER]}, "[[3]]"),
        (
            {
                "type": ["object", "null"],
                "properties": {"next": {"$ref": "#"}},
                "required": ["next"],
                "additionalProperties": False,
            },
            '{"next": {"next": null}}',
        ),
        *(
            ({"anyOf": [{"type": "array", "items": {"$ref": "#"}, "minItems": 1}, one]}, text)
            for one, text in (
                ({"type": "integer", "minimum": 1, "maximum": 1}, "[1]"),
                ({"type": "boolean", "enum": [True]}, "[true]"),
                ({"type": "null", "const": None}, "[null]"),
                ({"const": 1.5}, "[1.5]"),
                ({"type": "object", "const": {}}, "[{}]"),
                ({"type": "array", "enum": [[]]}, "[[]]"),
            )
        ),
        (
            {
                "type": "object",
                "anyOf": [
                    {"properties": {"n": {"$ref": "#"}}, "required": ["n"]},
                    {"required": ["n"]},
                ],
            },
            '{"n": 1}',
        ),
        (
            {
                "$defs": {
                    "x": {
                        "type": "object",
                        "properties": {"n": {"$ref": "#/$defs/x"}},
                        "allOf": [{"required": ["n"]}],
                    }
                },
                "$ref": "#/$defs/x/allOf/0",
                "type": "object",
            },
            '{"n": 1}',
        ),
        (
            {
                "$id": "https://example.org/a",
                "$ref": "https://example.org/a#/$defs/x",
                "$defs": {"x": NUMBER},
            },
            "5",
        ),
    ],
)
def test_recursion_with_an_end_stays(
    schema: dict[str, Any], text: str, compiler: GrammarCompiler
) -> None:
    assert '"enum": []' not in json_rule(schema)
    assert follows(compiler, schema, text)


@pytest.mark.covers("G22")
def test_a_part_with_an_address_of_its_own_is_left_alone() -> None:
    inner = {"$id": "https://example.org/b", "type": "array", "items": {"$ref": "#"}, "minItems": 1}
    schema = {"properties": {"a": inner}, "type": "object", "required": ["a"]}
    assert json_rule(schema).count('"$ref"') == 1


@pytest.mark.parametrize("index", ["9" * 5000, "\u0660", "00", "1"])
def test_a_reference_to_an_item_that_is_not_there_has_values(index: str) -> None:
    """Python reads no number of so many digits, and others that JSON pointers do not have."""
    schema = {"anyOf": [{"$ref": "#/anyOf/0"}], "items": {"$ref": f"#/anyOf/{index}"}}
    assert f"#/anyOf/{index}" in json_rule(schema)


REFERENCES = st.integers(0, 3).map(lambda number: {"$ref": f"#/$defs/d{number}"})
LEAVES = st.sampled_from([NUMBER, {"enum": [1]}, True, {"type": ["array", "null"]}])


def larger(parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    named = st.dictionaries(st.sampled_from("ab"), parts, min_size=1)
    some = st.lists(parts, min_size=1, max_size=2)
    return st.one_of(
        st.builds(
            lambda has, needs: {"type": "object", "properties": has, "required": needs},
            named,
            st.lists(st.sampled_from("ab"), unique=True),
        ),
        st.builds(
            lambda first, rest, least: {
                "type": "array",
                "prefixItems": first,
                "items": rest,
                "minItems": least,
            },
            some,
            parts,
            st.integers(0, 3),
        ),
        some.map(lambda choices: {"anyOf": choices}),
        some.map(lambda together: {"allOf": together}),
    )


PARTS = st.recursive(REFERENCES | LEAVES, larger, max_leaves=6)


def has_value(part: Any, definitions: Any, fuel: int) -> bool:
    """Whether `part` has a value of at most `fuel` levels of references: told by trying."""
    if isinstance(part, bool):
        return part

    def all_have(parts: list[Any]) -> bool:
        return all(has_value(one, definitions, fuel) for one in parts)

    if "$ref" in part:
        named = part["$ref"].removeprefix("#/$defs/")
        return fuel > 0 and has_value(definitions[named], definitions, fuel - 1)
    if "anyOf" in part:
        return any(has_value(one, definitions, fuel) for one in part["anyOf"])
    if "allOf" in part:
        return all_have(part["allOf"])
    if part.get("type") == "object":
        has = part["properties"]
        return all_have([has[name] for name in part["required"] if name in has])
    if part.get("type") == "array":
        first, least = part["prefixItems"], part["minItems"]
        return all_have([*first[:least], *([part["items"]] if least > len(first) else [])])
    return True


@pytest.mark.covers("G22")
@given(st.lists(PARTS, min_size=4, max_size=4))
def test_a_reference_is_replaced_where_no_value_ends(parts: list[Any]) -> None:
    definitions = {f"d{number}": part for number, part in enumerate(parts)}
    whole: dict[str, Any] = {"$defs": definitions}
    end_endless(whole, list(copied_parts(whole)), is_lenient=False)
    for name, part in definitions.items():
        if isinstance(part, dict) and "$ref" in part:
            is_kept = "$ref" in whole["$defs"][name]
            # As many levels as there are definitions reach every value that has an end.
            assert is_kept == has_value(part, definitions, len(definitions) + 1)


def beside(parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Parts of which several keywords hold for one value."""
    some = st.lists(parts, min_size=1, max_size=2)
    names = st.lists(st.sampled_from("ab"), unique=True)
    keywords: dict[str, st.SearchStrategy[Any]] = {
        "type": st.sampled_from(["object", "array", "integer", ["object", "array"], ["null"]]),
        "properties": st.dictionaries(st.sampled_from("ab"), parts),
        "required": names,
        "additionalProperties": parts | st.just(False),
        "minProperties": st.integers(0, 1),
        "items": parts,
        "minItems": st.integers(0, 1),
        "allOf": some,
        "anyOf": some,
        "enum": st.sampled_from([[], [1], [{"a": 1}, None]]),
        "$ref": st.integers(0, 3).map("#/$defs/d{}".format),
    }
    return st.fixed_dictionaries({}, optional=keywords)


TOGETHER = st.recursive(REFERENCES | LEAVES, beside, max_leaves=6)


def values(depth: int) -> list[Any]:
    """Some values of at most so many levels."""
    inner = values(depth - 1) if depth else []
    two = [{"a": inner[0], "b": one} for one in inner] if inner else []
    return [1, None, "a", {}, [], *({"a": one} for one in inner), *two, *([one] for one in inner)]


def is_one(value: Any, part: Any, definitions: Any, fuel: int = 8) -> bool:
    """Whether `value` is one of `part`, through at most `fuel` references at one place."""
    if isinstance(part, bool):
        return part

    def also(other: Any) -> bool:
        return is_one(value, other, definitions, fuel)

    def all_inside(inside: Iterable[tuple[Any, Any]]) -> bool:
        return all(is_one(one, its_part, definitions) for one, its_part in inside)

    if "$ref" in part:
        named = definitions[part["$ref"].removeprefix("#/$defs/")]
        if not fuel or not is_one(value, named, definitions, fuel - 1):
            return False
    kinds = {dict: "object", list: "array", int: "integer", str: "string", type(None): "null"}
    kind, wanted = kinds[type(value)], part.get("type", list(kinds.values()))
    if kind not in ([wanted] if isinstance(wanted, str) else wanted):
        return False
    if "enum" in part and value not in part["enum"]:
        return False
    if not (all(map(also, part.get("allOf", ()))) and any(map(also, part.get("anyOf", [True])))):
        return False
    if isinstance(value, dict):
        has, others = part.get("properties", {}), part.get("additionalProperties", True)
        is_whole = value.keys() >= set(part.get("required", ()))
        is_whole = is_whole and len(value) >= part.get("minProperties", 0)
        return is_whole and all_inside((one, has.get(name, others)) for name, one in value.items())
    if isinstance(value, list):
        first, rest = part.get("prefixItems", []), part.get("items", True)
        pairs = zip_longest(value, first[: len(value)], fillvalue=rest)
        return len(value) >= part.get("minItems", 0) and all_inside(pairs)
    return True


@pytest.mark.covers("G22")
@given(st.lists(TOGETHER, min_size=4, max_size=4))
def test_no_reference_to_a_part_with_a_value_is_replaced(parts: list[Any]) -> None:
    definitions = {f"d{number}": part for number, part in enumerate(parts)}
    whole: dict[str, Any] = {"$defs": deepcopy(definitions)}
    copied = list(copied_parts(whole))
    references = [(one, one["$ref"].removeprefix("#/$defs/")) for one in copied if "$ref" in one]
    end_endless(whole, copied, is_lenient=False)
    for name in {name for one, name in references if "$ref" not in one}:
        assert [v for v in values(2) if is_one(v, definitions[name], definitions)] == []


def chain(length: int) -> dict[str, Any]:
    """Definitions of which each needs the next one, and the last one has values."""
    made: dict[str, Any] = {f"d{at}": {"$ref": f"#/$defs/d{at + 1}"} for at in range(length)}
    return {"$defs": {**made, f"d{length}": NUMBER}, "$ref": "#/$defs/d0"}


@pytest.mark.covers("G22")
def test_the_work_grows_with_the_size_and_no_faster() -> None:
    def work(length: int) -> int:
        whole = chain(length)
        parts = list(copied_parts(whole))
        return lines_run(lambda: end_endless(whole, parts, is_lenient=False))

    assert work(2000) < 2.2 * work(1000)
