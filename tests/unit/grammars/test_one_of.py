"""Which choices exclude each other, so that one of them is any of them."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest

from common.errors import InvalidRequest
from grammars.compiler import GrammarCompiler
from grammars.one_of import OneOf
from tests.support.clocks.lines_run import lines_run
from tests.unit.grammars.matching import follows_schema


def with_any_of(part: dict[str, Any], whole: dict[str, Any] | None = None) -> None:
    OneOf(whole or part).with_any_of(part)


def ref(name: str) -> dict[str, Any]:
    return {"$ref": f"#/$defs/{name}"}


def least(bound: float, **more: Any) -> dict[str, Any]:
    return {"type": "integer", "minimum": bound} | more


def most(bound: float, **more: Any) -> dict[str, Any]:
    return {"type": "integer", "maximum": bound} | more


def an_object(name: str, part: Any, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {name: part}, "required": [name]} | more


EXCLUDING: list[list[Any]] = [
    [most(1), least(2)],
    [{"type": "number", "maximum": 0.5}, {"type": "number", "exclusiveMinimum": 0.5}],
    [{"type": "number", "exclusiveMaximum": 2}, least(2)],
    # As the fourth draft has it.
    [{"type": "number", "maximum": 2, "exclusiveMaximum": True}, least(2)],
    [{"type": "integer", "minimum": 1, "maximum": 3}, least(7), most(0), {"type": "string"}],
    [{"const": -1}, least(0)],
    [{"enum": [-1, -2]}, least(0, maximum=9), {"type": ["string", "null"]}],
    [{"const": 1}, {"const": 2}, {"const": "1"}, {"const": True}, {"const": None}],
    [{"enum": [[1], "a"]}, {"enum": ["b", {"a": 1}]}],
    [{"type": "string", "maxLength": 3}, {"type": "string", "minLength": 4}],
    [{"type": "array", "maxItems": 1}, {"type": "array", "minItems": 2}],
    [an_object("a", most(1)), an_object("a", least(2))],
    [an_object("b", an_object("a", most(1))), an_object("b", an_object("a", least(2)))],
    [False, most(1), least(2)],
    [most(1)],
]
SHARING: list[list[Any]] = [
    [most(2), least(2)],
    [most(3), least(2), {"type": "string"}],
    [{"type": "number"}, {"type": "integer"}],
    [{"maximum": 1}, {"minimum": 2}],  # a text is of both
    [{"const": 3}, least(0)],
    [{"const": 1}, {"enum": [1.0, 2]}],
    [{"const": [1]}, {"const": [1.0]}],
    [{"type": "number", "multipleOf": 3}, {"type": "number", "multipleOf": 5}],
    [{"type": "boolean"}, {"type": ["boolean", "null"]}],
    [{"type": "string", "maxLength": 4}, {"type": "string", "minLength": 4}],
    [an_object("a", most(1), required=[]), an_object("a", least(2))],
    [an_object("a", {"maximum": 1}), an_object("a", {"minimum": 2})],
    [an_object("a", most(1)), an_object("b", least(2))],
    [{"$ref": "#/x", "maximum": 1, "type": "integer"}, least(2)],
    [True, most(1)],
    [most(1), least("x")],  # type: ignore[arg-type]
    [most(float("nan")), least(2)],
    [{"type": 5, "maximum": 1}, least(2, type=[5])],
]


@pytest.mark.parametrize("choices", EXCLUDING, ids=json.dumps)
def test_choices_that_exclude_each_other_are_any_of_them(choices: list[Any]) -> None:
    part = {"oneOf": choices, "title": "x"}
    with_any_of(part)
    assert part == {"anyOf": choices, "title": "x"}


@pytest.mark.parametrize("choices", SHARING, ids=json.dumps)
def test_choices_that_may_share_a_value_stay(choices: list[Any]) -> None:
    part = {"oneOf": choices}
    with_any_of(part)
    assert part == {"oneOf": choices}


def test_the_type_around_choices_counts() -> None:
    part = {"type": "integer", "oneOf": [{"maximum": 1}, {"minimum": 2}]}
    with_any_of(part)
    assert "anyOf" in part


@pytest.mark.parametrize(
    "part",
    [{"oneOf": [most(1), least(2)], "anyOf": [most(0)]}, {"oneOf": 5}, {}],
    ids=["both", "none", "nothing"],
)
def test_other_parts_stay(part: dict[str, Any]) -> None:
    before = dict(part)
    with_any_of(part)
    assert part == before


def test_more_choices_than_pairs_are_looked_at_stay() -> None:
    part = {"oneOf": [{"const": number} for number in range(65)]}
    with_any_of(part)
    assert "oneOf" in part


@pytest.mark.parametrize(
    ("choices", "texts", "others"),
    [
        ([most(1), least(20)], ["1", "-7", "20", "31"], ["2", "19"]),
        ([{"const": -1}, least(0, maximum=9)], ["-1", "0", "9"], ["-2", "10"]),
        (
            [{"type": "number", "maximum": 0.5}, {"type": "number", "minimum": 0.75}],
            ["0.5", "0.75", "0.8", "0.0", "3"],
            ["0.6", "0.74"],
        ),
        (
            [an_object("a", most(1)), an_object("a", least(5))],
            ['{"a": 1}', '{"a": 6}'],
            ['{"a": 3}'],
        ),
    ],
)
def test_they_are_followed(
    compiler: GrammarCompiler, choices: list[Any], texts: list[str], others: list[str]
) -> None:
    for text in texts:
        assert follows_schema(compiler, {"oneOf": choices}, text), text
    for text in others:
        assert not follows_schema(compiler, {"oneOf": choices}, text), text


def test_the_work_grows_with_the_length_of_what_is_listed() -> None:
    def look(length: int) -> None:
        names = [str(number) for number in range(length)]
        known = dict.fromkeys(names, True)
        with_any_of({"oneOf": [{"enum": [name + kind for name in names]} for kind in "xy"]})
        with_any_of({"oneOf": [{"properties": known, "required": names}] * 2})

    short, long = (lines_run(partial(look, length)) for length in (200, 400))
    assert long < 2.2 * short


def test_choices_that_share_values_are_refused(compiler: GrammarCompiler) -> None:
    with pytest.raises(InvalidRequest, match="oneOf"):
        follows_schema(compiler, {"oneOf": [most(2), least(2)]}, "2")


# --- references -----------------------------------------------------------------------------------

DEFINED: dict[str, Any] = {
    "few": most(1),
    "many": least(2),
    "also": ref("many"),
    "cat": an_object("kind", {"const": "cat"}),
    "dog": an_object("kind", ref("dogs")),
    "dogs": {"enum": ["dog", "puppy"]},
    "leaf": an_object("kind", {"const": "leaf"}),
    "node": an_object("next", ref("tree"), required=["next", "kind"])
    | {"properties": {"next": ref("tree"), "kind": {"const": "node"}}},
    "tree": {"oneOf": [ref("leaf"), ref("node")]},
    "itself": ref("itself"),
    "ring": an_object("next", ref("ring")),
    "never": False,
}


@pytest.mark.parametrize(
    "choices",
    [
        [ref("few"), ref("many")],
        [ref("few"), ref("also"), {"type": "null"}],
        [ref("few") | {"description": "x", "maximum": 9}, least(2)],
        [ref("cat"), ref("dog")],
        [ref("leaf"), ref("node"), ref("cat")],
        [an_object("pet", ref("cat")), an_object("pet", ref("dog"))],
        [ref("never"), least(2)],
    ],
    ids=json.dumps,
)
def test_choices_are_known_by_what_they_refer_to(choices: list[Any]) -> None:
    part = {"oneOf": choices}
    with_any_of(part, {"$defs": DEFINED, "properties": {"a": part}})
    assert part == {"anyOf": choices}


@pytest.mark.parametrize(
    "choices",
    [
        [ref("few"), most(0)],
        [ref("many"), ref("also")],
        [ref("itself"), least(2)],
        [ref("ring"), ref("ring")],
        [ref("gone"), least(2)],
        [{"$ref": "#few"}, least(2)],
        [{"$ref": "https://a.example/b"}, least(2)],
        [{"$ref": 5}, least(2)],
    ],
    ids=json.dumps,
)
def test_choices_that_refer_to_what_shares_or_is_not_known_stay(choices: list[Any]) -> None:
    part = {"oneOf": choices}
    with_any_of(part, {"$defs": DEFINED, "properties": {"a": part}})
    assert part == {"oneOf": choices}


def test_references_in_a_part_with_an_address_of_its_own_are_not_followed() -> None:
    part = {"oneOf": [ref("few"), ref("many")]}
    with_any_of(part, {"$id": "https://a.example", "$defs": DEFINED, "properties": {"a": part}})
    assert "anyOf" in part
    part = {"oneOf": [ref("few"), ref("many")]}
    own = {"$id": "https://b.example", "items": part}
    with_any_of(part, {"$defs": DEFINED, "properties": {"a": own}})
    assert "oneOf" in part


def test_what_refers_to_itself_is_read_for_a_bounded_time() -> None:
    def look(num_names: int) -> None:
        names = [str(number) for number in range(num_names)]
        part = {"oneOf": [ref("a"), ref("b")]}
        one: dict[str, Any] = {
            "type": "object",
            "properties": dict.fromkeys(names, part["oneOf"][0]),
            "required": names,
        }
        with_any_of(part, {"$defs": {"a": one, "b": one}, "properties": {"x": part}})
        assert "oneOf" in part

    assert lines_run(partial(look, 100)) < 400_000


def test_a_union_as_pydantic_writes_it_is_followed(compiler: GrammarCompiler) -> None:
    pet = {"oneOf": [ref("cat"), ref("dog")], "discriminator": {"propertyName": "kind"}}
    schema = {"$defs": DEFINED, **an_object("pet", pet)}
    assert follows_schema(compiler, schema, '{"pet": {"kind": "cat"}}')
    assert follows_schema(compiler, schema, '{"pet": {"kind": "puppy"}}')
    assert not follows_schema(compiler, schema, '{"pet": {"kind": "cow"}}')
    tree = {"$defs": DEFINED, **ref("tree")}
    leaf = '{"kind": "leaf"}'
    assert follows_schema(compiler, tree, f'{{"next": {leaf}, "kind": "node"}}')
    assert not follows_schema(compiler, tree, '{"next": 5, "kind": "node"}')


@pytest.mark.parametrize("own", [None, "https://a.example/b"])
def test_what_refers_to_a_choice_finds_it(compiler: GrammarCompiler, own: str | None) -> None:
    place = own or ""
    kind = {"oneOf": [{"oneOf": [{"const": "cat"}, {"const": 1}]}, {"type": "null"}]}
    more = {
        "also": {"$ref": f"{place}#/properties/kind/oneOf/0/oneOf/1"},
        "oneOf": {"type": "boolean"},
        "same": {"$ref": f"{place}#/properties/oneOf"},
    }
    schema = {
        "type": "object",
        "properties": {"kind": kind, **more},
        "required": ["kind", *more],
        "additionalProperties": False,
    } | ({"$id": own} if own else {})
    assert follows_schema(
        compiler, schema, '{"kind": "cat", "also": 1, "oneOf": true, "same": true}'
    )
    assert not follows_schema(
        compiler, schema, '{"kind": "cat", "also": "cat", "oneOf": true, "same": true}'
    )


def test_references_in_a_part_with_an_address_of_its_own_stay() -> None:
    part = {"$id": "https://b.example", "$ref": "#/oneOf/0", "anyOf": [{"const": 1}]}
    whole = {"oneOf": [{"const": "a"}, {"const": "b"}], "$defs": {"own": part}}
    one_of = OneOf(dict(whole))
    one_of.with_any_of(whole)
    one_of.rename(whole, [whole, part])
    assert part["$ref"] == "#/oneOf/0"


def test_a_reference_is_read_as_far_as_it_leads() -> None:
    def look(num_steps: int) -> None:
        part = {"$ref": "#/oneOf" + "/0/oneOf" * num_steps}
        whole = {"oneOf": [{"const": "a"}, {"const": "b"}]}
        one_of = OneOf(dict(whole))
        one_of.with_any_of(whole)
        one_of.rename(whole, [part])
        assert part["$ref"].startswith("#/anyOf/0/oneOf")

    short, long = (lines_run(partial(look, num_steps)) for num_steps in (200, 400))
    assert long < 1.2 * short
