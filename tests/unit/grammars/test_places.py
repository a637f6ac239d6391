"""The search for the part of a schema that is at fault: what it finds, and how much it tries."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from common.errors import InvalidRequest
from common.grammar import MAX_GRAMMAR_BYTES, Grammar, GrammarKind
from grammars import compiler as compiling
from grammars.places import MAX_DEAR_TRIES, MAX_TRIED_CHARS, MAX_TRIES, SchemaTrials, place_of
from tests.support.http.edge_model import grammars_of, tiny_model


class CountedTrials:
    """A schema is at fault where it holds the word "bad"; counts the trials and their text."""

    def __init__(self) -> None:
        self.num_tries = 0
        self.num_chars = 0

    def is_bad(self, schema: Mapping[str, Any], is_lenient: bool) -> bool:
        assert not is_lenient
        self.num_tries += 1
        self.num_chars += len(json.dumps(schema))
        return '"bad"' in json.dumps(schema)

    def place(self, schema: Mapping[str, Any], *, are_cheap: bool = True) -> str:
        return place_of(schema, SchemaTrials(self.is_bad, are_cheap=are_cheap))


def wide(num_good: int, bad: dict[str, Any]) -> dict[str, Any]:
    return {"properties": {**{f"p{i}": {"type": "string"} for i in range(num_good)}, "z": bad}}


BAD = {"type": "bad"}


def test_the_innermost_part_is_found() -> None:
    schema = {"items": wide(50, wide(50, {"anyOf": [{}, BAD]}))}
    counted = CountedTrials()
    assert counted.place(schema) == "#/items/properties/z/properties/z/anyOf/1"
    assert counted.num_tries == 1 + 51 + 51 + 2


@pytest.mark.parametrize(("are_cheap", "most"), [(True, MAX_TRIES), (False, MAX_DEAR_TRIES)])
def test_behind_the_last_trial_the_place_is_the_last_one_found(are_cheap: bool, most: int) -> None:
    counted = CountedTrials()
    place = counted.place({"items": {"items": wide(1000, BAD)}}, are_cheap=are_cheap)
    assert (place, counted.num_tries) == ("#/items/items", most)


def test_the_text_that_is_tried_is_bounded() -> None:
    """Each part refers to definitions, with which it is as long as the whole schema."""
    described = {"e": {"description": "x" * 100_000}}
    refers = {f"r{i}": {"$ref": "#/$defs/e"} for i in range(100)}
    counted = CountedTrials()
    schema = {"items": {"properties": refers | {"z": {"allOf": [BAD]}}}, "$defs": described}
    assert counted.place(schema) == "#/items/properties/z/allOf/0", "which is short enough"
    assert counted.num_tries == 1 + 4 + 2
    assert counted.num_chars <= MAX_TRIED_CHARS


def test_what_refers_to_nothing_is_tried_without_definitions() -> None:
    counted = CountedTrials()
    counted.place({"$defs": {"e": {"description": "x" * 1000}}, **wide(10, {})})
    assert counted.num_chars < 2500


@pytest.fixture
def num_chars(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How long each text is that is compiled."""
    sizes: list[int] = []
    compile_text = compiling.GrammarCompiler.compile_text

    def counted(self: compiling.GrammarCompiler, lark: str, limits: Any) -> Any:
        sizes.append(len(lark))
        return compile_text(self, lark, limits)

    monkeypatch.setattr(compiling.GrammarCompiler, "compile_text", counted)
    return sizes


def patterns(count: int) -> dict[str, Any]:
    return {
        f"p{i}": {"type": "string", "pattern": f"^(a|b|cd){{1,{20 + i}}}$"} for i in range(count)
    }


def test_references_to_what_takes_long_are_not_followed_for_long(num_chars: list[int]) -> None:
    """Each of the parts took as long to compile as all that they refer to: 11 s in all."""
    refers = {f"r{i}": {"$ref": "#/$defs/e"} for i in range(30)}
    dear = patterns(1600)
    schema = {
        "$defs": {"e": {"type": "object", "properties": dear, "required": list(dear)}},
        "type": "object",
        "properties": refers | {"z": {"not": {}}},
    }
    text = json.dumps(schema)
    assert 100_000 < len(text) <= MAX_GRAMMAR_BYTES
    grammar = Grammar(GrammarKind.JSON_SCHEMA, text, "guided_json")
    with pytest.raises(InvalidRequest, match=r'followed: #/properties/z: .*"not"'):
        grammars_of(tiny_model()).matcher(grammar)
    assert len(num_chars) < 40
    assert sum(num_chars) < MAX_TRIED_CHARS + 3 * len(text)


def test_patterns_that_take_long_are_tried_with_little_fuel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fuels: list[int] = []
    compile_text = compiling.GrammarCompiler.compile_text

    def counted(self: compiling.GrammarCompiler, lark: str, limits: Any) -> Any:
        fuels.append(limits.initial_lexer_fuel)
        return compile_text(self, lark, limits)

    monkeypatch.setattr(compiling.GrammarCompiler, "compile_text", counted)
    bomb = {"type": "string", "pattern": "^(a?){5000}(b|[^c]{3000}){90}$"}
    properties: dict[str, Any] = {f"r{i}": bomb for i in range(150)}
    schema = {"type": "object", "properties": properties | {"z": {"not": {}}}}
    with pytest.raises(InvalidRequest, match="followed: #/properties/z: "):
        grammars_of(tiny_model()).matcher(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)))
    whole, *tried = fuels
    assert len(tried) > 150
    assert sum(tried) < 5 * whole


def test_a_problem_of_the_lexer_is_looked_for_a_few_times(
    num_chars: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Little fuel would find it everywhere."""
    monkeypatch.setattr(compiling, "LIMITS", compiling.limits_of(50_000))
    large = {"enum": [f"value {i}" for i in range(6000)]}
    compiler = grammars_of(tiny_model())
    for num_good, place in ((4, "#/properties/z"), (50, "#")):
        schema = {"type": "object", "properties": patterns(num_good) | {"z": large}}
        num_chars.clear()
        with pytest.raises(InvalidRequest, match=f"followed: {place}: .*too big"):
            compiler.matcher(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema), "f"))
        assert len(num_chars) <= MAX_DEAR_TRIES + 2
